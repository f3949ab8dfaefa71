"""What megatron-core 0.16 asks of CUDA, answered on a machine without it.

This is the only place that works around CUDA assumptions. Invariants:

- Where CUDA is present :func:`install` does nothing.
- In torch, only the attributes in :data:`TORCH_ATTRIBUTES` are replaced; all of them raise (or do nothing)
  without CUDA, so no other code of the process behaves differently.
- In Megatron, string constants in :data:`CONSTANTS` are exchanged while its modules are loaded (``device='cuda'``
  becomes ``'cpu'``, comparisons with ``'torch.cuda.FloatTensor'`` become comparisons with ``'torch.FloatTensor'``),
  and the module attributes in :data:`MEGATRON_ATTRIBUTES` are set after the module ran. No tensor factory and no
  ``Tensor.type`` is wrapped, so a call costs what it costs in plain torch.
- :data:`REPLACED` lists everything, and nothing outside of it changes (one log filter silences a warning of the
  tracker that is meaningless where the CPU's and CUDA's generators are the same).
"""

from __future__ import annotations

import importlib.machinery
import logging
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any, Self

import torch

_MEGATRON = "megatron.core"

#: String constants of Megatron's code, and what they become.
CONSTANTS: dict[str, str] = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


# ------------------------------------------------------------------ torch.cuda, for one "device": the CPU


def _answer(value: Any) -> Callable[..., Any]:
    """A function of its own that takes anything and returns ``value``.

    Every replaced attribute gets its own function object: dynamo keeps its rules by object.
    """

    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return answer


def _itself() -> Callable[..., Any]:
    def itself(tensor_or_module: Any, *_args: Any, **_kwargs: Any) -> Any:
        return tensor_or_module

    return itself


def _get_rng_state() -> Callable[..., torch.Tensor]:
    def get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.default_generator.get_state()

    return get_rng_state


def _set_rng_state() -> Callable[..., None]:
    def set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.default_generator.set_state(new_state)

    return set_rng_state


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


class _Stream:
    """The one stream of a CPU: everything on it is already done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def wait_stream(self, _stream: Any) -> None:
        return None

    def wait_event(self, _event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None


_STREAM = _Stream()

#: Attributes of torch that :func:`install` replaces: dotted name -> replacement.
TORCH_ATTRIBUTES: dict[str, Any] = {
    "torch.cuda.current_device": _answer(torch.device("cpu")),
    "torch.cuda.set_device": _answer(None),
    "torch.cuda.synchronize": _answer(None),
    "torch.cuda.is_current_stream_capturing": _answer(False),
    "torch.cuda.stream": _answer(_STREAM),
    "torch.cuda.current_stream": _answer(_STREAM),
    "torch.cuda.default_stream": _answer(_STREAM),
    "torch.cuda.get_rng_state": _get_rng_state(),
    "torch.cuda.set_rng_state": _set_rng_state(),
    "torch.cuda.manual_seed": _manual_seed,
    "torch.cuda.random.get_rng_state": _get_rng_state(),
    "torch.cuda.random.set_rng_state": _set_rng_state(),
    "torch.cuda.nvtx.range_push": _answer(None),
    "torch.cuda.nvtx.range_pop": _answer(None),
    "torch.Tensor.cuda": _itself(),
    "torch.nn.Module.cuda": _itself(),
}


# ------------------------------------------------------------------ Megatron's own modules


def _no_fusion(function: Callable[..., Any]) -> Callable[..., Any]:
    """``jit_fuser`` compiles at import; on a CPU the plain function is as good and starts at once."""
    return function


def _megatron_attributes() -> dict[str, dict[str, Any]]:
    from aligner.distributed.cpu_adam import CpuAdam

    return {
        "megatron.core.jit": {"jit_fuser": _no_fusion},
        "megatron.core.tensor_parallel.random": {
            "_get_cuda_rng_state": _get_rng_state(),
            "_set_cuda_rng_state": _set_rng_state(),
        },
        "megatron.core.optimizer.distrib_optimizer": {
            "Adam": CpuAdam,
            "HAVE_APEX_OR_TE": True,
            "USING_APEX_OPTIMIZER": True,
        },
        "megatron.core.optimizer": {"Adam": CpuAdam, "USING_PYTORCH_OPTIMIZER": False},
    }


#: Attributes of Megatron's modules set after they ran: module -> name -> value.
MEGATRON_ATTRIBUTES: dict[str, dict[str, Any]] = _megatron_attributes()

#: Everything :func:`install` replaces, as dotted names; ``megatron.core:'x'`` is a constant in Megatron's code.
REPLACED: tuple[str, ...] = (
    *TORCH_ATTRIBUTES,
    *(f"{module}.{name}" for module, names in MEGATRON_ATTRIBUTES.items() for name in names),
    *(f"{_MEGATRON}:'{constant}'" for constant in CONSTANTS),
)


def exchange_constants(code: types.CodeType) -> types.CodeType:
    """``code`` with the strings of :data:`CONSTANTS` exchanged, in nested functions and tuples too."""

    def exchange(constant: Any) -> Any:
        if isinstance(constant, str):
            return CONSTANTS.get(constant, constant)
        if isinstance(constant, tuple):
            return tuple(exchange(item) for item in constant)
        if isinstance(constant, types.CodeType):
            return exchange_constants(constant)
        return constant

    return code.replace(co_consts=tuple(exchange(constant) for constant in code.co_consts))


class _CpuLoader(importlib.machinery.SourceFileLoader):
    """Loads a Megatron module from its ordinary file (and byte-code cache) with the constants exchanged."""

    def get_code(self, fullname: str) -> types.CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else exchange_constants(code)

    def exec_module(self, module: types.ModuleType) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
            super().exec_module(module)
        for name, value in MEGATRON_ATTRIBUTES.get(module.__name__, {}).items():
            if not hasattr(module, name):
                raise ImportError(f"{module.__name__} has no '{name}': this megatron-core release is not supported")
            setattr(module, name, value)


class _MegatronFinder(MetaPathFinder):
    """Finds ``megatron.core`` modules where the ordinary path finder does, and loads them with :class:`_CpuLoader`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MEGATRON and not fullname.startswith(_MEGATRON + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _CpuLoader(spec.loader.name, spec.loader.path)
        return spec


def _one_generator(record: logging.LogRecord) -> bool:
    """The tracker warns when the CPU generator moves while the CUDA one is in use; here they are the same one."""
    return "CPU RNG state changed" not in record.getMessage()


def installed() -> bool:
    """Whether the stand-in is in place."""
    return any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path)


def install() -> None:
    """Put the stand-in in place where there is no CUDA; a second call, or one where CUDA is present, does nothing.

    Must run before ``megatron.core`` is imported (importing ``aligner.distributed`` does it).
    """
    if torch.cuda.is_available() or installed():
        return
    if _MEGATRON in sys.modules:
        raise ImportError("import aligner.distributed before megatron.core: on a CPU Megatron is adapted as it loads")
    for dotted, replacement in TORCH_ATTRIBUTES.items():
        owner: Any = torch
        *path, name = dotted.split(".")[1:]
        for part in path:
            owner = getattr(owner, part)
        getattr(owner, name)  # a torch release without it must show here
        setattr(owner, name, replacement)
    sys.meta_path.insert(0, _MegatronFinder())
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_one_generator)
