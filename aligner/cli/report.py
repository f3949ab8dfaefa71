"""``aligner report RUN``: one self-contained HTML page. See ``aligner/monitoring/report.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aligner.cli.options import OptionParser


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises AlignerError."""
    parser = OptionParser("report", "Write one HTML page about a run (or a directory of runs); it opens from disk.")
    parser.add_argument("run", type=Path, help="run directory, or a directory of runs such as runs/demo")
    parser.add_argument("--output", type=Path, help="file to write (default: RUN/report.html)")
    options = parser.parse_args(list(arguments))

    from aligner.monitoring.report import build_report

    print(build_report(options.run, options.output))
    return 0
