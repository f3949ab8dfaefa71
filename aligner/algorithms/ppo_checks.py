"""Step-0 self-checks: before the first update, what must be equal is equal, or the run stops.

A broken weight transfer, a wrong temperature or a misplaced token shows here, not as a run that learns badly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aligner.algorithms.ppo_metrics import engine_difference
from aligner.config.sources import role_source
from aligner.data.packing import gather_rows
from aligner.distributed.collectives import all_gather_rows
from aligner.errors import TrainingError
from aligner.models.forward import training_logprobs
from aligner.rollout.batch import RolloutBatch
from aligner.rollout.score import per_pack, rows_for_role

if TYPE_CHECKING:
    from aligner.algorithms.ppo import PPO

ENGINE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # mean nats a token
# Mean nats a token between two models of equal weights: their layouts, and the alignment of their buffers, may differ.
REFERENCE_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}


def check_first_rollout(ppo: PPO, batch: RolloutBatch) -> None:
    """Raise TrainingError, on all ranks, unless the three identities hold. ``batch`` has its log-probs. Collective.

    1. policy and reference log-probs are equal when both start from the same source;
    2. the ratio is exactly 1 when the same packs run through the update's forward pass before the first update;
    3. the engine's log-probs agree with the trainer's.
    """
    _check_reference(ppo, batch)
    _check_ratio(ppo, batch)
    _check_engine(ppo, batch)


def _check_reference(ppo: PPO, batch: RolloutBatch) -> None:
    actor, reference = ppo.config.actor, ppo.config.reference
    if role_source(actor) != role_source(reference) or actor.model.dtype != reference.model.dtype:
        return
    assert batch.policy_logprobs_BT is not None and batch.reference_logprobs_BT is not None
    found = float(_masked(batch.policy_logprobs_BT - batch.reference_logprobs_BT, batch).mean())
    allowed = REFERENCE_TOLERANCE[actor.model.dtype]
    if found > allowed:
        raise TrainingError(
            f"self-check: policy and reference start from {role_source(actor)}, but their log-probs differ by "
            f"{found:.3g} nats a token before the first update (at most {allowed:g}); the weights were not loaded alike"
        )


def _check_ratio(ppo: PPO, batch: RolloutBatch) -> None:
    assert batch.policy_logprobs_BT is not None
    actor = ppo.roles.actor
    share = rows_for_role(actor.topology, batch.sequences(), ppo.config.data.pack_length)
    masks = per_pack(share, batch.loss_mask_BT)
    scored = training_logprobs(actor, share.packs, temperature=ppo.temperature, masks=masks)
    again_NT = gather_rows(share.packs, scored, len(share.rows), batch.tokens_BT.shape[1])
    again_BT = all_gather_rows(share.rows, again_NT, len(batch), actor.topology.pg.dp)
    ratios = torch.exp(again_BT - batch.policy_logprobs_BT)[batch.loss_mask_BT]
    if not bool((ratios == 1.0).all()):
        raise TrainingError(
            f"self-check: before the first update the ratio must be exactly 1 on the same packs; it is "
            f"between {float(ratios.min()):.8g} and {float(ratios.max()):.8g}. Something random or stateful is in the "
            "forward pass (dropout, a non-deterministic kernel); ppo.self_check=false runs without this check"
        )


def _check_engine(ppo: PPO, batch: RolloutBatch) -> None:
    dtype = ppo.config.actor.model.dtype
    given = ppo.config.ppo.self_check_tolerance
    allowed = ENGINE_TOLERANCE[dtype] if given is None else given
    found = float(engine_difference(batch).mean())
    if found > allowed:
        raise TrainingError(
            f"self-check: engine and trainer log-probs of the sampled tokens differ by {found:.3g} nats on average, "
            f"more than {allowed:g} ({dtype}); the engine runs on other weights or another temperature than "
            "the trainer. ppo.self_check_tolerance sets the limit"
        )


def _masked(values_BT: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    return values_BT[batch.loss_mask_BT].abs()
