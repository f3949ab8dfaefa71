"""Checkpoints of real Megatron models on real ranks: exact, complete or absent, and free of the layout."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

from aligner.checkpoint import manifest
from aligner.checkpoint.checkpointer import Checkpointer, load_weights, newest_complete, read_extra
from aligner.config.hf_config import Architecture
from aligner.config.schema import OptimizerConfig
from aligner.distributed import platform
from aligner.distributed.topology import Degrees, build_topology, seed_everything
from aligner.errors import CheckpointError, RankFailure
from aligner.models.build import build_model
from aligner.models.role_model import RoleModel
from tests.distributed.spawn import run_ranks

ARCH = Architecture(
    family="llama",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=90,
    max_position_embeddings=64,
    rope_theta=10000.0,
    rope_scaling=None,
    norm_epsilon=1e-5,
    tie_word_embeddings=True,
    attention_bias=False,
    qk_norm=False,
    sliding_window=None,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=None,
    dtype="float32",
)
ONE, TP2, PP2, TP2PP2 = Degrees(), Degrees(tp=2, sequence_parallel=True), Degrees(pp=2), Degrees(tp=2, pp=2)


@dataclass
class Counter:
    """A component with a state that is the same on every rank."""

    seen: int = 0
    history: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.history = state_dict["seen"], state_dict["history"]


def _model(
    name: str,
    degrees: Degrees,
    dtype: torch.dtype = torch.float32,
    head: str = "lm",
    distributed: bool = True,
    frozen: bool = False,
) -> RoleModel:
    settings = OptimizerConfig(lr=1e-2, warmup_steps=2, decay_steps=10, use_distributed_optimizer=distributed)
    topology = build_topology(degrees)
    return build_model(name, ARCH, topology, head=head, dtype=dtype, optimizer=None if frozen else settings)


def _fill(model: RoleModel, seed: int) -> None:
    """Weights that are equal wherever the same tensor is held twice."""
    for name, parameter in model.parameters():
        parameter.data.copy_(_noise(name, parameter, seed) * 0.1)
    model.weights_changed()


def _noise(name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
    name = name.replace("output_layer", "embedding.word_embeddings")
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.randn(parameter.shape, generator=generator)


def _step(model: RoleModel, step: int) -> None:
    """One optimizer step on made-up gradients that depend on the step alone."""
    assert model.optimizer is not None and model.scheduler is not None
    for name, parameter in model.parameters():
        parameter.main_grad.copy_(  # type: ignore[attr-defined]  # set by Megatron's data parallelism
            _noise(name, parameter, 1000 + step)
        )
    model.optimizer.step()
    model.scheduler.step(1)


def _start(degrees: Degrees) -> None:
    seed_everything(7, build_topology(degrees, make_global=True))


def _train(models: dict[str, RoleModel], counter: Counter, steps: range) -> list[float]:
    """Train; returns what this rank's random generators gave meanwhile."""
    noise = []
    for step in steps:
        for model in models.values():
            if model.optimizer is not None and not (model.name == "actor" and step < 2):  # the critic warms up
                _step(model, step)
        counter.seen += 1
        counter.history.append(0.1 * step)
        noise.append(random.random() + float(np.random.rand()) + float(torch.rand(1)))
    return noise


def _weights(models: dict[str, RoleModel]) -> dict[str, bytes]:
    """All weights and optimizer states of this rank, as bytes."""
    found = {}
    for role, model in models.items():
        for name, parameter in model.parameters():
            found[f"{role}.{name}"] = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for (index, group), values in _optimizer_tensors(model).items():
            found[f"{role}.optimizer.{index}.{group}"] = values.contiguous().view(torch.uint8).numpy().tobytes()
        if model.optimizer is not None:
            groups = model.optimizer.param_groups
            found[f"{role}.groups"] = json.dumps([[g["lr"], g.get("step")] for g in groups if g["params"]]).encode()
    return found


def _optimizer_tensors(model: RoleModel) -> dict[tuple[int, str], torch.Tensor]:
    if model.optimizer is None:
        return {}
    found = {}
    for index, part in enumerate(model.optimizer.chained_optimizers):
        for number, group in enumerate(part.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                state = part.optimizer.state[parameter]
                for name, value in {"param": parameter.detach(), **state}.items():
                    found[(index, f"{number}.{position}.{name}")] = value
    return found


def _roles(actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool) -> dict[str, RoleModel]:
    models = {
        "actor": _model("actor", actor, dtype, distributed=distributed),
        "critic": _model("critic", critic, dtype, head="scalar", distributed=distributed),
        "reference": _model("reference", actor, dtype, frozen=True),
    }
    for seed, model in enumerate(models.values()):
        _fill(model, seed)
    return models


def _straight_and_halfway(
    directory: str, actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool
) -> Any:
    _start(actor)
    models, counter = _roles(actor, critic, dtype, distributed), Counter()
    checkpointer = Checkpointer(Path(directory))
    assert checkpointer.newest() is None
    _train(models, counter, range(2))  # so far the actor has never stepped
    before = _weights(models)
    checkpointer.save(2, models, {"counter": counter})
    assert not multiprocessing.active_children(), "a save starts no processes"
    after = _weights(models)
    assert {name: after[name] for name in before} == before, "saving changed something"
    noise = _train(models, counter, range(2, 5))
    return _weights(models), noise, counter.state_dict()


def _resumed(directory: str, actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool) -> Any:
    _start(actor)
    models, counter = _roles(actor, critic, dtype, distributed), Counter()
    for model in models.values():
        _fill(model, 99)
    checkpointer = Checkpointer(Path(directory))
    newest = checkpointer.newest()
    assert newest is not None and newest.name == "step_00000002"
    step = checkpointer.load(newest, models, {"counter": counter})
    assert step == counter.seen == 2
    noise = _train(models, counter, range(2, 5))
    return _weights(models), noise, counter.state_dict()


@pytest.mark.parametrize(
    ("world", "actor", "critic", "dtype", "distributed"),
    [
        (1, ONE, ONE, torch.float32, True),
        (1, ONE, ONE, torch.bfloat16, False),
        (2, ONE, TP2, torch.bfloat16, True),  # DP2, and a critic with another layout
        (2, PP2, ONE, torch.float32, True),
        (2, TP2, PP2, torch.float32, False),
    ],
)
def test_resume_is_bit_equal(
    tmp_path: Path, world: int, actor: Degrees, critic: Degrees, dtype: torch.dtype, distributed: bool
) -> None:
    arguments = (str(tmp_path), actor, critic, dtype, distributed)
    straight = run_ranks(world, _straight_and_halfway, *arguments)
    resumed = run_ranks(world, _resumed, *arguments)
    for rank in range(world):
        assert resumed[rank][1:] == straight[rank][1:]
        assert resumed[rank][0] == straight[rank][0]


def _save_at(directory: str, degrees: Degrees) -> None:
    _start(degrees)
    models = _two_policies(degrees)
    for seed, model in enumerate(models.values()):
        _fill(model, seed)
    for step in range(3):
        _step(models["trained"], step)
    Checkpointer(Path(directory)).save(2, models, {})


def _copy_at(source: str, target: str, degrees: Degrees) -> None:
    _start(degrees)
    models = _two_policies(degrees)
    assert Checkpointer(Path(target)).load(Path(source), models, {}) == 2
    Checkpointer(Path(target)).save(2, models, {})


def _two_policies(degrees: Degrees) -> dict[str, RoleModel]:
    """One with bf16 and fp32 parameters that is trained, one that never makes a step."""
    return {
        "trained": _model("trained", degrees, torch.bfloat16, head="scalar"),
        "fresh": _model("fresh", degrees),
    }


def _tensors(path: Path, role: str) -> dict[str, torch.Tensor]:
    stored = dist_checkpointing.load_plain_tensors(str(path / role))
    return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}


def _all_tensors(paths: list[str]) -> None:
    for role in ("trained", "fresh"):
        first, *others = [_tensors(Path(path), role) for path in paths]
        for name in [name for name in first if not name.startswith("optimizer.")]:
            master = first[f"optimizer.state.param.{name}"]
            assert torch.equal(master.to(first[name].dtype), first[name]), f"{name} has the state of another parameter"
            assert bool(first[f"optimizer.state.exp_avg_sq.{name}"].any()) == (role == "trained")
        for other in others:
            assert first.keys() == other.keys()
            for name, value in first.items():
                assert torch.equal(value, other[name]), name


def test_other_layouts_load_and_save_the_same_tensors(tmp_path: Path) -> None:
    """Along a chain of layouts; one of the optimizers has never stepped."""
    run_ranks(4, _save_at, str(tmp_path / "a"), TP2PP2)
    paths = [tmp_path / "a/checkpoints/step_00000002"]
    for world, degrees in ((2, TP2), (1, ONE), (2, PP2), (2, ONE)):
        target = tmp_path / f"{world}-{len(paths)}"
        run_ranks(world, _copy_at, str(paths[-1]), str(target), degrees)
        paths.append(target / "checkpoints/step_00000002")
    run_ranks(1, _all_tensors, [str(path) for path in paths])


def _weights_only(directory: str) -> None:
    _start(ONE)
    actor = _model("actor", ONE)
    _fill(actor, 3)
    path = Checkpointer(Path(directory)).save(1, {"policy": actor}, {"statistics": Counter(4, [0.1, -2.5e-30])})
    assert read_extra(path, "statistics") == {"seen": 4, "history": [0.1, -2.5e-30]}
    with pytest.raises(CheckpointError, match="no 'other'"):
        read_extra(path, "other")

    reference = _model("reference", TP2, frozen=True)
    assert load_weights(path, "policy", reference) == []
    again = Checkpointer(Path(directory) / "b").save(1, {"policy": reference}, {})
    stored = _tensors(path, "policy")
    for name, value in _tensors(again, "policy").items():
        assert torch.equal(value, stored[name]), name

    critic = _model("critic", PP2, head="scalar")
    with pytest.raises((CheckpointError, RankFailure), match="no tensor 'head"):
        load_weights(path, "policy", critic)
    kept = load_weights(path, "policy", critic, strict=False)
    assert all(name.startswith("head") for name in kept)
    assert bool(kept) == critic.topology.is_last_stage
    masters = _optimizer_tensors(critic)
    assert any(float(value.abs().max()) > 0 for (_, name), value in masters.items() if name.endswith("param"))

    with pytest.raises((CheckpointError, RankFailure), match="the roles \\['policy'\\], not 'critic'"):
        load_weights(path, "critic", critic)


def test_weights_of_another_role_and_layout(tmp_path: Path) -> None:
    run_ranks(2, _weights_only, str(tmp_path))


class _Unsavable(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1: "key"}}


class _Differs(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"rank": platform.rank()}


class _FailsOnRank1(Counter):
    def state_dict(self) -> dict[str, Any]:
        if platform.rank() == 1:
            raise OSError("no space left on device")
        return {}


def _failures(directory: str) -> None:
    _start(ONE)
    models = {"actor": _model("actor", ONE)}
    _fill(models["actor"], 3)
    checkpointer = Checkpointer(Path(directory))
    with pytest.raises(CheckpointError, match="state.bad.seen has the key 1"):
        checkpointer.save(1, models, {"bad": _Unsavable()})
    with pytest.raises(CheckpointError, match="differs between ranks"):
        checkpointer.save(1, models, {"bad": _Differs()})
    with pytest.raises(CheckpointError if platform.rank() == 1 else RankFailure, match="no space left"):
        checkpointer.save(1, models, {"bad": _FailsOnRank1()})
    _disk_full_on_rank_1(checkpointer, models)
    assert checkpointer.newest() is None

    for step in (1, 3, 3):  # the second save of a step replaces the first
        checkpointer.save(step, models, {"counter": Counter(step)})
    newest = checkpointer.newest()
    assert newest is not None and newest.name == "step_00000003"
    with pytest.raises((CheckpointError, RankFailure), match="no state of 'cursor'"):
        checkpointer.load(newest, models, {"cursor": Counter()})

    if platform.rank() == 0:
        (newest.parent / ".tmp-step_00000004" / "actor").mkdir(parents=True)  # killed while writing
        (newest.parent / "step_00000005").mkdir()  # not ours: no manifest
    assert checkpointer.newest() == newest
    _damage(checkpointer, newest, models)


def _disk_full_on_rank_1(checkpointer: Checkpointer, models: dict[str, RoleModel]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if platform.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    with pytest.raises(CheckpointError, match="cannot write the checkpoint.*rank 1"):
        checkpointer.save(1, models, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _damage(checkpointer: Checkpointer, path: Path, models: dict[str, RoleModel]) -> None:
    """A file that is cut, changed or gone is found before anything is read, on every rank."""
    from aligner.distributed.collectives import barrier

    for name, change, message in (
        ("actor/.metadata", lambda data: data[:-1] + b"x", "has changed"),
        ("actor/__0_0.distcp", lambda data: data[:-8], "bytes instead of"),
        ("actor/common.pt", lambda data: None, "is missing"),
        ("manifest.json", lambda data: data[:20], "not a complete checkpoint"),
    ):
        barrier()
        data = (path / name).read_bytes()
        barrier()
        if platform.rank() == 0:
            changed = change(data)
            (path / name).unlink() if changed is None else (path / name).write_bytes(changed)
        barrier()
        with pytest.raises(CheckpointError, match=message):
            checkpointer.load(path, models, {"counter": Counter()})
        barrier()
        if platform.rank() == 0:
            (path / name).write_bytes(data)
    barrier()
    assert checkpointer.load(path, models, {"counter": Counter()}) == 3
    barrier()
    if platform.rank() == 0:
        path.chmod(0o777)
    barrier()
    with pytest.raises(CheckpointError, match="writable for everybody"):
        checkpointer.load(path, models, {})


def test_failures_reach_every_rank_and_leave_no_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _failures, str(tmp_path))
    assert newest_complete(tmp_path / "nothing") is None


def _checkpoint(directory: Path, step: int) -> Path:
    path = directory / f"step_{step:08d}"
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "__0_0.distcp").write_bytes(bytes(100 + step))
    (path / "state.json").write_text("{}")
    manifest.write(path, step, 1, {})
    return path


def test_the_newest_sound_checkpoint_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
    assert newest_complete(tmp_path) == paths[3] and capsys.readouterr().out == ""
    (paths[3] / "actor" / "__0_0.distcp").write_bytes(b"")
    (paths[2] / "state.json").unlink()
    (paths[1] / manifest.FILE).write_text("")
    assert newest_complete(tmp_path) == paths[0]
    lines = capsys.readouterr().out.splitlines()
    for line, path, reason in zip(
        lines,
        paths[:0:-1],
        ("'actor/__0_0.distcp' has 0 bytes instead of 104", "'state.json' is missing", "manifest.json cannot be read"),
        strict=True,
    ):
        assert line.startswith(f"passed over the damaged checkpoint {path}: ") and reason in line
    assert all(path.is_dir() for path in paths)


def test_what_changed_since_the_checkpoint_is_named() -> None:
    saved = manifest.fingerprint()
    assert manifest.changed_since(saved) == ""
    changed = saved | {"threads": "77", "torch": "1.0"}
    assert manifest.changed_since(changed) == f"torch 1.0 -> {saved['torch']}, threads 77 -> {saved['threads']}"
    assert manifest.changed_since(changed | {"device": "quantum"}).endswith("device quantum -> cpu")
