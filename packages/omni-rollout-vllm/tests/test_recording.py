"""The recording scheduler: core's steps in the engine's loop, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.reverse_step import reverse_step
from omni_core.rollout_step import StepRule
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import initial_noise_batch, step_noise_batch
from omni_core.trajectory import SamplingSpec
from omni_rollout_vllm.families.family import check_sides
from omni_rollout_vllm.families.qwen_image import QwenImage
from omni_rollout_vllm.families.sd3 import SD3
from omni_rollout_vllm.recording import PipelineError, RecordingScheduler

SHAPES = {"image": (4, 4, 6)}
SEEDS = [11, 12, 13]
SCHEDULE = FlowMatchSchedule.linear(4, shift=3.0)


def scheduler(
    *,
    kind: StepKind = StepKind.SDE,
    windows: Any = ((0, 1, 2), (1,), ()),
    family: Any = None,
) -> RecordingScheduler:
    return RecordingScheduler(
        StepRule(schedule=SCHEDULE, kind=kind, noise_level=0.7),
        seeds=SEEDS,
        windows=windows,
        shapes=SHAPES,
        family=family or SD3(),
        config={},
        device=torch.device("cpu"),
    )


def velocity(latents: Tensor) -> Tensor:
    return latents.flip(1) * 0.5 + 0.1


def run(one: RecordingScheduler, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A pipeline's loop, in its own precision; returns what it saw."""
    one.set_timesteps(4)
    one.set_begin_index(0)
    latents = one.initial().to(dtype)
    seen = [latents]
    for timestep in one.timesteps:
        (latents,) = one.step(velocity(latents), timestep, latents, return_dict=False)
        seen.append(latents)
    return seen


@pytest.mark.parametrize("kind", [StepKind.SDE, StepKind.CPS, StepKind.DANCE_SDE])
def test_each_row_steps_by_its_own_window(kind: StepKind) -> None:
    one = scheduler(kind=kind)
    run(one)
    recorded = one.recorded()
    states = recorded.latents["image"]

    assert torch.equal(states[:, 0], initial_noise_batch(SEEDS, SHAPES)["image"])
    for index in range(4):
        for row, window in enumerate(one.windows):
            inside = index in window
            sigma, sigma_next = SCHEDULE.at(torch.tensor([index]))
            noise = step_noise_batch([SEEDS[row]], index, SHAPES)
            step = reverse_step(
                kind if inside else StepKind.ODE,
                {"image": states[row : row + 1, index]},
                {"image": velocity(states[row : row + 1, index])},
                sigma,
                sigma_next,
                sigma_guard=SCHEDULE.sigma_guard,
                noise_level=0.7 if inside else 0.0,
                noise=noise if inside else None,
            )
            assert torch.equal(states[row, index + 1], step.next_sample["image"][0])
            score = recorded.log_probs[row, index]
            if inside:
                assert torch.equal(score, step.require_log_prob()[0])
            else:
                assert score.isnan()


def test_the_state_stays_float32_where_the_pipeline_is_not() -> None:
    one = scheduler()
    seen = run(one, torch.bfloat16)
    states = one.recorded().latents["image"]
    assert states.dtype is torch.float32
    assert all(latents.dtype is torch.bfloat16 for latents in seen)
    for index, latents in enumerate(seen):
        assert torch.equal(states[:, index].to(torch.bfloat16), latents)
    assert not torch.equal(states[:, 2].to(torch.bfloat16).float(), states[:, 2])


def test_latents_that_were_changed_between_steps_are_refused() -> None:
    one = scheduler()
    latents = one.initial()
    (latents,) = one.step(velocity(latents), one.timesteps[0], latents)
    latents.mul_(1.01)
    with pytest.raises(
        PipelineError, match="step 1: the latents were changed between two steps by"
    ):
        one.step(velocity(latents), one.timesteps[1], latents)


def test_a_pipeline_that_starts_from_other_noise_is_refused() -> None:
    one = scheduler()
    other = torch.randn_like(one.initial())
    with pytest.raises(PipelineError, match="step 0"):
        one.step(velocity(other), one.timesteps[0], other)


def test_another_timestep_and_another_number_of_steps_are_refused() -> None:
    one = scheduler()
    latents = one.initial()
    with pytest.raises(PipelineError, match="timestep"):
        one.step(velocity(latents), one.timesteps[1], latents)
    with pytest.raises(PipelineError, match="sets 5 steps, 4 were asked for"):
        one.set_timesteps(sigmas=[1.0, 0.8, 0.6, 0.4, 0.2], mu=0.5)
    with pytest.raises(PipelineError, match="took 0 of 4 steps"):
        one.recorded()
    run(one)
    with pytest.raises(PipelineError, match="more steps"):
        one.step(latents, one.timesteps[0], latents)


def test_packed_latents_are_recorded_as_they_are_without_packing() -> None:
    family = QwenImage()
    latents = initial_noise_batch(SEEDS, SHAPES)
    packed = family.to_engine(latents)
    assert packed.shape == (3, 6, 16)
    assert torch.equal(family.from_engine(packed, SHAPES)["image"], latents["image"])


@pytest.mark.parametrize(("height", "fits"), [(17, "16 or 24"), (0, "8"), (100, "32"), (-8, "8")])
def test_a_side_that_does_not_fit_is_answered_with_those_that_do(height: int, fits: str) -> None:
    spec = SamplingSpec(
        sigmas=SCHEDULE.values(),
        guidance_scale=1.0,
        height=height,
        width=16,
        max_sequence_length=8,
        kind=StepKind.ODE,
        noise_level=0.0,
    )
    with pytest.raises(ValueError, match=rf"height {height} does not fit: .* nearest: {fits}$"):
        check_sides(spec, unit=8, largest=32)
