"""Finished rollout chunks of the step in progress: kept beside the checkpoint at a stop, reused by the next life."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligner.algorithms.run import TrainingRun
from aligner.checkpoint import manifest
from aligner.distributed.context import RunContext
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.buffer import drop_chunks, load_chunks, save_chunks


class RolloutChunks:
    """Holds what a step has sampled until its training has ended. All methods are collective.

    ``sampled_with``: what the samples depend on besides prompts and weights; JSON values.
    """

    def __init__(self, context: RunContext, training: TrainingRun, sampled_with: Mapping[str, Any]) -> None:
        self._run_dir = context.run_dir
        self._step = training.step + 1
        self._sampled_with = sampled_with
        self._chunks: list[RolloutBatch] = []
        if context.resume_from is not None:
            digest = manifest.digest(context.resume_from)
            self._chunks = load_chunks(self._run_dir, self._step, digest, sampled_with)
            if self._chunks:
                samples = sum(len(chunk) for chunk in self._chunks)
                training.progress.message(f"step {self._step} goes on with {samples} samples that are already there")
        training.keep_unfinished(self.keep)

    def of_step(self, step: int) -> list[RolloutBatch]:
        """The finished chunks of ``step``; :func:`~aligner.rollout.collect.collect` adds to the list."""
        if step != self._step:
            self._step, self._chunks = step, []
        return self._chunks

    def trained(self) -> None:
        """The step's samples have been used: an interruption no longer needs them."""
        self._chunks = []
        drop_chunks(self._run_dir)

    def keep(self, checkpoint: Path) -> str:
        """Write the finished chunks, tied to ``checkpoint``, the step before; says what was written."""
        if not self._chunks:
            return ""
        what = f"{sum(len(chunk) for chunk in self._chunks)} samples of step {self._step}"
        reason = save_chunks(self._run_dir, self._step, self._chunks, manifest.digest(checkpoint), self._sampled_with)
        return f"not {what}, which are sampled anew ({reason})" if reason else what
