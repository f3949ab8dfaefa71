"""``make bench``: measures Aligner against plain transformers on SmolLM2-135M-Instruct, side by side in one run.

Prints a table and leaves ``runs/bench/results.json``: rows ``{name, ours, unit, peer, peer_value, ratio, target}``.
``ratio`` is ours by the peer's: of rates higher is better, of seconds lower; ``target`` is what it, or ``ours`` where
there is no peer, should reach. Both sides take turns on the same prompts, tokens, dtype and threads; figures are
medians.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path("runs/bench/results.json")
PARTS = ("generation_bf16", "generation_fp32", "training_bf16", "training_fp32", "checkpoint", "ppo")


def main() -> int:
    model = Path(os.environ.get("ALIGNER_MODELS", "models")) / "smollm2-135m-instruct"
    if not (model / "config.json").is_file():
        subprocess.run([sys.executable, "-m", "aligner", "convert", "smollm2_135m", str(model)], check=True)
    rows: list[dict[str, Any]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    for part in PARTS:  # each in a process of its own, so that memory and thread settings do not leak
        print(f"measuring {part} ...", flush=True)
        command = [sys.executable, "-m", "tests.benchmarks.measure", part, str(model), str(RESULTS.parent)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    show(rows)
    print(f"results: {RESULTS}")
    return 0


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="SmolLM2-135M-Instruct on this machine", title_justify="left")
    for column in ("measure", "ours", "unit", "peer", "peer's", "ratio", "target"):
        table.add_column(column, justify="left" if column in ("measure", "unit", "peer", "target") else "right")
    for row in rows:
        numbers = [row["ours"], row["peer_value"], row["ratio"]]
        ours, peer_value, ratio = ("" if number is None else f"{number:.4g}" for number in numbers)
        table.add_row(row["name"], ours, row["unit"], row["peer"] or "", peer_value, ratio, row["target"] or "")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
