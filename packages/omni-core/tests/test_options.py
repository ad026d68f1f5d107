"""Options are frozen, checked at the field, and say how they combine."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from omni_core.choices import RewardScale
from omni_core.options import (
    AlgorithmConfig,
    DiffusionRolloutConfig,
    DiffusionSamplingConfig,
    LRSchedule,
    OnRewardError,
    OptimizerConfig,
    OptimizerKind,
    RewardConfig,
    RunFacts,
    ScheduleSource,
    Source,
    WeightTransport,
)


def test_the_rate_is_constant_after_warm_up() -> None:
    config = OptimizerConfig(lr=0.4, warmup_steps=4)
    assert [config.rate(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_linear_and_cosine_reach_zero_at_the_last_step_and_stay_there() -> None:
    linear = OptimizerConfig(lr=1.0, schedule=LRSchedule.LINEAR, warmup_steps=2, total_steps=6)
    assert [linear.rate(s) for s in range(9)] == pytest.approx(
        [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    )
    cosine = OptimizerConfig(lr=1.0, schedule=LRSchedule.COSINE, total_steps=4)
    expected = [(1 + math.cos(math.pi * s / 4)) / 2 for s in range(5)]
    assert [cosine.rate(s) for s in range(5)] == pytest.approx(expected)
    assert cosine.rate(9) == 0.0


def test_a_decaying_schedule_without_its_length_is_refused() -> None:
    config = OptimizerConfig(schedule=LRSchedule.COSINE, warmup_steps=2)
    assert config.rate(0) == config.lr / 2
    with pytest.raises(ValueError, match="total_steps"):
        config.rate(2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("eps", -1.0),
        ("weight_decay", -0.1),
        ("max_grad_norm", 0.0),
        ("warmup_steps", -1),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("max_nonfinite_steps", -1),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"must be|expected two numbers"):
        OptimizerConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "name", "member"),
    [
        (OptimizerConfig, "kind", OptimizerKind.ADAMW_8BIT),
        (OptimizerConfig, "schedule", LRSchedule.COSINE),
        (AlgorithmConfig, "reward_scale", RewardScale.GROUP),
        (RewardConfig, "on_error", OnRewardError.MASK),
        (DiffusionSamplingConfig, "schedule", ScheduleSource.LINEAR),
        (DiffusionRolloutConfig, "transport", WeightTransport.OBJECT_STORE),
    ],
)
def test_a_choice_may_be_given_as_its_name(options: Any, name: str, member: Any) -> None:
    assert getattr(options(**{name: member.value}), name) is member
    with pytest.raises(ValueError, match="typo"):
        options(**{name: "typo"})


def test_options_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        OptimizerConfig().lr = 1.0  # type: ignore[misc]


def test_an_algorithm_is_on_policy_and_rewarded_unless_it_says_otherwise() -> None:
    config = AlgorithmConfig()
    assert (config.source, config.model_type) == (Source.ROLLOUT, "diffusion")
    assert config.needs_reward
    assert not config.needs_reference
    facts = RunFacts(num_inference_steps=4, samples_per_prompt=2, prompts_per_step=1)
    assert config.mistakes(facts) == {}
    with pytest.raises(NotImplementedError):
        config.rollout_algo()
