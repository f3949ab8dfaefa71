"""``make torture``: 50 random kills over two layouts; the result is in ``runs/torture/result.json``."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.torture.harness import LAYOUTS, prepare, torture


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--moments", type=int, default=50, help="kills, over all layouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/torture"))
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    began = time.monotonic()
    files = prepare(options.directory.resolve())
    moments, runs = [], 0
    for number, layout in enumerate(LAYOUTS):
        share = options.moments // len(LAYOUTS) + (number < options.moments % len(LAYOUTS))
        found, compared = torture(options.directory.resolve(), files, layout, share, options.seed)
        moments, runs = moments + found, runs + compared
    result = {
        "moments": len(moments),
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
        "layouts": dict(Counter(moment.layout for moment in moments)),
        "phases": dict(Counter(moment.phase for moment in moments)),
        "checkpoints_verified": sum(moment.checkpoints for moment in moments),  # a lost or damaged one ends the torture
        "runs_equal_to_the_undisturbed": runs,  # as does a run that ends differently
        "kills": [asdict(moment) for moment in moments],
    }
    path = options.directory / "result.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(moments)} kills survived in {result['seconds']} s: {result['phases']}; {path}")


if __name__ == "__main__":
    main()
