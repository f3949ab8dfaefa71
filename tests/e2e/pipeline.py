"""A tiny chat model and tiny data, and the commands' bodies run on ranks with an overridden configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chat_tokenizers import CHATML, write_tokenizer
from tests.distributed.families import write_model

WORDS = (
    "red",
    "blue",
    "green",
    "small",
    "large",
    "old",
    "new",
    "bird",
    "tree",
    "stone",
    "river",
    "house",
    "cloud",
    "road",
)


def write_chat_model(directory: Path, **changes: Any) -> Path:
    """A random Llama (4 heads, 2 KV heads, 2 layers) with a byte-level ChatML tokenizer."""
    write_tokenizer(directory, CHATML, None, "<|im_end|>", "<|endoftext|>")
    vocabulary = json.loads((directory / "tokenizer.json").read_text())
    size = 1 + max(*vocabulary["model"]["vocab"].values(), *(token["id"] for token in vocabulary["added_tokens"]))
    write_model(directory, "llama32", vocab_size=size, max_position_embeddings=256, **changes)
    return directory


def write_data(directory: Path) -> Path:
    """``sft.jsonl`` (12 rows), ``pairs.jsonl`` (12) and ``prompts.jsonl`` (10), all different."""
    directory.mkdir(parents=True, exist_ok=True)
    phrases = [f"{WORDS[i % 14]} {WORDS[(3 * i + 1) % 14]}" for i in range(12)]
    write_jsonl(directory / "sft.jsonl", [{"prompt": f"Say {p}", "response": f"The {p}."} for p in phrases])
    write_jsonl(
        directory / "pairs.jsonl",
        [{"prompt": f"Say {p}", "chosen": f"The {p}.", "rejected": f"{p} {p} {p}"} for p in phrases],
    )
    write_jsonl(directory / "prompts.jsonl", [{"prompt": f"Tell me of the {p}", "domain": "d"} for p in phrases[:10]])
    return directory


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SHORT = {
    "sft": ["data.global_batch_size=4", "data.sequence_length=64", "data.pack_length=96"],
    "rm": ["data.global_batch_size=4", "data.sequence_length=64", "data.pack_length=128"],
    "ppo": [
        "data.max_prompt_length=48",
        "data.pack_length=128",
        "ppo.rollout_batch_size=4",
        "ppo.mini_batch_size=2",
        "ppo.validation_prompts=2",
        "generation.max_batch_size=3",
        "generation.sampling.max_new_tokens=6",
    ],
    "evaluate": ["data.max_prompt_length=48", "data.pack_length=128", "generation.sampling.max_new_tokens=6"],
}


def overrides(command: str, run_dir: Path, model: Path, data: Path, *more: str) -> list[str]:
    """Overrides of a short fp32 run of ``command`` on the tiny model and data."""
    files = {
        "sft": ["data.train=sft.jsonl", "data.validation=sft.jsonl", "actor.optimizer.lr=1e-3"],
        "rm": ["data.train=pairs.jsonl", "data.validation=pairs.jsonl", "reward.optimizer.lr=1e-3"],
        "ppo": ["data.prompts=prompts.jsonl", "data.validation_prompts=prompts.jsonl", "actor.optimizer.lr=1e-3"],
        "evaluate": ["data.prompts=prompts.jsonl"],
    }[command]
    placed = [word.replace("=sft", f"={data}/sft").replace("=pairs", f"={data}/pairs") for word in files]
    placed = [word.replace("=prompts", f"={data}/prompts") for word in placed]
    return [f"run.dir={run_dir}", f"model.path={model}", "model.dtype=float32", *placed, *SHORT[command], *more]


def run_command(command: str, words: Sequence[str]) -> None:
    """The body of ``command`` on this rank, checked as the launcher does. For ``tests.distributed.spawn.run_ranks``."""
    import importlib

    import torch.distributed as dist

    from aligner.cli.start import start_rank
    from aligner.config.checks import check
    from aligner.config.compose import compose

    root = compose(command, list(words))
    check(root, dist.get_world_size())
    context = start_rank(root)
    with context.held:
        importlib.import_module(f"aligner.cli.{command}").run(root, context)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Logged rows without what depends on the clock or the machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    volatile = ("timers/", "throughput/", "memory/", "checkpoint/")
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(volatile)} for row in rows]


def assert_same_run(run_dir: Path, expected: Path, steps: int) -> None:
    """The same metrics in every step, and after ``steps`` the same bits of weights and optimizer."""
    assert metrics(run_dir) == metrics(expected)
    last = f"checkpoints/step_{steps:08d}"
    found, wanted = checkpoint_tensors(run_dir / last), checkpoint_tensors(expected / last)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].equal(tensor), name


def checkpoint_tensors(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of every role in a checkpoint, by name, read without Megatron."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    result = {}
    for role in sorted(path for path in checkpoint.iterdir() if path.is_dir()):
        reader = FileSystemReader(role)
        entries = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        load(state, storage_reader=reader, no_dist=True)
        result.update({f"{role.name}.{name}": tensor for name, tensor in state.items()})
    return result
