"""Whether a life that was asked to stop asks to be started again."""

from __future__ import annotations

from aligner.distributed.collectives import broadcast_object, on_all_ranks
from aligner.distributed.context import RunContext
from aligner.distributed.stop import StopRequest
from aligner.monitoring import lives
from aligner.rollout.buffer import kept_samples


def ask_for_restart(context: RunContext, request: StopRequest, step: int) -> bool:
    """Leave ``RUN/restart_requested`` when ``request`` wants a restart and restarts have made progress. Collective.

    The launcher of the job reads the file; the next life removes it. ``step``: the last finished one.
    """

    def decide() -> bool:
        if context.rank != 0 or not request.restart:
            return False
        samples = kept_samples(context.run_dir, step + 1)
        if lives.no_progress(lives.read_lives(context.run_dir), step=step, samples=samples):
            print("the last restarts made no progress, so no further one is asked for", flush=True)
            return False
        lives.request_restart(context.run_dir, request.reason)
        return True

    return broadcast_object(on_all_ranks(decide))
