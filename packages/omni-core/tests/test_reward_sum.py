"""Several rewards become one, each on the scale that was asked for."""

from __future__ import annotations

import math

import pytest
import torch

from omni_core.choices import RewardScale
from omni_core.reward_sum import weighted_reward_sum

GROUPS = ["a", "a", "b", "b"]
REWARDS = {
    "clip": torch.tensor([20.0, 30.0, 24.0, 26.0]),
    "ocr": torch.tensor([0.0, 1.0, 1.0, 0.0]),
}


def total(scale: RewardScale, **weights: float) -> torch.Tensor:
    return weighted_reward_sum(REWARDS, weights, GROUPS, scale=scale, eps=1e-12)


def test_unscaled_rewards_are_added_as_they_are() -> None:
    found = total(RewardScale.NONE, clip=0.5, ocr=2.0)
    assert found.tolist() == [10.0, 17.0, 14.0, 13.0]


def test_each_reward_has_its_groups_or_the_batchs_scale() -> None:
    one = math.sqrt(0.5)
    group = total(RewardScale.GROUP, clip=1.0, ocr=1.0)
    torch.testing.assert_close(group, torch.tensor([-2 * one, 2 * one, 0.0, 0.0]))
    batch = total(RewardScale.BATCH, clip=1.0, ocr=0.0)
    clip = REWARDS["clip"]
    torch.testing.assert_close(batch, (clip - clip.mean()) / clip.std())


def test_a_scale_does_not_depend_on_a_rewards_unit() -> None:
    for scale in (RewardScale.GROUP, RewardScale.BATCH):
        first = total(scale, clip=1.0, ocr=1.0)
        hundred = {**REWARDS, "ocr": 100.0 * REWARDS["ocr"] + 7.0}
        again = weighted_reward_sum(
            hundred, {"clip": 1.0, "ocr": 1.0}, GROUPS, scale=scale, eps=1e-12
        )
        torch.testing.assert_close(again, first)


def test_case_11_an_unscored_row_is_in_no_scale() -> None:
    rewards = {"r": torch.tensor([1.0, math.nan, 3.0])}
    valid = torch.tensor([True, False, True])
    for scale in RewardScale:
        found = weighted_reward_sum(
            rewards, {"r": 1.0}, ["a"] * 3, scale=scale, valid=valid, eps=1e-12
        )
        assert found[1] == 0.0
        kept = weighted_reward_sum(
            {"r": rewards["r"][valid]}, {"r": 1.0}, ["a"] * 2, scale=scale, eps=1e-12
        )
        assert torch.equal(found[valid], kept)


def test_names_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards are \['clip', 'ocr'\], weights are for"):
        weighted_reward_sum(REWARDS, {"clip": 1.0}, GROUPS, scale=RewardScale.NONE)
