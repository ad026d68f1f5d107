"""The suites of omni_core.testing, on a stranger's reward and algorithm."""

import pytest
import torch

from omni_core import Media, RewardInput
from omni_core.testing.algorithm_suite import AlgorithmSuite
from omni_core.testing.reward_suite import RewardSuite
from omni_fork_example.options import RednessOptions, ReinforceOptions
from omni_fork_example.redness import Redness
from omni_fork_example.reinforce import Reinforce


class TestRedness(RewardSuite):
    @pytest.fixture
    def reward(self):
        return Redness(RednessOptions())

    @pytest.fixture
    def media(self):
        image = torch.zeros(4, 8, 8, 3, dtype=torch.uint8)
        image[0, ..., 0] = 255
        image[1, ..., 1] = 255
        image[2, ..., 2] = 128
        return Media(image=image)

    @pytest.fixture
    def inputs(self):
        return [RewardInput(prompt="a picture") for _ in range(4)]

    def test_red_scores_1_and_green_minus_one_half(self, ready, media, inputs):
        scores = [result.value for result in ready.score(media, inputs)]

        assert scores[:2] == [1.0, -0.5]
        assert scores[2] == pytest.approx(-128 / 255 / 2)
        assert scores[3] == 0.0


class TestReinforce(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self):
        return Reinforce(ReinforceOptions())

    def test_the_gradient_is_that_of_minus_a_log_p(self, algorithm, inputs):
        terms = algorithm.loss(inputs).terms

        assert torch.equal(terms, -inputs.advantages * inputs.current.log_prob)
