"""Small random models of every family, written by transformers, with its log-probs and gradients as the reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,  # not divisible by any tensor-parallel degree
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama32": {"model_type": "llama", "rope_parameters": _LLAMA3, "tie_word_embeddings": True},
    "smollm2": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen25": {"model_type": "qwen2", "rms_norm_eps": 1e-6},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}
LENGTHS = (9, 30, 30, 2, 47, 17, 30, 5)


@dataclass(frozen=True)
class Reference:
    """What transformers computes. ``gradients`` (by HF name) are of the mean negative log-prob over all tokens;
    ``value_gradients`` of the mean squared output of a head ``hidden @ head`` on all but the last positions."""

    directory: str
    sequences: list[torch.Tensor]
    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    head: torch.Tensor
    values: list[torch.Tensor]
    value_gradients: dict[str, torch.Tensor]


def write_model(directory: Path, family: str, **changes: Any) -> Any:
    """Write a random model of ``family`` to ``directory``; returns transformers' model, fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**COMMON, **FAMILIES[family], **changes}
    model_type = settings.pop("model_type")
    torch.manual_seed(sorted(FAMILIES).index(family))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() == 1 or "embed" in name or "lm_head" in name else 0.1
            center = 1.0 if "norm" in name else 0.0
            parameter.copy_(center + scale * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def reference(directory: Path, family: str, temperature: float = 0.8) -> Reference:
    """A model of ``family`` in ``directory`` and what transformers makes of some sequences, one by one."""
    model = write_model(directory, family)
    generator = torch.Generator().manual_seed(7)
    sequences = [torch.randint(0, COMMON["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    head = torch.randn(COMMON["hidden_size"], generator=generator).requires_grad_()
    logprobs, entropies, values = [], [], []
    for sequence in sequences:
        hidden = model.model(sequence[None]).last_hidden_state[0]
        log_p = (model.lm_head(hidden)[:-1] / temperature).log_softmax(-1)
        logprobs.append(log_p.gather(1, sequence[1:, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        values.append((hidden @ head)[:-1])
    count = sum(LENGTHS) - len(LENGTHS)
    named = dict(model.named_parameters())

    def gradients(loss: torch.Tensor, extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wanted = named | extra
        found = torch.autograd.grad(loss, list(wanted.values()), retain_graph=True, allow_unused=True)
        return {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}

    loss = -torch.cat(logprobs).sum() / count
    value_loss = torch.cat(values).pow(2).sum() / count
    return Reference(
        directory=str(directory),
        sequences=sequences,
        logprobs=[item.detach() for item in logprobs],
        entropies=[item.detach() for item in entropies],
        gradients=gradients(loss, {}),
        head=head.detach(),
        values=[item.detach() for item in values],
        value_gradients=gradients(value_loss, {"score.weight": head}),
    )
