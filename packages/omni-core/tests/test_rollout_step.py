"""The step that every sampler takes: rows do not see each other, and what is stored is what is scored."""

from __future__ import annotations

import pytest
import torch

from omni_core.choices import StepKind
from omni_core.reverse_step import reverse_step
from omni_core.rollout_step import StepRule, rollout_step, rows_inside
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import initial_noise_batch

SHAPES = {"image": (2, 3), "audio": (4,)}
SEEDS = [5, 6, 7]
RULE = StepRule(schedule=FlowMatchSchedule.linear(4, shift=3.0), kind=StepKind.SDE, noise_level=0.7)


def step(rows, inside, *, dtype=torch.float32, index=1):
    """Take one step of some of the rows."""
    seeds = [SEEDS[row] for row in rows]
    state = initial_noise_batch(seeds, SHAPES)
    velocity = {name: (value * 0.5 + 0.1).to(dtype) for name, value in state.items()}
    after, scores = rollout_step(
        RULE, state, velocity, index, inside=inside, seeds=seeds, shapes=SHAPES
    )
    return state, velocity, after, scores


def test_rows_inside_a_window_are_found():
    assert rows_inside([(0, 1), (), (1,)], 1) == [0, 2]
    assert rows_inside([(0, 1), (), (1,)], 3) == []


def test_case_18_each_row_steps_as_it_does_alone():
    _, _, together, scores = step([0, 1, 2], [0, 2])
    assert scores is not None
    for row, inside, place in ((0, [0], 0), (1, [], None), (2, [0], 1)):
        _, _, alone, score = step([row], inside)
        for name, value in together.items():
            assert torch.equal(value[row : row + 1], alone[name])
        if place is None:
            assert score is None
        else:
            assert score is not None
            assert torch.equal(scores[place], score[0])


def test_case_4_a_step_in_float64_is_scored_as_it_is_stored():
    state, velocity, after, scores = step([0, 1, 2], [0, 1, 2], dtype=torch.float64)
    sigma, sigma_next = RULE.schedule.at(torch.full((3,), 1))
    again = reverse_step(
        RULE.kind,
        state,
        velocity,
        sigma,
        sigma_next,
        sigma_guard=RULE.schedule.sigma_guard,
        noise_level=RULE.noise_level,
        next_sample=after,
    )
    assert scores is not None
    assert {value.dtype for value in after.values()} == {scores.dtype} == {torch.float32}
    assert torch.equal(scores, again.require_log_prob().float())


def test_the_last_step_is_never_stochastic():
    with pytest.raises(ValueError, match="sigma"):
        step([0], [0], index=3)
