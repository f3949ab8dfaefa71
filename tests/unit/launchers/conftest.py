"""Jobs against stand-ins of Slurm's programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fake_slurm import FakeSlurm


@pytest.fixture
def fake_slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


@pytest.fixture
def rank_program(tmp_path: Path) -> list[str]:
    """A command that notes its words and environment in RANK_NOTES and ends with the rank's code of RANK_CODES."""
    path = tmp_path / "rank.py"
    path.write_text(
        "import json, os, sys\n"
        "rank = int(os.environ['SLURM_PROCID'])\n"
        "with open(os.environ['RANK_NOTES'], 'a') as notes:\n"
        "    notes.write(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n')\n"
        "codes = os.environ.get('RANK_CODES', '0').split(',')\n"
        "code = int(codes[rank % len(codes)])\n"
        "if code < 0: os.kill(os.getpid(), -code)\n"
        "if code == 75: open(os.environ['RANK_RUN'] + '/restart_requested', 'w').write('SIGUSR1')\n"
        "sys.exit(code)\n"
    )
    return [sys.executable, str(path)]
