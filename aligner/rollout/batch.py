"""The typed batch of one rollout step.

Every rank holds the whole global batch on the CPU. Per-token tensors are *token-aligned*: index t of a row belongs to
token t, and was predicted from position t-1; index 0 is never used. Shapes: B rows (samples), T the padded width.

Invariants, checked by :meth:`RolloutBatch.validate`:

1. shapes: every ``*_BT`` field is [B, T], every ``*_B`` field is [B], ``finish_reasons`` and ``metadata`` have B
   entries, and B >= 1;
2. dtypes: ids, lengths, groups and versions are int64, masks are bool, everything else is float32;
3. lengths: 1 <= prompt length < length <= T, in every row;
4. ``loss_mask_BT`` marks tokens inside [prompt length, length) only, and at least one of them in every row;
   ``train_mask_BT`` marks only tokens that ``loss_mask_BT`` marks;
5. finish reasons are those of the engine protocol; group ids and weights versions are not negative;
6. log-probabilities are finite and at most 0 on the tokens of ``loss_mask_BT``;
7. scores, rewards, values, advantages and returns are finite;
8. token rewards are 0 outside [prompt length, length); advantages and returns are 0 outside ``loss_mask_BT``;
9. ``rewards_B`` is the sum of ``token_rewards_BT`` over its row.

Lengths decide what is real; token ids never do (pad may equal eos).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from aligner.errors import DataError, TrainingError
from aligner.generation.engine import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP

FINISH_REASONS = (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT)
LOGPROB_ROUNDING = 1e-3  # a log-softmax in low precision may come out this much above 0
TENSORS_FILE = "tensors.safetensors"
JSON_FILE = "batch.json"


@dataclass(frozen=True)
class LogprobContract:
    """What the engine's log-probabilities mean.

    ``temperature``: logits were divided by it (1.0: raw). ``full_softmax``: normalised over the whole vocabulary even
    when top-k or top-p cut the sampled distribution; False: over what was left.
    """

    temperature: float = 1.0
    full_softmax: bool = True


@dataclass(frozen=True)
class RolloutBatch:
    """One step's samples and everything computed on them. Fields that are not computed yet are None.

    tokens_BT: int64, prompt then response, right-padded. lengths_B: real tokens. prompt_lengths_B: tokens of the first
    prompt. loss_mask_BT: bool, the tokens the policy wrote (gaps are possible: several turns, tool output).
    group_id_B: samples of one prompt share it. weights_version_B: the policy version that sampled the row.
    engine_logprobs_BT: the sampler's log-probabilities under ``logprob_contract``. policy_logprobs_BT: the trainer's,
    before the first update. values_BT: the critic's, before the first update. bootstrap_values_B: the critic's value
    *after* the last token (its head's output at the last position). scores_B: the reward as given, raw or
    standardised, before KL and truncation rules. token_rewards_BT: what GAE sees. rewards_B: its sum over a row, the
    reward with KL. train_mask_BT: ``loss_mask_BT`` without rows that truncation masks. advantages_BT: whitened if asked
    for. returns_BT: from unwhitened advantages.
    """

    tokens_BT: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor
    loss_mask_BT: torch.Tensor
    group_id_B: torch.Tensor
    weights_version_B: torch.Tensor
    finish_reasons: tuple[str, ...]
    metadata: tuple[dict[str, Any], ...]
    logprob_contract: LogprobContract = LogprobContract()
    engine_logprobs_BT: torch.Tensor | None = None
    policy_logprobs_BT: torch.Tensor | None = None
    reference_logprobs_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None
    bootstrap_values_B: torch.Tensor | None = None
    scores_B: torch.Tensor | None = None
    token_rewards_BT: torch.Tensor | None = None
    rewards_B: torch.Tensor | None = None
    train_mask_BT: torch.Tensor | None = None
    advantages_BT: torch.Tensor | None = None
    returns_BT: torch.Tensor | None = None

    def __len__(self) -> int:
        return int(self.lengths_B.numel())

    @property
    def truncated_B(self) -> torch.Tensor:
        """bool [B]: the response did not end by itself."""
        return torch.tensor([reason != FINISH_STOP for reason in self.finish_reasons], dtype=torch.bool)

    @property
    def response_lengths_B(self) -> torch.Tensor:
        """int64 [B]: tokens the policy wrote."""
        return self.loss_mask_BT.sum(dim=1)

    def replace(self, **changes: Any) -> RolloutBatch:
        """A copy with some fields changed; tensors that are not changed are shared."""
        return dataclasses.replace(self, **changes)

    def sequences(self) -> list[torch.Tensor]:
        """The rows' real tokens, int64 [length] each, without padding: what packing takes."""
        return [row[:length] for row, length in zip(self.tokens_BT, self.lengths_B.tolist(), strict=True)]

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """The given rows, in the given order; T stays."""
        index = torch.tensor(list(rows), dtype=torch.int64)
        changes: dict[str, Any] = {name: value[index] for name, value in self._tensors().items()}
        changes["finish_reasons"] = tuple(self.finish_reasons[row] for row in rows)
        changes["metadata"] = tuple(self.metadata[row] for row in rows)
        return self.replace(**changes)

    @classmethod
    def concat(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """All rows of ``batches``, padded to the widest. ValueError: not the same fields filled or another contract."""
        first = batches[0]
        names = set(first._tensors())
        for batch in batches[1:]:
            if set(batch._tensors()) != names:
                raise ValueError(f"cannot concatenate: only some batches have {sorted(set(batch._tensors()) ^ names)}")
            if batch.logprob_contract != first.logprob_contract:
                raise ValueError(f"cannot concatenate: {batch.logprob_contract} differs from {first.logprob_contract}")
        width = max(batch.tokens_BT.shape[1] for batch in batches)
        changes: dict[str, Any] = {}
        for name in names:
            parts = [getattr(batch, name) for batch in batches]
            if name.endswith("_BT"):
                parts = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
            changes[name] = torch.cat(parts)
        changes["finish_reasons"] = tuple(reason for batch in batches for reason in batch.finish_reasons)
        changes["metadata"] = tuple(entry for batch in batches for entry in batch.metadata)
        return first.replace(**changes)

    def save(self, directory: str | Path) -> None:
        """Write ``tensors.safetensors`` and ``batch.json`` into ``directory`` (made if needed). No pickle."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # copies, because fields may share memory (train_mask_BT is loss_mask_BT when nothing is masked)
        tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in self._tensors().items()}
        save_file(tensors, directory / TENSORS_FILE)
        content = {
            "finish_reasons": list(self.finish_reasons),
            "metadata": list(self.metadata),
            "logprob_contract": dataclasses.asdict(self.logprob_contract),
        }
        text = json.dumps(content, ensure_ascii=False, indent=1)
        # surrogatepass: a JSON string of a data file may hold half of a surrogate pair
        (directory / JSON_FILE).write_text(text, encoding="utf-8", errors="surrogatepass")

    @classmethod
    def load(cls, directory: str | Path) -> RolloutBatch:
        """Read what :meth:`save` wrote. DataError: a file is missing or is not a saved batch."""
        directory = Path(directory)
        try:
            content = json.loads((directory / JSON_FILE).read_text(encoding="utf-8", errors="surrogatepass"))
            tensors = load_file(directory / TENSORS_FILE)
            return cls(
                **tensors,
                finish_reasons=tuple(content["finish_reasons"]),
                metadata=tuple(content["metadata"]),
                logprob_contract=LogprobContract(**content["logprob_contract"]),
            )
        except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f"{directory}: not a saved rollout batch ({type(error).__name__}: {error}); "
                f"give a directory that holds {TENSORS_FILE} and {JSON_FILE}"
            ) from error

    def validate(self) -> RolloutBatch:
        """Check the invariants of the module docstring; returns self.

        Raises TrainingError for non-finite numbers (invariants 6 and 7) and ValueError for anything else.
        """
        self._check_form()
        self._check_masks()
        self._check_numbers()
        return self

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def _check_form(self) -> None:
        rows, width = self.tokens_BT.shape
        if rows < 1 or len(self.finish_reasons) != rows or len(self.metadata) != rows:
            raise ValueError(
                f"a batch of {rows} rows has {len(self.finish_reasons)} finish reasons and {len(self.metadata)} "
                "metadata entries; all must be equal and at least 1"
            )
        for name, value in self._tensors().items():
            shape = (rows, width) if name.endswith("_BT") else (rows,)
            if tuple(value.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, must be {shape}")
            if value.dtype != _dtype_of(name):
                raise ValueError(f"{name} is {value.dtype}, must be {_dtype_of(name)}")
        unknown = sorted(set(self.finish_reasons) - set(FINISH_REASONS))
        if unknown:
            raise ValueError(f"finish reasons {unknown} are not among {FINISH_REASONS}")
        if (self.group_id_B < 0).any() or (self.weights_version_B < 0).any():
            raise ValueError("group ids and weights versions must not be negative")

    def _check_masks(self) -> None:
        width = self.tokens_BT.shape[1]
        prompts_B, lengths_B = self.prompt_lengths_B, self.lengths_B
        bad = (prompts_B < 1) | (lengths_B <= prompts_B) | (lengths_B > width)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise ValueError(
                f"row {row}: prompt length {int(prompts_B[row])}, length {int(lengths_B[row])}, width {width}; "
                "1 <= prompt length < length <= width must hold"
            )
        if (self.loss_mask_BT & ~self._response_BT()).any():
            raise ValueError("loss_mask_BT marks tokens of the prompt or of the padding")
        if not self.loss_mask_BT.any(dim=1).all():
            raise ValueError("loss_mask_BT marks no token in some row")
        if self.train_mask_BT is not None and (self.train_mask_BT & ~self.loss_mask_BT).any():
            raise ValueError("train_mask_BT marks tokens that loss_mask_BT does not")

    def _check_numbers(self) -> None:
        for name, value in self._tensors().items():
            if not value.is_floating_point():
                continue
            logprobs = name.endswith("logprobs_BT")
            if logprobs:
                value = value[self.loss_mask_BT]
            if not torch.isfinite(value).all():
                raise TrainingError(f"{name} holds numbers that are not finite; the model that computed it diverged")
            if logprobs and (value > LOGPROB_ROUNDING).any():
                raise ValueError(f"{name} holds log-probabilities above 0 (largest {float(value.max())})")
        outside = {
            "token_rewards_BT": ~self._response_BT(),
            "advantages_BT": ~self.loss_mask_BT,
            "returns_BT": ~self.loss_mask_BT,
        }
        for name, outside_BT in outside.items():
            value = getattr(self, name)
            if value is not None and (value[outside_BT] != 0).any():
                raise ValueError(f"{name} is not 0 outside the tokens it belongs to")
        if self.rewards_B is None or self.token_rewards_BT is None:
            return
        if not torch.allclose(self.rewards_B, self.token_rewards_BT.sum(dim=1), rtol=1e-4, atol=1e-4):
            raise ValueError("rewards_B is not the row sum of token_rewards_BT")

    def _response_BT(self) -> torch.Tensor:
        positions_T = torch.arange(self.tokens_BT.shape[1])
        return (positions_T >= self.prompt_lengths_B[:, None]) & (positions_T < self.lengths_B[:, None])


def _dtype_of(name: str) -> torch.dtype:
    if name in ("tokens_BT", "lengths_B", "prompt_lengths_B", "group_id_B", "weights_version_B"):
        return torch.int64
    return torch.bool if name.endswith("mask_BT") else torch.float32
