"""The stand-in for CUDA: what it replaces, that it replaces nothing else, and nothing at all beside CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from aligner.distributed import cpu_compat
from aligner.distributed.cpu_adam import CpuAdam

EXPECTED = {
    "torch.cuda.current_device",
    "torch.cuda.set_device",
    "torch.cuda.synchronize",
    "torch.cuda.is_current_stream_capturing",
    "torch.cuda.stream",
    "torch.cuda.current_stream",
    "torch.cuda.default_stream",
    "torch.cuda.get_rng_state",
    "torch.cuda.set_rng_state",
    "torch.cuda.manual_seed",
    "torch.cuda.random.get_rng_state",
    "torch.cuda.random.set_rng_state",
    "torch.cuda.nvtx.range_push",
    "torch.cuda.nvtx.range_pop",
    "torch.Tensor.cuda",
    "torch.nn.Module.cuda",
    "megatron.core.jit.jit_fuser",
    "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.core.optimizer.Adam",
    "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER",
    "megatron.core.optimizer.distrib_optimizer.Adam",
    "megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE",
    "megatron.core.optimizer.distrib_optimizer.USING_APEX_OPTIMIZER",
    "megatron.core:'cuda'",
    "megatron.core:'torch.cuda.FloatTensor'",
    "megatron.core:'torch.cuda.HalfTensor'",
    "megatron.core:'torch.cuda.BFloat16Tensor'",
}

# Run in a new interpreter: remembers every attribute of torch, installs, and prints what has changed.
PROBE = """
import json, sys
import torch, torch.distributed, torch.cuda.nvtx, torch.cuda.random, torch.nn.functional
torch.cuda.is_available = lambda: PRESENT

def attributes():
    owners = {"torch": torch, "torch.cuda": torch.cuda, "torch.cuda.random": torch.cuda.random,
              "torch.cuda.nvtx": torch.cuda.nvtx, "torch.Tensor": torch.Tensor, "torch.nn.Module": torch.nn.Module,
              "torch.nn.functional": torch.nn.functional, "torch.distributed": torch.distributed,
              "torch.optim.Optimizer": torch.optim.Optimizer}
    return {f"{owner}.{name}": id(value) for owner, holder in owners.items() for name, value in vars(holder).items()}

before, finders = attributes(), list(sys.meta_path)
import aligner.distributed
after = attributes()
print(json.dumps({
    "changed": sorted(k for k in before if after[k] != before[k]),
    "added": sorted(set(after) - set(before)),
    "finders": len(sys.meta_path) - len(finders),
    "installed": aligner.distributed.cpu_compat.installed(),
}))
"""


def _probe(present: bool) -> dict[str, Any]:
    code = PROBE.replace("PRESENT", str(present))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_the_list_of_replacements_is_this() -> None:
    assert set(cpu_compat.REPLACED) == EXPECTED
    assert len(cpu_compat.REPLACED) == len(EXPECTED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced where CUDA is present")
def test_in_torch_exactly_the_listed_attributes_change() -> None:
    found = _probe(present=False)
    # Tensor.cuda is inherited, so there it is a new attribute.
    assert set(found["changed"]) | set(found["added"]) == set(cpu_compat.TORCH_ATTRIBUTES)
    assert found["installed"] and found["finders"] == 1


def test_nothing_is_replaced_where_cuda_is_present() -> None:
    found = _probe(present=True)
    assert found["changed"] == []
    assert found["added"] == []
    assert found["finders"] == 0 and not found["installed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced where CUDA is present")
def test_megatron_has_the_listed_attributes_and_constants() -> None:
    import importlib

    for module, names in cpu_compat.MEGATRON_ATTRIBUTES.items():
        for name, value in names.items():
            assert getattr(importlib.import_module(module), name) is value

    from megatron.core.optimizer import clip_grads

    constants = clip_grads.clip_grad_by_total_norm_fp32.__code__.co_consts
    assert "torch.FloatTensor" in constants and "torch.cuda.FloatTensor" not in constants


def test_importing_megatron_first_is_an_error() -> None:
    code = "import megatron.core, aligner.distributed"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    if torch.cuda.is_available():
        assert run.returncode == 0
    else:
        assert run.returncode != 0 and "before megatron.core" in run.stderr


def test_constants_are_exchanged_everywhere_in_a_function_and_nowhere_else() -> None:
    source = textwrap.dedent(
        """
        kinds = ("cuda", "cudart")
        def outer(device="cuda"):
            def inner(t):
                return t in ["torch.cuda.HalfTensor", "other"], f"rank/cuda"
            return device, inner
        """
    )
    scope: dict[str, Any] = {}
    exec(cpu_compat.exchange_constants(compile(source, "<test>", "exec")), scope)
    assert scope["kinds"] == ("cpu", "cudart")
    device, inner = scope["outer"]()
    assert device == "cpu"
    assert inner("torch.HalfTensor") == (True, "rank/cuda")


@pytest.mark.parametrize("decoupled", [True, False])
def test_cpu_adam_equals_torch(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = CpuAdam(ours, adam_w_mode=decoupled, **settings)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **settings)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert optimizer.param_groups[0]["step"] == 4
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in optimizer.state.values())
