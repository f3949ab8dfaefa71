"""A trained reward model as the reward: one scalar a response, read at its last real token.

A reward model that shares the policy's tokenizer (equal fingerprints) scores the very ids that were sampled. One with
another tokenizer scores the text: the conversation goes through its own chat template and the response is tokenised
again, ending with its end-of-turn token only if the policy ended its turn. What its template refuses, or what does not
fit its context, is an error; ids of one vocabulary are never scored as those of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aligner.data.loader import rows_of_rank
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.collectives import all_gather_rows, on_all_ranks
from aligner.errors import DataError, ModelError
from aligner.models.forward import score_rewards
from aligner.models.packs import pack_for
from aligner.models.role_model import RoleModel
from aligner.rewards.protocol import RewardOutput, RewardRequest
from aligner.rewards.standardize import ScoreStatistics


class ModelReward:
    """Scores with ``model``. ``statistics``: scores become ``(score - mean) / std`` (None: as the model gives them).

    ``tokenizer`` is the reward model's own, ``policy_tokenizer`` the one that the requests' ids belong to.
    """

    def __init__(
        self,
        model: RoleModel,
        tokenizer: Tokenizer,
        policy_tokenizer: Tokenizer,
        *,
        statistics: ScoreStatistics | None,
        pack_length: int,
    ) -> None:
        if model.head != "scalar":
            raise ModelError(f"role {model.name} has a {model.head!r} head; a reward model has a scalar head")
        tokenizer.check_vocabulary(model.arch.vocab_size)
        self.model = model
        self.tokenizer = tokenizer
        self.policy_tokenizer = policy_tokenizer
        self.statistics = statistics
        self.pack_length = pack_length
        self.same_tokenizer = tokenizer.fingerprint() == policy_tokenizer.fingerprint()

    def score(self, requests: Sequence[RewardRequest]) -> RewardOutput:
        """Scores [B], equal on every rank; ``metrics["unstandardized"]`` if they are standardised. Collective.

        Raises DataError when a response cannot be tokenised for this model or does not fit its context.
        """
        topology = self.model.topology
        rows = rows_of_rank(range(len(requests)), topology.dp_rank, topology.dp)
        sequences = on_all_ranks(lambda: [self.token_ids(requests[row]) for row in rows])
        packs = pack_for(topology, sequences, self.pack_length)
        local = torch.zeros(len(rows))
        for pack, scores in zip(packs, score_rewards(self.model, packs), strict=True):
            local[list(pack.rows)] = scores.float().cpu()
        scores_B = all_gather_rows(rows, local, len(requests), topology.pg.dp)
        if self.statistics is None:
            return RewardOutput(scores_B)
        return RewardOutput(self.statistics.apply(scores_B), {"unstandardized": scores_B})

    def token_ids(self, request: RewardRequest) -> torch.Tensor:
        """The ids that are scored, int64 [T]: those sampled, or the text in this model's vocabulary."""
        ids = list(request.token_ids) if self.same_tokenizer else self._retokenized(request)
        longest = self.model.arch.max_position_embeddings
        if len(ids) > longest:
            raise DataError(
                f"a response has {len(ids)} tokens with its prompt in the reward model's vocabulary, but the reward "
                f"model's context is {longest}; lower data.max_prompt_length or generation.sampling.max_new_tokens"
            )
        return torch.tensor(ids, dtype=torch.int64)

    def _retokenized(self, request: RewardRequest) -> list[int]:
        if not request.messages:
            raise DataError(
                "the reward model's tokenizer is not the policy's, and a prompt is given as ids without its messages; "
                "use a reward model with the policy's tokenizer, or prompts with messages"
            )
        answer = {"role": "assistant", "content": request.response}
        ids, _ = self.tokenizer.encode_conversation([*map(dict, request.messages), answer])
        ended = bool(request.token_ids) and request.token_ids[-1] in self.policy_tokenizer.stop_token_ids
        return ids if ended else ids[:-1]  # the conversation's last id is the end-of-turn token
