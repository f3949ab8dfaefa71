"""``aligner generate``: sample responses to prompts into a JSONL file.

A row: ``{"messages", "prompt", "response", "finish_reason", "tokens", "sample", "logprob", ...}`` and the prompt's own
metadata; ``sample`` counts the samples of one prompt, ``logprob`` is the response's sum in nats.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from aligner.config.schema import GenerateRoot
from aligner.config.sources import role_source
from aligner.data.samples import PromptSample
from aligner.distributed.collectives import on_all_ranks
from aligner.distributed.context import RunContext
from aligner.errors import ConfigError
from aligner.evaluation.sampling import Samples, hold_checkpoint, load_policy, load_prompts, sample
from aligner.monitoring.writing import write_on_first_rank


def run(root: GenerateRoot, context: RunContext) -> None:
    """Sample and write ``output`` (rank 0), under a temporary name first. Collective."""
    output = Path(root.output)
    on_all_ranks(lambda: check_output(output, root.overwrite, context.rank))
    policy = load_policy(root, hold_checkpoint(role_source(root.actor), context))
    prompts = load_prompts(root, root.data.prompts, root.limit, policy.tokenizer, context)
    sampled = sample(root, context, policy, prompts, root.samples_per_prompt)
    write_on_first_rank(output, lambda: write_rows(output, rows(prompts, sampled, root.samples_per_prompt)))
    if context.rank == 0:
        tokens = int(sampled.batch.response_lengths_B.sum())
        Console(highlight=False).print(
            f"{len(sampled.requests)} responses, {tokens} tokens, to {output}", markup=False, soft_wrap=True
        )


def rows(prompts: list[PromptSample], sampled: Samples, samples_per_prompt: int) -> Iterator[dict[str, Any]]:
    """One row a response, in prompt order."""
    assert sampled.batch.engine_logprobs_BT is not None
    logprobs = (sampled.batch.engine_logprobs_BT * sampled.batch.loss_mask_BT).sum(dim=1).tolist()
    for row, request in enumerate(sampled.requests):
        prompt = prompts[row // samples_per_prompt]
        yield {
            **prompt.metadata,
            "messages": list(prompt.messages),
            "prompt": prompt.text,
            "response": request.response,
            "finish_reason": request.finish_reason,
            "tokens": request.num_tokens,
            "sample": row % samples_per_prompt,
            "logprob": round(logprobs[row], 4),
        }


def write_rows(path: Path, content: Iterator[dict[str, Any]]) -> None:
    """Write JSON lines under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        for row in content:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def check_output(output: Path, overwrite: bool, rank: int) -> None:
    """Find out before sampling whether ``output`` can be written."""
    if rank != 0:
        return
    if output.is_dir():
        raise ConfigError(f"output={output} is a directory; give a file in it, such as {output / 'samples.jsonl'}")
    if output.exists() and not overwrite:
        raise ConfigError(f"output={output} exists; choose another file or give overwrite=true")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"output={output} cannot be written: {output.parent}: {error.strerror or error}; choose another folder or "
            "give write permission"
        ) from error
