"""Devices, processes and process groups.

Importing this package decides between CUDA and CPU and, on a CPU, adapts Megatron; so every module that imports
``megatron`` imports this package first.
"""

from aligner.distributed import cpu_compat

cpu_compat.install()
