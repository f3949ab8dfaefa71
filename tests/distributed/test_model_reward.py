"""A reward model as the reward: what it scores, with which tokenizer, on how many ranks; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from aligner.config.hf_config import read_architecture
from aligner.data.packing import build_pack
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.distributed import platform
from aligner.distributed.topology import Degrees, build_topology, seed_everything
from aligner.errors import AlignerError, DataError, ModelError, RankFailure
from aligner.models.build import build_model
from aligner.models.forward import score_rewards
from aligner.models.role_model import RoleModel
from aligner.rewards.model_reward import ModelReward
from aligner.rewards.protocol import RewardRequest
from aligner.rewards.standardize import ScoreStatistics
from aligner.weights.convert import load_hf
from tests.distributed.families import write_model
from tests.distributed.spawn import run_ranks

CHATML = (
    "{% for m in messages %}{{ '<a>' + m['role'] + ':' + m['content'] + '<z>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>assistant:' }}{% endif %}"
)
ANSWERS = [("Paris.", True), ("It is Paris, the", False), ("", True), ("no", False), ("yes, it is", True)]
VOCABULARY = 300
CONTEXT = 128
LAYOUTS = {1: [Degrees()], 2: [Degrees(), Degrees(tp=2, sequence_parallel=True), Degrees(pp=2)]}


def write_tokenizer(directory: Path, reverse: bool) -> None:
    """One id a byte; ``reverse`` gives the same text other ids."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    names = ["<a>", "<z>", *letters]
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<a>", "<z>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<z>", pad_token="<z>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(str(directory))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reward")
    write_model(root / "model", "llama3", vocab_size=VOCABULARY)
    write_model(root / "small", "llama3", vocab_size=100)
    write_tokenizer(root / "policy", reverse=False)
    write_tokenizer(root / "other", reverse=True)
    return root


def requests(policy: Tokenizer) -> list[RewardRequest]:
    """Responses as a policy samples them: one that ended holds its end-of-turn token, one that was cut does not."""
    prompt = ({"role": "user", "content": "What is the capital of France?"},)
    found = []
    for text, ended in ANSWERS:
        answer = policy.encode(text) + [policy.end_of_turn_id] * ended
        ids = (*policy.encode_messages(list(prompt)), *answer)
        found.append(RewardRequest(prompt, text, "stop" if ended else "length", len(answer), ids))
    return found


def build(directory: Path, degrees: Degrees, head: str = "scalar") -> RoleModel:
    topology = build_topology(degrees)
    seed_everything(3, topology)
    model = build_model("reward", read_architecture(directory), topology, head=head, dtype=torch.float32, seed=5)
    load_hf(model, directory)
    return model


def error_of(action: Callable[[], Any]) -> AlignerError | None:
    try:
        action()
    except AlignerError as error:
        return error
    return None


def on_a_rank(directory: Path) -> list[dict[str, Any]]:
    policy, other = load_tokenizer(directory / "policy"), load_tokenizer(directory / "other")
    asked, found = requests(policy), []
    for degrees in LAYOUTS[platform.world_size()]:
        model = build(directory / "model", degrees)

        def reward(
            tokenizer: Tokenizer, statistics: ScoreStatistics | None = None, model: RoleModel = model
        ) -> ModelReward:
            return ModelReward(model, tokenizer, policy, statistics=statistics, pack_length=70)

        result: dict[str, Any] = {
            "same": reward(policy).score(asked),
            "other": reward(other).score(asked),
            "standardized": reward(policy, ScoreStatistics(0.5, 2.0, 9)).score(asked),
        }
        too_long = replace(asked[1], token_ids=asked[1].token_ids * 4)
        no_messages = replace(asked[1], messages=())
        result["too_long"] = error_of(lambda: reward(policy).score([asked[0], too_long, asked[2]]))  # noqa: B023
        result["no_messages"] = error_of(lambda: reward(other).score([asked[0], no_messages, asked[2]]))  # noqa: B023
        result["ids_are_enough"] = reward(policy).score([asked[0], no_messages, asked[2]]).scores_B
        found.append(result)
    if platform.world_size() == 1:
        check_single(directory, policy, other, model, found[0])
    return found


def check_single(directory: Path, policy: Tokenizer, other: Tokenizer, model: RoleModel, found: dict) -> None:
    """Scores against sequences made by hand and scored one by one; errors at construction."""
    asked = requests(policy)
    sampled = [torch.tensor(request.token_ids) for request in asked]
    by_hand = []
    for text, ended in ANSWERS:
        rendered = f"<a>user:What is the capital of France?<z><a>assistant:{text}" + "<z>" * ended
        by_hand.append(torch.tensor(other.encode(rendered)))
    assert all(not torch.equal(a, b) for a, b in zip(sampled, by_hand, strict=True))
    for name, tokenizer, sequences in (("same", policy, sampled), ("other", other, by_hand)):
        reward = ModelReward(model, tokenizer, policy, statistics=None, pack_length=70)
        for request, sequence in zip(asked, sequences, strict=True):
            assert torch.equal(reward.token_ids(request), sequence), (name, request.response)
        alone = torch.cat([score_rewards(model, [build_pack([sequence], [0])])[0] for sequence in sequences])
        torch.testing.assert_close(found[name].scores_B, alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(alone, with_transformers(directory, model, sequences), rtol=0, atol=1e-4)
    # sampled ids count, whatever the text says; another tokenizer scores the text, whatever the ids say
    renamed = replace(asked[0], response="something else")
    reworded = replace(asked[0], token_ids=(*asked[1].token_ids, policy.end_of_turn_id))
    same, another = (ModelReward(model, t, policy, statistics=None, pack_length=70) for t in (policy, other))
    assert torch.equal(same.token_ids(renamed), sampled[0])
    assert torch.equal(another.token_ids(reworded), by_hand[0])
    with pytest.raises(ModelError, match=r"vocab_size is 100"):
        ModelReward(build(directory / "small", Degrees()), other, policy, statistics=None, pack_length=70)
    with pytest.raises(ModelError, match="'lm' head"):
        ModelReward(build(directory / "model", Degrees(), "lm"), other, policy, statistics=None, pack_length=70)


def with_transformers(directory: Path, model: RoleModel, sequences: list[torch.Tensor]) -> torch.Tensor:
    """The same trunk in transformers, and the head's affine map on its last hidden state."""
    from transformers import AutoModelForCausalLM

    trunk = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).model
    head = model.module.head
    with torch.no_grad():
        last = torch.stack([trunk(sequence[None]).last_hidden_state[0, -1] for sequence in sequences])
        return (last @ head.weight.reshape(-1, 1) + head.bias).squeeze(1)


def test_model_reward(directory: Path) -> None:
    (single,) = run_ranks(1, on_a_rank, directory, timeout=300)[0]
    ranks = run_ranks(2, on_a_rank, directory, timeout=300)
    for layout, degrees in enumerate(LAYOUTS[2]):
        for rank, results in enumerate(ranks):
            found = results[layout]
            for name in ("same", "other", "standardized"):
                # equal bits on both ranks, equal numbers in every layout
                assert torch.equal(found[name].scores_B, ranks[0][layout][name].scores_B)
                torch.testing.assert_close(found[name].scores_B, single[name].scores_B, rtol=0, atol=1e-5)
            torch.testing.assert_close(found["ids_are_enough"], found["same"].scores_B[:3], rtol=0, atol=1e-5)
            # (score - 0.5) / 2, and the score itself among the metrics
            raw = found["standardized"].metrics["unstandardized"]
            assert torch.equal(raw, found["same"].scores_B)
            torch.testing.assert_close(found["standardized"].scores_B, (raw - 0.5) / 2)
            assert found["same"].metrics == {}
            # the wrong request is row 1: with two data-parallel replicas the other rank hears of it
            own = degrees != Degrees() or rank == 1
            for name, text in (("too_long", f"context is {CONTEXT}"), ("no_messages", "without its messages")):
                assert type(found[name]) is (DataError if own else RankFailure)
                assert text in str(found[name])
