"""Sampling one token a row from vocabulary-parallel logits.

Invariants:

* the sampled id is ``argmax(logits / temperature + noise)`` over the kept ids, with the noise of
  :mod:`aligner.generation.noise`; temperature 0 takes the argmax without noise; the lowest id wins ties;
* ids at or above ``vocab_size`` (padding of the vocabulary) and the forbidden ids are never sampled;
* top-k keeps every id whose logit reaches the k-th largest one; top-p then keeps every id whose logit reaches the
  largest threshold at which the kept mass is at least p of what top-k left. Both keep *all* ids that tie at the
  threshold, so the kept set depends on no order;
* log-probabilities are those of the full softmax after temperature, filters and forbidden ids notwithstanding;
* no tensor is ever as wide as the vocabulary when it is split over ranks: ranks exchange O(B), O(B·k) for top-k,
  and O(B·256) four times for top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from aligner.generation import noise
from aligner.generation.engine import SamplingParams

_NEGATIVE = float("-inf")
_FIRST_LOOK = 4  # blocks a row whose noise is drawn before the others are bounded away


@dataclass(frozen=True)
class RowSampling:
    """What B rows ask for. ``forbidden``: (row, ids) pairs; the two ``*_rows`` list rows with that filter on."""

    keys_B: torch.Tensor  # int64: noise key of (seed, position)
    divisor_B: torch.Tensor  # float32: the temperature, 1 for greedy rows
    noisy_B: torch.Tensor  # float32: 1 for sampled rows, 0 for greedy ones
    top_k_rows: tuple[tuple[int, int], ...] = ()  # (row, k)
    top_p_rows: tuple[tuple[int, float], ...] = ()  # (row, p)
    forbidden: tuple[tuple[int, tuple[int, ...]], ...] = ()
    any_noise: bool = True
    any_divisor: bool = True


def row_sampling(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    generated: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> RowSampling:
    """Rows for :meth:`VocabParallelSampler.sample`. ``positions``: of the tokens to be sampled, in their sequences;
    ``generated``: tokens each row has sampled so far (stop ids are forbidden below ``min_new_tokens``)."""
    noisy = [p.temperature > 0 for p in params]
    keys_B = noise.row_keys(noise.seed_tensor(seeds), torch.tensor(list(positions), dtype=torch.int64))
    return RowSampling(
        keys_B=keys_B.to(device),
        divisor_B=torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=device),
        noisy_B=torch.tensor(noisy, dtype=torch.float32, device=device),
        top_k_rows=tuple((i, p.top_k) for i, p in enumerate(params) if noisy[i] and 0 < p.top_k < vocab_size),
        top_p_rows=tuple((i, p.top_p) for i, p in enumerate(params) if noisy[i] and p.top_p < 1.0),
        forbidden=tuple(
            (i, p.stop_token_ids) for i, p in enumerate(params) if p.stop_token_ids and generated[i] < p.min_new_tokens
        ),
        any_noise=any(noisy),
        any_divisor=any(p.temperature not in (0.0, 1.0) for p in params),
    )


class VocabParallelSampler:
    """Samples from logits whose vocabulary axis is split evenly over ``group``.

    ``local_size`` ids live on this rank, from ``rank * local_size`` on; ``vocab_size`` is the real vocabulary.
    """

    def __init__(self, vocab_size: int, local_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.vocab_size = vocab_size
        self.local_size = local_size
        self.group = group
        self.world = 1 if group is None else group.size()
        self.start = local_size * (0 if group is None else group.rank())

    def sample(self, logits_BV: torch.Tensor, rows: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
        """``logits_BV`` [B, local_size] (overwritten) -> (ids int64 [B], log-probs float32 [B]), on every rank.

        A row without a finite logit, or with a NaN, gives a NaN log-prob.
        """
        values_BV = logits_BV.float()
        real = min(max(self.vocab_size - self.start, 0), self.local_size)
        values_BV[:, real:] = _NEGATIVE
        if rows.any_divisor:
            values_BV /= rows.divisor_B[:, None]
        lse_B = torch.logsumexp(values_BV, dim=-1)
        # Values of forbidden ids are needed by nobody: what is sampled is not forbidden.
        for row, ids in rows.forbidden:
            local = [i - self.start for i in ids if self.start <= i < self.start + self.local_size]
            values_BV[row, local] = _NEGATIVE
        self._filter(values_BV, rows)
        score_B, index_B = self._local_winner(values_BV, rows)
        value_B = values_BV.gather(1, index_B[:, None])[:, 0]
        return self._merge(score_B, index_B + self.start, value_B, lse_B)

    def _merge(
        self, score_B: torch.Tensor, ids_B: torch.Tensor, value_B: torch.Tensor, lse_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.world == 1:
            return ids_B, value_B - lse_B
        mine = torch.stack([score_B.double(), ids_B.double(), value_B.double(), lse_B.double()])
        score, ids, value, lse = self._all_gather(mine).unbind(1)  # each [world, B]
        winner = score.max(dim=0, keepdim=True).indices  # the first maximum, so the lowest id
        logprobs_B = (value.gather(0, winner)[0] - torch.logsumexp(lse, dim=0)).float()
        return ids.gather(0, winner)[0].long(), logprobs_B

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor, group=self.group)
        return torch.stack(parts)

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    # ----------------------------------------------------------------- argmax of values + noise

    def _local_winner(self, values_BV: torch.Tensor, rows: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
        """(score, local index) of the best id on this rank."""
        if not rows.any_noise:
            best = values_BV.max(dim=-1)  # the first maximum, so the lowest id
            return best.values, best.indices
        blocks_BNL, first_block, head = self._blocks(values_BV)
        bounds_BN = noise.block_bounds(rows.keys_B, first_block, blocks_BNL.shape[1])
        bounds_BN *= rows.noisy_B[:, None]
        bounds_BN += blocks_BNL.amax(dim=-1)
        batch = values_BV.shape[0]
        score_B = torch.full((batch,), _NEGATIVE, device=values_BV.device)
        index_B = torch.full((batch,), self.local_size + head, device=values_BV.device)
        looked = bounds_BN.topk(min(_FIRST_LOOK, bounds_BN.shape[1]), dim=-1).indices
        every_row = torch.arange(batch, device=values_BV.device).repeat_interleave(looked.shape[1])
        self._expand(blocks_BNL, first_block, rows, every_row, looked.reshape(-1), score_B, index_B)
        # Blocks whose bound is below what is already reached cannot win (nor tie).
        bounds_BN.scatter_(1, looked, _NEGATIVE)
        pairs = ((bounds_BN >= score_B[:, None]) & (bounds_BN > _NEGATIVE)).nonzero()
        if pairs.numel():
            self._expand(blocks_BNL, first_block, rows, pairs[:, 0], pairs[:, 1], score_B, index_B)
        return score_B, (index_B - head).clamp_(0, self.local_size - 1)

    def _blocks(self, values_BV: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """``values_BV`` cut at multiples of BLOCK of the *global* id: ([B, N, BLOCK], first block, ids put before)."""
        head = self.start % noise.BLOCK
        tail = -(head + self.local_size) % noise.BLOCK
        if head or tail:
            values_BV = torch.nn.functional.pad(values_BV, (head, tail), value=_NEGATIVE)
        return values_BV.view(values_BV.shape[0], -1, noise.BLOCK), self.start // noise.BLOCK, head

    @staticmethod
    def _expand(
        blocks_BNL: torch.Tensor,
        first_block: int,
        rows: RowSampling,
        row_P: torch.Tensor,
        block_P: torch.Tensor,
        score_B: torch.Tensor,
        index_B: torch.Tensor,
    ) -> None:
        """Draw the noise of the given (row, block) pairs and update the rows' best score and lowest best index."""
        scores_PL = noise.block_noise(rows.keys_B[row_P], block_P + first_block)
        scores_PL *= rows.noisy_B[row_P, None]
        scores_PL += blocks_BNL[row_P, block_P]
        best = scores_PL.max(dim=-1)
        index_P = block_P * noise.BLOCK + best.indices
        before_B = score_B.clone()
        score_B.scatter_reduce_(0, row_P, best.values, "amax")
        index_B.masked_fill_(score_B > before_B, torch.iinfo(torch.int64).max)
        wins_P = best.values == score_B[row_P]
        index_B.scatter_reduce_(0, row_P[wins_P], index_P[wins_P], "amin")

    # ----------------------------------------------------------------- top-k and top-p

    def _filter(self, values_BV: torch.Tensor, rows: RowSampling) -> None:
        if not rows.top_k_rows and not rows.top_p_rows:
            return
        threshold_B = torch.full((values_BV.shape[0],), _NEGATIVE, device=values_BV.device)
        if rows.top_k_rows:
            index = torch.tensor([row for row, _ in rows.top_k_rows], device=values_BV.device)
            threshold_B[index] = self._kth_largest(values_BV[index], [k for _, k in rows.top_k_rows])
        if rows.top_p_rows:
            index = torch.tensor([row for row, _ in rows.top_p_rows], device=values_BV.device)
            p_R = torch.tensor([p for _, p in rows.top_p_rows], dtype=torch.float64, device=values_BV.device)
            floor_R = threshold_B[index]
            threshold_B[index] = self._nucleus_threshold(values_BV[index], floor_R, p_R).maximum(floor_R)
        values_BV.masked_fill_(values_BV < threshold_B[:, None], _NEGATIVE)

    def _kth_largest(self, values_RV: torch.Tensor, ks: list[int]) -> torch.Tensor:
        """The k-th largest value of each row over all ranks: float32 [R]."""
        k_max = max(ks)
        blocks_RNL, _, _ = self._blocks(values_RV)
        if k_max < blocks_RNL.shape[1]:  # the k largest values lie in the k blocks of largest maximum
            top = blocks_RNL.amax(dim=-1).topk(k_max, dim=-1).indices
            blocks_RNL = blocks_RNL.gather(1, top[:, :, None].expand(-1, -1, noise.BLOCK))
        flat_RC = blocks_RNL.reshape(len(ks), -1)
        if flat_RC.shape[1] < k_max:
            flat_RC = torch.nn.functional.pad(flat_RC, (0, k_max - flat_RC.shape[1]), value=_NEGATIVE)
        top_RK = flat_RC.topk(k_max, dim=-1).values
        if self.world > 1:
            gathered = self._all_gather(top_RK).transpose(0, 1).reshape(len(ks), -1)
            top_RK = gathered.topk(k_max, dim=-1).values
        k_R = torch.tensor(ks, device=values_RV.device)
        return top_RK.gather(1, k_R[:, None] - 1)[:, 0]

    def _nucleus_threshold(self, values_RV: torch.Tensor, floor_R: torch.Tensor, p_R: torch.Tensor) -> torch.Tensor:
        """The largest value t of each row such that ids with value >= t hold ``p_R`` of the mass above ``floor_R``."""
        kept_RV = values_RV >= floor_R[:, None]
        lse_R = torch.logsumexp(values_RV.masked_fill(~kept_RV, _NEGATIVE), dim=-1).double()
        if self.world > 1:
            lse_R = torch.logsumexp(self._all_gather(lse_R), dim=0)
        # Ids below (1 - p) / V cannot be in the nucleus: all of them together hold less than 1 - p.
        bound_R = (lse_R + torch.log((1 - p_R) / self.vocab_size) - 1e-3).float()
        row_C, column_C = (kept_RV & (values_RV >= bound_R[:, None])).nonzero().unbind(1)
        count_R = torch.bincount(row_C, minlength=p_R.numel())
        offset_R = count_R.cumsum(0) - count_R
        place_C = torch.arange(row_C.numel(), device=row_C.device) - offset_R[row_C]
        width = max(1, int(count_R.max()))
        sorted_RC = torch.full((p_R.numel(), width), _NEGATIVE, device=values_RV.device)
        sorted_RC[row_C, place_C] = values_RV[row_C, column_C]
        sorted_RC = sorted_RC.sort(dim=-1, descending=True).values
        mass_RC = (sorted_RC.double() - lse_R[:, None]).exp_().cumsum(dim=-1)
        mass_RC = torch.nn.functional.pad(mass_RC, (1, 0))  # mass of the first c candidates
        return self._search(_ordered_keys(sorted_RC).neg(), mass_RC, p_R)

    def _search(self, negated_keys_RC: torch.Tensor, mass_RC: torch.Tensor, target_R: torch.Tensor) -> torch.Tensor:
        """The largest float32 whose global mass of values at or above it reaches the target, 8 bits a round."""
        digits = torch.arange(1, 256, device=mass_RC.device)
        found_R = torch.full((target_R.numel(),), -(1 << 31), device=mass_RC.device)
        for shift in (24, 16, 8, 0):
            trial_RD = found_R[:, None] + (digits << shift)
            count_RD = torch.searchsorted(negated_keys_RC, trial_RD.neg(), right=True)
            mass_RD = self._reduce(mass_RC.gather(1, count_RD))
            found_R = found_R + ((mass_RD >= target_R[:, None]).sum(dim=-1) << shift)
        bits_R = torch.where(found_R >= 0, found_R, found_R ^ 0x7FFFFFFF)
        return bits_R.to(torch.int32).view(torch.float32).nan_to_num_(nan=_NEGATIVE)


def _ordered_keys(values: torch.Tensor) -> torch.Tensor:
    """int64 keys of float32 values with the same order (negative zero just below zero)."""
    bits = values.view(torch.int32).long()
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
