"""A picture's size as a JPEG file, as a reward."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image

from omni_core.plugins import REWARDS, registry
from omni_core.reward import RewardInput
from omni_core.testing import RewardSuite
from omni_core.trajectory import Media
from omni_trainer.rewards.jpeg import JPEGReward
from omni_trainer.rewards.options import JPEGRewardConfig, Prefer


def noisy(amount):
    drawn = torch.rand(32, 32, 3, generator=torch.Generator().manual_seed(0))
    return (128 + amount * (drawn - 0.5)).to(torch.uint8)


IMAGES = torch.stack([noisy(amount) for amount in (0, 50, 250)])


class TestJPEGReward(RewardSuite):
    tolerance = 0.0

    @pytest.fixture
    def reward(self):
        return registry(REWARDS).get("jpeg_compressibility").build(JPEGRewardConfig())

    @pytest.fixture
    def media(self):
        return Media(image=IMAGES)

    @pytest.fixture
    def inputs(self):
        return [RewardInput(prompt="p")] * 3


@pytest.mark.parametrize(("prefer", "sign"), [(Prefer.SMALL, -1), (Prefer.LARGE, 1)])
@pytest.mark.parametrize("quality", [95, 50])
def test_the_score_is_the_files_size_in_kilobytes(prefer, sign, quality):
    reward = JPEGReward(JPEGRewardConfig(prefer=prefer, quality=quality))
    found = reward.score(Media(image=IMAGES), [RewardInput(prompt="p")] * 3)
    sizes = []
    for picture in IMAGES.numpy():
        file = io.BytesIO()
        Image.fromarray(picture).save(file, format="JPEG", quality=quality)
        sizes.append(len(file.getvalue()))
    assert [result.value for result in found] == [sign * size / 1000 for size in sizes]
    assert sizes[0] < sizes[1] < sizes[2]
