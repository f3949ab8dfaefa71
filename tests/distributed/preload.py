"""What every rank of a test needs, imported once by the fork server of ``spawn.py``."""

from aligner.distributed import topology  # adapts Megatron before it is imported

# isort: split
from megatron.core import dist_checkpointing, optimizer
from megatron.core.models import gpt

__all__ = ["dist_checkpointing", "gpt", "optimizer", "topology"]
