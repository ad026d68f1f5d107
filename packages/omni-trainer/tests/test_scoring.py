"""A wrong number of scores is an error, a passing failure is retried, a lasting one is no zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from omni_core.reward import RetryableRewardError, RewardFunction, RewardInput, RewardResult
from omni_core.trajectory import Media
from omni_trainer.rewards.scoring import Scorer


class Scripted(RewardFunction):
    """Returns (or raises) what it was given, call by call."""

    name = "scripted"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    def setup(self):
        self.calls.append("setup")

    def score(self, media, inputs):
        self.calls.append("score")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [
            RewardResult(value=value) if isinstance(value, float) else value for value in answer
        ]

    def close(self):
        self.calls.append("close")


def four():
    return Media(image=torch.zeros(4, 2, 2, 3, dtype=torch.uint8)), [RewardInput(prompt="p")] * 4


@pytest.mark.parametrize("count", [1, 5, 0])
def test_case_13_a_wrong_number_of_scores_names_scorer_expected_and_got(count):
    scorer = Scorer(Scripted([0.5] * count), retries=2)
    with pytest.raises(
        ValueError, match=f"reward 'scripted' returned {count} scores for 4 samples"
    ):
        scorer.score(*four())


def test_a_passing_failure_is_tried_again():
    waits = []
    reward = Scripted(
        RetryableRewardError("500"), RetryableRewardError("500"), [0.1, 0.2, 0.0, 0.4]
    )
    scorer = Scorer(reward, retries=2, sleep=waits.append)
    results = scorer.score(*four())
    assert [result.value for result in results] == [0.1, 0.2, 0.0, 0.4]
    assert all(result.ok for result in results)
    assert waits == [0.1, 0.2]
    assert (scorer.counts.scored, scorer.counts.failed, scorer.counts.retries) == (4, 0, 2)
    assert scorer.counts.seconds > 0


def test_a_score_of_any_number_type_goes_on_as_a_float():
    given = [torch.tensor(0.25), np.float32(0.5), True, 2]
    scorer = Scorer(Scripted([RewardResult(value=value) for value in given]), retries=0)
    values = [result.value for result in scorer.score(*four())]
    assert values == [0.25, 0.5, 1.0, 2.0]
    assert {type(value) for value in values} == {float}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([0.1, 0.2, 0.3, 0.4], "returned a float, not a RewardResult"),
        (None, "returned NoneType, not a list of RewardResult"),
        ([RewardResult(value="high")] * 4, "returned the score 'high'"),
    ],
)
def test_what_is_no_result_is_named_with_its_scorer(answer, said):
    reward = Scripted()
    reward.score = lambda media, inputs: answer
    with pytest.raises(TypeError, match=f"reward 'scripted' {said}"):
        Scorer(reward, retries=0).score(*four())


def test_a_lasting_failure_leaves_every_sample_unscored():
    scorer = Scorer(
        Scripted(*[RetryableRewardError("time-out")] * 3), retries=2, sleep=lambda _: None
    )
    results = scorer.score(*four())
    assert [result.ok for result in results] == [False] * 4
    assert results[0].error == "reward 'scripted': time-out (tried 3 times)"
    assert all(math.isnan(result.value) for result in results)
    assert (scorer.counts.scored, scorer.counts.failed, scorer.counts.retries) == (0, 4, 2)


def test_without_retries_a_batch_is_tried_once():
    reward = Scripted(RetryableRewardError("time-out"))
    results = Scorer(reward, retries=0).score(*four())
    assert results[0].error == "reward 'scripted': time-out (tried 1 times)"
    assert reward.calls == ["score"]


def test_a_mistake_of_the_reward_passes_on_untried():
    reward = Scripted(KeyError("column"), [0.0] * 4)
    with pytest.raises(KeyError, match="column"):
        Scorer(reward, retries=5).score(*four())
    assert reward.calls == ["score"]


def test_a_score_that_is_no_number_is_a_failure():
    results = Scorer(
        Scripted([0.5, math.nan, math.inf, RewardResult.failed("unreadable")]), retries=0
    ).score(*four())
    assert [result.ok for result in results] == [True, False, False, False]
    assert results[1].error == "reward 'scripted' returned nan"
    assert results[3].error == "unreadable"


def test_models_are_loaded_and_freed_by_the_reward():
    reward = Scripted()
    scorer = Scorer(reward, retries=0)
    scorer.setup()
    scorer.close()
    assert reward.calls == ["setup", "close"]
