"""The plug point for a user's reward: what it is called with, and every wrong result by its message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aligner.distributed import platform
from aligner.errors import ConfigError, DataError
from aligner.rewards.function import FunctionReward
from aligner.rewards.protocol import RewardRequest

REQUESTS = [
    RewardRequest(({"role": "user", "content": "Q"},), "abc", "stop", 3, (1, 2, 3), {"domain": "letters"}),
    RewardRequest(({"role": "user", "content": "Q"},), "abcdef", "length", 6, (1, 2, 3), {"domain": "more"}),
]


@pytest.fixture(scope="module", autouse=True)
def _single_process() -> Iterator[None]:
    platform.initialize(threads=1)
    yield
    platform.shutdown()


def reward(tmp_path: Path, body: str) -> FunctionReward:
    path = tmp_path / "mine.py"
    path.write_text(f"def score(requests):\n    {body}\n")
    return FunctionReward(f"{path}:score")


def test_it_sees_everything_and_its_scores_come_back(tmp_path: Path) -> None:
    body = (
        "return [len(r.response) + (r.finish_reason == 'stop') * 10 + r.num_tokens * 100 "
        "+ (r.metadata['domain'] == 'more') * 1000 + (r.messages[0]['content'] == 'Q') * 10000 for r in requests]"
    )
    output = reward(tmp_path, body).score(REQUESTS)
    assert output.scores_B.tolist() == [10313.0, 11606.0]
    assert output.scores_B.dtype == torch.float32


@pytest.mark.parametrize(
    "expression",
    ["(0, True)", "__import__('numpy').array([0, 1])", "__import__('torch').tensor([0.0, 1.0])"],
)
def test_any_sequence_of_numbers_will_do(tmp_path: Path, expression: str) -> None:
    assert reward(tmp_path, f"return {expression}").score(REQUESTS).scores_B.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "returned 1 scores for 2 requests"),
        ("return None", "returned a NoneType"),
        ("return 1.0", "returned a float"),
        ("return '12'", "returned a str"),
        ("return __import__('torch').tensor(1.0)", "returned a float"),
        ("return [1.0, float('nan')]", "returned nan for request 1"),
        ("return [float('inf'), 0]", "returned inf for request 0"),
        ("return [1.0, '2']", "returned '2' for request 1"),
        ("return [1.0, None]", "returned None for request 1"),
        ("return 1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_wrong_results_are_named(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(DataError, match=f"reward.function .*mine.py:score {message}"):
        reward(tmp_path, body).score(REQUESTS)


def test_errors_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward.function"):
        FunctionReward(str(tmp_path / "absent.py") + ":score")
    reward(tmp_path, "pass")
    with pytest.raises(ConfigError, match="reward.function"):
        FunctionReward(f"{tmp_path}/mine.py:other")
