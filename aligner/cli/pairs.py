"""``aligner pairs``: sampled responses, labelled by a rule, become pairs. See ``aligner/rewards/pairs.py``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from aligner.cli.options import OptionParser
from aligner.errors import CheckpointError, ConfigError, DataError


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises AlignerError."""
    parser = OptionParser("pairs", "Label sampled responses (`aligner generate`) by a rule: best against worst.")
    parser.add_argument("samples", type=Path, help="JSONL written by `aligner generate`, several samples a prompt")
    parser.add_argument("output", type=Path, help="JSONL of pairs to write, for `aligner rm data.train=`")
    parser.add_argument("--rule", default="concise", help="built-in rule (default: concise)")
    parser.add_argument("--min-margin", type=float, default=0.05, help="smallest score difference of a pair")
    parser.add_argument("--held-out", type=Path, help="also write every Nth pair here instead of into OUTPUT")
    parser.add_argument("--held-out-every", type=int, default=8, help="N of --held-out (default: 8)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    options = parser.parse_args(list(arguments))

    targets = [options.output, *([options.held_out] if options.held_out else [])]
    _check_targets(options.samples, targets, options.overwrite)
    if options.held_out_every < 2:
        raise ConfigError(
            f"--held-out-every {options.held_out_every}: must be 2 or more, or nothing is left to train on"
        )

    from aligner.data.jsonl import IndexedJsonl
    from aligner.rewards.pairs import label_pairs
    from aligner.rewards.rules import get_rule

    samples = IndexedJsonl(str(options.samples))
    rows = ((samples.where(index), samples[index]) for index in range(len(samples)))
    pairs = list(label_pairs(rows, get_rule(options.rule), options.min_margin))
    if options.held_out and len(pairs) < 2:
        raise DataError(
            f"{options.samples} gives {len(pairs)} pair, and --held-out takes the first one, so none is left for "
            f"{options.output}; sample more prompts, lower --min-margin, or leave --held-out out"
        )
    held_out = pairs[:: options.held_out_every] if options.held_out else []
    training = [pair for index, pair in enumerate(pairs) if not held_out or index % options.held_out_every]
    for target, content in zip(targets, (training, held_out), strict=False):
        try:
            _write(target, content)
        except OSError as error:
            raise CheckpointError(
                f"{target} cannot be written ({error.strerror or error}); choose another file"
            ) from error
        print(f"{len(content)} pairs to {target}")
    return 0


def _check_targets(samples: Path, targets: Sequence[Path], overwrite: bool) -> None:
    """Every file is another one, and none is there already unless it may be replaced."""
    taken = {samples.resolve(): "the samples"}
    for target, what in zip(targets, ("OUTPUT", "--held-out"), strict=False):
        if target.resolve() in taken:
            raise ConfigError(f"{what} is {target}, and so is {taken[target.resolve()]}; choose another file")
        if target.is_dir():
            raise ConfigError(f"{what} is {target}, a directory; give a file")
        if target.exists() and not overwrite:
            raise ConfigError(f"{target} exists; choose another file or give --overwrite")
        taken[target.resolve()] = what


def _write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)
