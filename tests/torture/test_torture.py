"""Five seeded kills: resuming works after each, no checkpoint is lost, the result is that of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.harness import prepare, torture


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    files = prepare(tmp_path)
    for layout, kills, seed in (("dp2", 3, 1), ("tp2", 2, 2)):
        moments, runs = torture(tmp_path, files, layout, kills, seed)
        assert len(moments) == kills and runs
