"""Models of all roles over Megatron-core. Importing :mod:`aligner.distributed` first adapts Megatron on a CPU."""

import aligner.distributed  # noqa: F401
