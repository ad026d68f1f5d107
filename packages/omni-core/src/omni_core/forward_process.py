"""Finished samples noised again: what losses on the forward process are computed from.

x_sigma = (1 - sigma) x0 + sigma x1 with x1 ~ N(0, I); a velocity v says where the sample comes from:
x0^ = x_sigma - sigma v. Everything drawn follows from a unit's seed, so it is the same however
batches are cut. Letters: M rows (a sample at a drawn sigma), D latent values of a sample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from omni_core.choices import SigmaDraw as SigmaDraw
from omni_core.kl import squared_differences
from omni_core.reverse_step import Latents, working_dtype
from omni_core.row_mean import row_mean
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import Shapes, derive_seed, initial_noise

MIN_WEIGHT = 1e-5
"""Smallest adaptive weight of `adaptive_error`."""


@attrs.frozen(kw_only=True, eq=False)
class ForwardLossInputs:
    """All that a loss of the forward process may look at: M rows of one micro-batch.

    Velocities are predictions on `noised` at `sigma`, under the guidance that the algorithm asked for.
    """

    current: Latents
    """modality -> [M, ...], of the policy being trained, with its graph."""
    clean: Latents
    """modality -> [M, ...], x0: finished samples."""
    noise: Latents
    """modality -> [M, ...], x1."""
    noised: Latents
    """modality -> [M, ...], x_sigma."""
    sigma: Tensor
    """[M], in (0, 1]."""
    advantages: Tensor
    """[M]."""
    weights: Tensor
    """[M]: 0 for rows that count for nothing; losses leave them to the engine."""
    unit: Tensor
    """int64 [M] on the CPU: rows of equal number are one of the algorithm's units, at one draw."""
    old: Latents | None = None
    """Of the policy that sampled, where it was asked for; no graph, like all that follow."""
    reference: Latents | None = None
    teacher: Latents | None = None
    """Of the row's own teacher."""
    ema: Latents | None = None


def noise_to(clean: Latents, noise: Latents, sigma: Tensor) -> dict[str, Tensor]:
    """x_sigma of every row: (1 - sigma) x0 + sigma x1, in the working dtype of the latents.

    Args:
        clean: modality -> [M, ...].
        noise: The same modalities and shapes.
        sigma: [M].

    Raises:
        ValueError: modalities or shapes that differ.
    """
    _check_alike(clean, noise, sigma)
    dtype = working_dtype(clean, noise)
    noised = {}
    for name, x in clean.items():
        share = _per_row(sigma, x).to(x.device, dtype)
        noised[name] = (1.0 - share) * x.to(dtype) + share * noise[name].to(dtype)
    return noised


def clean_estimate(noised: Latents, velocity: Latents, sigma: Tensor) -> dict[str, Tensor]:
    """x0^ of every row: x_sigma - sigma v, differentiable in the velocity; errors as in `noise_to`."""
    _check_alike(noised, velocity, sigma)
    dtype = working_dtype(noised, velocity)
    return {
        name: x.to(dtype) - _per_row(sigma, x).to(x.device, dtype) * velocity[name].to(dtype)
        for name, x in noised.items()
    }


def velocity_target(clean: Latents, noise: Latents) -> dict[str, Tensor]:
    """u = x1 - x0: what a velocity is regressed to in pretraining."""
    return {name: noise[name] - x for name, x in clean.items()}


def velocity_error(velocity: Latents, target: Latents) -> Tensor:
    """mean_D (v - target)^2 of every row: [M], differentiable in both.

    Raises:
        ValueError: modalities or shapes that differ.
    """
    return row_mean(squared_differences(velocity, target))


def denoising_error(velocity: Latents, clean: Latents, noise: Latents) -> Tensor:
    """d = mean_D (v - (x1 - x0))^2 of every row: [M], differentiable in the velocity."""
    return velocity_error(velocity, velocity_target(clean, noise))


def adaptive_error(
    velocity: Latents,
    noised: Latents,
    clean: Latents,
    sigma: Tensor,
    *,
    min_weight: float = MIN_WEIGHT,
) -> Tensor:
    """mean_D (x0^ - x0)^2 / w of every row, w = max(mean_D |x0^ - x0|, min_weight) a constant.

    The weight is taken in float64. Source: DiffusionNFT arXiv 2509.16117, whose errors at all noise
    levels it brings to one scale.

    Returns:
        [M], differentiable in the velocity.
    """
    estimate = clean_estimate(noised, velocity, sigma)
    away = {
        name: (value.detach().double() - clean[name].double()).abs()
        for name, value in estimate.items()
    }
    error = velocity_error(estimate, clean)
    return error / row_mean(away).clamp_min(min_weight).to(error)


def unit_seed(seeds: Sequence[int]) -> int:
    """The seed of rows that share their noise and sigmas: of the samples' seeds, in order."""
    return derive_seed("forward-unit", *seeds)


def draw_sigmas(
    draw: SigmaDraw,
    count: int,
    *,
    seed: int,
    update: int,
    schedule: FlowMatchSchedule,
    shift: float = 1.0,
) -> Tensor:
    """Sigmas that one unit is noised to.

    Args:
        draw: Where from.
        count: How many; of `schedule` at most as many as it has steps.
        seed: The unit's (`unit_seed`; a lone sample's own).
        update: Optimizer steps that this rollout took before: each has draws of its own.
        schedule: The rollout's.
        shift: s -> shift s / (1 + (shift - 1) s), of `uniform` and `logit_normal`.

    Returns:
        float32 [count] in (0, 1], in no order.

    Raises:
        ValueError: `count` does not fit, or `shift` is not a positive number.
    """
    if count < 1 or not (math.isfinite(shift) and shift > 0.0):
        raise ValueError(f"count {count} (at least 1) or shift {shift} (above 0) is wrong")
    generator = random.Random(derive_seed("forward-sigma", seed, update))
    match SigmaDraw.parse(draw):
        case SigmaDraw.SCHEDULE:
            if count > schedule.num_steps:
                raise ValueError(f"{count} sigmas of a schedule of {schedule.num_steps} steps")
            steps = generator.sample(range(schedule.num_steps), count)
            return schedule.sigmas[torch.tensor(steps)]
        case SigmaDraw.UNIFORM:
            # random() may be 0, never 1.
            values = [1.0 - generator.random() for _ in range(count)]
        case SigmaDraw.LOGIT_NORMAL:
            values = [1.0 / (1.0 + math.exp(-generator.gauss(0.0, 1.0))) for _ in range(count)]
    return torch.tensor([shift * s / (1.0 + (shift - 1.0) * s) for s in values])


def forward_noise(seed: int, update: int, draw: int, shapes: Shapes) -> dict[str, Tensor]:
    """x1 of one unit at its draw number *draw*: modality -> float32 [1, *shape] on the CPU."""
    return initial_noise(derive_seed("forward-noise", seed, update, draw), shapes)


def _per_row(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *([1] * (like.ndim - 1)))


def _check_alike(ours: Latents, theirs: Latents, sigma: Tensor) -> None:
    if not ours or set(ours) != set(theirs):
        raise ValueError(f"modalities differ: {sorted(ours)} and {sorted(theirs)}")
    for name, x in ours.items():
        if sigma.ndim != 1 or x.shape != theirs[name].shape or x.shape[:1] != sigma.shape:
            raise ValueError(
                f"modality {name!r}: shapes {tuple(x.shape)} and {tuple(theirs[name].shape)} must be "
                f"alike, with one sigma a row; sigma is {tuple(sigma.shape)}"
            )
