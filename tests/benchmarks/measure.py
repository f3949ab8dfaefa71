"""One part of the benchmark, in a process of its own; prints its rows as one JSON line at the end."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REPEATS = 3
PROMPT_TOKENS, NEW_TOKENS = 32, 64
SEQUENCES, SEQUENCE_TOKENS = 8, 64
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TARGET_RATIO = ">= 0.7"
TARGET_MEMORY = "< 8"


def row(name: str, ours: float, unit: str, peer: str | None, peer_value: float | None, target: str | None) -> dict:
    ratio = None if peer_value is None else ours / peer_value
    return {
        "name": name,
        "ours": ours,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "target": target,
    }


def median_rates(work: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Median tokens a second of each side; the sides take turns, after one warm-up each."""
    rates: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(REPEATS + 1):
        for name, run in work.items():
            started = time.perf_counter()
            tokens = run()
            if repeat:
                rates[name].append(tokens / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def load_ours(model: Path, dtype: torch.dtype, optimizer: Any = None) -> Any:
    from aligner.checkpoint.initialize import initialize_role, resolve_source
    from aligner.config.hf_config import read_architecture
    from aligner.distributed import platform
    from aligner.distributed.topology import Degrees, build_topology, seed_everything
    from aligner.models.build import build_model

    platform.initialize()
    topology = build_topology(Degrees(), make_global=True)
    seed_everything(0, topology)
    built = build_model(
        "actor", read_architecture(model), topology, head="lm", dtype=dtype, optimizer=optimizer, horizon=1000
    )
    initialize_role(built, resolve_source(model), "actor")
    return built


def load_peer(model: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")


def generation(model: Path, name: str) -> list[dict]:
    """Greedy generation of 64 tokens after 32-token prompts."""
    from aligner.data.tokenizer import load_tokenizer
    from aligner.generation.engine import GenerationRequest, SamplingParams, generate
    from aligner.generation.megatron_engine import MegatronEngine

    dtype = DTYPES[name]
    ours, peer = load_ours(model, dtype), load_peer(model, dtype).eval()
    tokenizer = load_tokenizer(model)
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for batch in (1, 16, 64):
        prompts = torch.randint(1000, 40000, (batch, PROMPT_TOKENS), generator=generator)
        engine = MegatronEngine(ours, tokenizer, max_batch_size=batch, max_sequence_length=PROMPT_TOKENS + NEW_TOKENS)
        engine.resume()
        engine.publish(0)
        requests = [GenerationRequest(i, tuple(ids.tolist()), i, params) for i, ids in enumerate(prompts)]

        def run_ours(engine: Any = engine, requests: Any = requests) -> int:
            return sum(len(result.token_ids) for result in generate(engine, requests))

        def run_peer(prompts: torch.Tensor = prompts) -> int:
            with torch.inference_mode():
                out = peer.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=False,
                    min_new_tokens=NEW_TOKENS,
                    max_new_tokens=NEW_TOKENS,
                    pad_token_id=0,
                )
            return int(out[:, PROMPT_TOKENS:].numel())

        rates = median_rates({"ours": run_ours, "peer": run_peer})
        engine.release()
        rows.append(
            row(
                f"generation {name}, batch {batch}",
                rates["ours"],
                "tok/s",
                "transformers generate",
                rates["peer"],
                TARGET_RATIO,
            )
        )
    return rows


def training(model: Path, name: str) -> list[dict]:
    """A step on 8 sequences of 64 tokens: loss on all tokens, clipping, AdamW."""
    from aligner.algorithms.losses import sft_loss
    from aligner.config.schema import OptimizerConfig
    from aligner.models.forward import train_step
    from aligner.models.packs import pack_for

    dtype = DTYPES[name]
    ours = load_ours(model, dtype, OptimizerConfig(lr=1e-6, schedule="constant"))
    peer = load_peer(model, dtype).train()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-6)
    tokens = torch.randint(1000, 40000, (SEQUENCES, SEQUENCE_TOKENS), generator=torch.Generator().manual_seed(0))
    packs = pack_for(ours.topology, list(tokens), SEQUENCES * SEQUENCE_TOKENS)
    masks = []
    for pack in packs:
        mask_T = torch.ones(pack.tokens_T.numel(), dtype=torch.bool)
        mask_T[[start for _, start, _ in pack.segments]] = False
        masks.append(mask_T)

    def run_ours() -> int:
        train_step(ours, packs, lambda output, i: sft_loss(output.logprobs_T, masks[i]), masks=masks)
        return tokens.numel()

    def run_peer() -> int:
        optimizer.zero_grad(set_to_none=True)
        peer(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        return tokens.numel()

    rates = median_rates({"ours": run_ours, "peer": run_peer})
    name = f"training {name}, {SEQUENCES}x{SEQUENCE_TOKENS} tokens"
    return [row(name, rates["ours"], "tok/s", "transformers + AdamW", rates["peer"], TARGET_RATIO)]


def ppo(model: Path, directory: Path) -> list[dict]:
    """Seconds of each phase of a PPO step (16 prompts, 48 new tokens, bf16), and the peak memory of four roles."""
    run_dir = directory / f"ppo-{int(time.time())}"
    reward = directory / f"rm-{int(time.time())}"
    pairs = directory / "pairs.jsonl"
    pairs.parent.mkdir(parents=True, exist_ok=True)
    answers = [("The sky is blue.", "blue blue"), ("It is four.", "4 4 4 4"), ("Paris.", "no"), ("Yes, it is.", "y")]
    pairs.write_text(
        "".join(
            json.dumps({"prompt": f"Question {i}?", "chosen": c, "rejected": r}) + "\n"
            for i, (c, r) in enumerate(answers)
        )
    )
    common = ["model=smollm2_135m", f"model.path={model}"]
    run_aligner(
        "rm", *common, f"run.dir={reward}", f"data.train={pairs}", "data.global_batch_size=4", "trainer.max_steps=1"
    )
    run_aligner(
        "ppo",
        *common,
        f"run.dir={run_dir}",
        f"reward.init_from={reward}",
        "ppo.validation_prompts=0",
        "ppo.self_check=false",
        "data.pack_length=512",
        "generation.sampling.max_new_tokens=48",
        "trainer.max_steps=3",
    )
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = []
    for phase in sorted(key for key in steps[0] if key.startswith("timers/")):
        seconds = statistics.median(step[phase] for step in steps)
        rows.append(row(f"PPO phase {phase.removeprefix('timers/')}", seconds, "s", None, None, None))
    peak = max(step["memory/peak_gib"] for step in steps)
    rows.append(row("peak memory, four roles bf16, one process", peak, "GiB", None, None, TARGET_MEMORY))
    return rows


def checkpoint(model: Path, directory: Path) -> list[dict]:
    """What a save of the model with its optimizer takes from training: in the background against waiting for it.

    The sides take turns. The stall is what :meth:`Checkpointer.save` blocks, and how much longer the next step takes
    than steps that no save disturbs.
    """
    from aligner.checkpoint.checkpointer import Checkpointer
    from aligner.config.schema import OptimizerConfig
    from aligner.models.packs import pack_for

    ours = load_ours(model, torch.bfloat16, OptimizerConfig(lr=1e-6, schedule="constant"))
    tokens = torch.randint(1000, 40000, (SEQUENCES, SEQUENCE_TOKENS), generator=torch.Generator().manual_seed(0))
    packs = pack_for(ours.topology, list(tokens), SEQUENCES * SEQUENCE_TOKENS)
    run_dir = directory / f"checkpoint-{int(time.time())}"
    savers = {kind: Checkpointer(run_dir / kind, async_save=kind == "async") for kind in ("sync", "async")}
    for _ in range(2):
        timed_step(ours, packs)
    alone, blocked, stalls, totals, writes = [], [], [], [], []
    for number in range(1, REPEATS + 2):
        alone += [timed_step(ours, packs) for _ in range(2)]
        started = time.perf_counter()
        savers["sync"].save(number, {"actor": ours}, {})
        blocked.append(time.perf_counter() - started)
        alone += [timed_step(ours, packs)]
        started = time.perf_counter()
        savers["async"].save(number, {"actor": ours}, {})
        seconds, report, beside = time.perf_counter() - started, None, []
        while report is None:  # training goes on until it is published
            beside.append(timed_step(ours, packs) - statistics.median(alone))
            report = savers["async"].poll()
        assert not report.error
        stalls.append(seconds + beside[0])
        totals.append(seconds + sum(beside))
        writes.append(report.write_s)
    synchronous, stall, total = (statistics.median(values[1:]) for values in (blocked, stalls, totals))  # warm-up: 1
    shutil.rmtree(run_dir)
    return [
        row("checkpoint, stall of an asynchronous save", stall, "s", "synchronous save", synchronous, "<= 0.1"),
        row(
            "checkpoint, the same with all steps until it is published",
            total,
            "s",
            "synchronous save",
            synchronous,
            None,
        ),
        row("checkpoint, asynchronous write", statistics.median(writes[1:]), "s", None, None, None),
        *resume(model, directory),
    ]


def timed_step(ours: Any, packs: Any) -> float:
    from aligner.algorithms.losses import sft_loss
    from aligner.models.forward import train_step

    masks = [torch.ones(pack.tokens_T.numel(), dtype=torch.bool) for pack in packs]
    started = time.perf_counter()
    train_step(ours, packs, lambda output, i: sft_loss(output.logprobs_T, masks[i]), masks=masks)
    return time.perf_counter() - started


def resume(model: Path, directory: Path) -> list[dict]:
    """From the start of the process that resumes to its first finished step."""
    run_dir = directory / f"resume-{int(time.time())}"
    data = directory / "sft.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"Question {i}?", "response": f"It is {i}."}) + "\n" for i in range(8))
    )
    words = ["sft", f"model.path={model}", f"run.dir={run_dir}", f"data.train={data}", "data.global_batch_size=8"]
    run_aligner(*words, "trainer.max_steps=1", "actor.optimizer.decay_steps=10")
    started = time.time()
    run_aligner(*words, "trainer.max_steps=2", "actor.optimizer.decay_steps=10")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run_dir)
    return [row("resume, process start to first finished step", rows[-1]["time"] - started, "s", None, None, None)]


def run_aligner(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "aligner", *words], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    part, model_path, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    kind, _, dtype_name = part.partition("_")
    output.mkdir(parents=True, exist_ok=True)
    whole = {"ppo": ppo, "checkpoint": checkpoint}
    by_dtype = {"generation": generation, "training": training}
    measured = whole[kind](model_path, output) if kind in whole else by_dtype[kind](model_path, dtype_name)
    print(json.dumps(measured))
