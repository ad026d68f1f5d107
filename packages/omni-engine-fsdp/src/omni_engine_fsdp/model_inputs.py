"""Stored states of a trajectory become what the denoiser takes, and its velocity becomes a score.

Training, prediction and replay all go this way, so they differ by nothing but which rows share a
forward. Letters: M (sample, step) pairs, B samples, T steps.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from omni_core.engine import StepPrediction
from omni_core.model import Guidance, Step
from omni_core.reverse_step import Latents, reverse_step
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning, SamplingSpec, Trajectory


@attrs.frozen(kw_only=True, eq=False)
class ModelInputs:
    """What the denoiser and the reverse step take of M pairs, on the denoiser's device."""

    latents: Latents
    """Modality -> float32 [M, ...]: x before the step."""
    next_latents: Latents
    """Modality -> float32 [M, ...]: x after it, as it was stored."""
    step: Step
    conditioning: Conditioning
    """[M, ...]."""
    guidance: Guidance
    sigma: Tensor
    """float32 [M] on the CPU, where the step starts."""
    sigma_next: Tensor
    """float32 [M] on the CPU, where it ends."""
    sigma_guard: Tensor
    effective: SamplingSpec
    """How the pairs were sampled."""


def gather(
    trajectory: Trajectory,
    schedule: FlowMatchSchedule,
    rows: Tensor,
    steps: Tensor,
    device: torch.device,
) -> ModelInputs:
    """Gather M pairs.

    Args:
        trajectory: B rows, anywhere.
        schedule: The trajectory's own, built once.
        rows: int64 [M] on the CPU, repeats allowed.
        steps: int64 [M] on the CPU.
        device: Where the denoiser computes.
    """
    sigma, sigma_next = schedule.at(steps)
    prompts = trajectory.prompt_index[rows]
    return ModelInputs(
        latents={name: v[rows, steps].to(device) for name, v in trajectory.latents.items()},
        next_latents={
            name: v[rows, steps + 1].to(device) for name, v in trajectory.latents.items()
        },
        step=Step(index=steps.to(device), sigma=sigma.to(device)),
        conditioning=trajectory.conditioning.select(prompts).to(device),
        guidance=Guidance.of(trajectory.effective),
        sigma=sigma,
        sigma_next=sigma_next,
        sigma_guard=schedule.sigma_guard,
        effective=trajectory.effective,
    )


def score(inputs: ModelInputs, velocity: Latents) -> StepPrediction:
    """Score the stored next states under the policy that predicted *velocity*.

    Raises:
        ValueError: the trajectory is deterministic, or a step ends at sigma 0.
    """
    step = reverse_step(
        inputs.effective.kind,
        inputs.latents,
        velocity,
        inputs.sigma,
        inputs.sigma_next,
        sigma_guard=inputs.sigma_guard,
        noise_level=inputs.effective.noise_level,
        next_sample=inputs.next_latents,
    )
    return StepPrediction(
        next_sample=step.next_sample,
        mean=step.mean,
        std=step.std,
        log_prob=step.log_prob,
        log_density=step.log_density,
        velocity=velocity,
    )
