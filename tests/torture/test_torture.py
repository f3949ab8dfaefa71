"""Five seeded kills: resuming works after each, no checkpoint is lost, the result is that of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.harness import prepare, torture


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    files = prepare(tmp_path)
    assert len(torture(tmp_path, files, "dp2", kills=3, seed=1)) == 3
    assert len(torture(tmp_path, files, "tp2", kills=2, seed=2)) == 2
