"""``run_dir/config.yaml``: what a run was started with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from aligner.config.compose import compose
from aligner.config.run_file import check_run_owner, write_run_config
from aligner.errors import ConfigError


def test_written_whole_and_replaced_by_the_next_life(tmp_path: Path) -> None:
    for steps in (5, 10):
        root = compose("sft", ["model.path=m", "data.train=t", f"trainer.max_steps={steps}"])
        write_run_config(tmp_path / "run", root)
        values = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert values["command"] == "sft" and values["trainer"]["max_steps"] == steps
        assert values["actor"]["model"]["path"] == "m"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_run_directory_belongs_to_one_command(tmp_path: Path) -> None:
    assert not check_run_owner(tmp_path, "sft")
    write_run_config(tmp_path, compose("sft", ["model.path=m", "data.train=t"]))
    assert check_run_owner(tmp_path, "sft")
    with pytest.raises(ConfigError, match="holds a run of `sft`, not of `ppo`"):
        check_run_owner(tmp_path, "ppo")
