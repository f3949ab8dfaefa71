"""The random states of one rank: Python, numpy, torch (CPU and CUDA) and Megatron's tracker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def rng_state() -> dict[str, Any]:
    """This rank's random states; tensors and plain values only, so that it loads without running code."""
    version, internal, gauss = random.getstate()
    generator, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [generator, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from :func:`rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    generator, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((generator, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    get_cuda_rng_tracker().set_states(state["tracker"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
