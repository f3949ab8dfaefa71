# shellcheck shell=bash
# Environment of the ranks of a Slurm job. Sourced by the job's script, before cluster.env; what the shell that submits has
# set stays. The only place with NCCL_* settings.

export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Megatron overlaps communication with computation in the order in which kernels are launched: one queue keeps that order.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
export PYTHONUNBUFFERED=1
