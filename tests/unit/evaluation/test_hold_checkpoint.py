"""A checkpoint that is being evaluated stays, whatever the retention of its run."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.fake import fake_checkpoint
from tests.distributed.spawn import run_ranks


def hold(run_dir: Path, model: Path) -> tuple[str, str, list[int], list[int]]:
    import torch.distributed as dist

    from aligner.checkpoint.pins import pinned_steps
    from aligner.distributed.collectives import barrier
    from aligner.distributed.context import RunContext
    from aligner.distributed.platform import current
    from aligner.evaluation.sampling import hold_checkpoint

    context = RunContext(run_dir.parent / "evaluation", dist.get_rank(), dist.get_world_size(), current())
    held, other = hold_checkpoint(str(run_dir), context), hold_checkpoint(str(model), context)
    during = sorted(pinned_steps(run_dir / "checkpoints"))
    barrier()
    context.held.close()
    barrier()
    return held, other, during, sorted(pinned_steps(run_dir / "checkpoints"))


def test_the_newest_checkpoint_of_a_run_is_held_until_the_command_ends(tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", tmp_path / "model"
    for step in (2, 4):
        fake_checkpoint(run_dir / "checkpoints", step)
    model.mkdir()
    (model / "config.json").write_text("{}")
    newest = str(run_dir / "checkpoints" / "step_00000004")
    for found in run_ranks(2, hold, run_dir, model):
        assert found == (newest, str(model), [4], [])
