"""Several numbers of a reward become one: weighted, each on a common scale, unscored samples left out."""

from __future__ import annotations

import pytest
import torch

from omni_core.choices import RewardScale
from omni_core.options import AlgorithmConfig, RewardTerm
from omni_core.reward import RewardResult
from omni_trainer.samples import detail_means
from omni_trainer.scores import _summed

GROUPS = ["a", "a", "b", "b"]
RESULTS = [
    RewardResult(value=0.0, details={"size": 100.0, "read": "x"}),
    RewardResult(value=1.0, details={"size": 300.0}),
    RewardResult(value=0.5, details={"size": 200.0}),
    RewardResult.failed("no reader"),
]
VALID = [True, True, True, False]


def summed(scale, **weights):
    terms = tuple(RewardTerm(name=name, weight=weight) for name, weight in weights.items())
    return _summed(RESULTS, VALID, GROUPS, AlgorithmConfig(rewards=terms, reward_scale=scale))


def test_the_score_alone_is_the_default():
    assert summed(RewardScale.NONE).tolist() == [0.0, 1.0, 0.5, 0.0]


def test_numbers_are_weighed_as_they_are():
    found = summed(RewardScale.NONE, score=1.0, size=0.01)
    assert found.tolist() == pytest.approx([1.0, 4.0, 2.5, 0.0])


def test_a_large_number_does_not_drown_a_small_one_once_scaled():
    group = summed(RewardScale.GROUP, score=1.0, size=1.0)
    torch.testing.assert_close(group[0], -group[1])
    assert group[1] == pytest.approx(2 * summed(RewardScale.GROUP, score=1.0)[1].item(), rel=1e-3)
    assert group[2:].tolist() == [0.0, 0.0]  # alone in its group, and unscored
    batch = summed(RewardScale.BATCH)
    assert batch.tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.0], rel=1e-3)


def test_the_terms_of_the_reward_itself_are_what_is_scaled():
    own = (RewardTerm(name="score"), RewardTerm(name="size", weight=0.5))
    batch = AlgorithmConfig(reward_scale=RewardScale.BATCH)
    found = _summed(RESULTS, VALID, GROUPS, batch, own)
    written = AlgorithmConfig(rewards=own, reward_scale=RewardScale.BATCH)
    assert found.tolist() == _summed(RESULTS, VALID, GROUPS, written).tolist()
    # Unscaled, the reward's own sum is its score.
    plain = _summed(RESULTS, VALID, GROUPS, AlgorithmConfig(), own)
    assert plain.tolist() == [0.0, 1.0, 0.5, 0.0]


def test_a_number_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match=r"no number named 'taste' \(None\); the reward gives score, size"
    ):
        summed(RewardScale.NONE, taste=1.0)
    with pytest.raises(ValueError, match="no number named 'read'"):
        summed(RewardScale.NONE, read=1.0)


def test_a_detail_that_is_not_finite_is_in_no_mean():
    results = [
        RewardResult(value=1.0, details={"contrast": value, "read": "47"})
        for value in (1.0, float("nan"), 3.0)
    ]
    assert detail_means(results) == {"contrast": 2.0}
    assert detail_means(results[1:2]) == {}
