"""The one sampling loop, and its replay: the same velocity on the same batches.

Axes: B rows of a batch, T steps, W stochastic steps of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.model import Denoiser
from omni_core.reverse_step import Latents, reverse_step
from omni_core.seeds import Shapes, initial_noise_batch, step_noise_batch
from omni_core.testing.toys.packing import predict_velocity, score
from omni_core.trajectory import BatchPlace, Conditioning, SamplingSpec, Trajectory


def denoise(
    denoiser: Denoiser,
    conditioning: Conditioning,
    spec: SamplingSpec,
    *,
    seeds: Sequence[int],
    windows: Sequence[tuple[int, ...]],
    shapes: Shapes,
) -> tuple[dict[str, Tensor], Tensor]:
    """Sample one batch.

    Args:
        denoiser: Of the policy that samples.
        conditioning: [B, ...].
        spec: Of all rows.
        seeds: One for each row.
        windows: Stochastic steps of each row; the others are Euler steps.
        shapes: Modality -> shape of one sample's latents.

    Returns:
        Latents modality -> float32 [B, T+1, ...], and log-probs float32 [B, T], 0 outside the windows.
    """
    rows = len(seeds)
    state: Latents = initial_noise_batch(seeds, shapes)
    states = [state]
    log_probs = torch.zeros(rows, spec.num_steps)
    for step in range(spec.num_steps):
        index = torch.full((rows,), step, dtype=torch.int64)
        velocity = predict_velocity(denoiser, state, index, conditioning, spec)
        noisy = torch.tensor([step in window for window in windows])
        after = _take(StepKind.ODE, state, velocity, index, spec, noise=None)
        if noisy.any():
            noise = step_noise_batch(seeds, step, shapes)
            drawn = _take(spec.kind, state, velocity, index, spec, noise=noise)
            after = {n: torch.where(_per_row(noisy, v), drawn[n], v) for n, v in after.items()}
            scored = score(state, velocity, after, index, spec).require_log_prob()
            log_probs[noisy, step] = scored[noisy].float()
        state = after
        states.append(state)
    return {n: torch.stack([one[n] for one in states], dim=1) for n in state}, log_probs


def replay(denoiser: Denoiser, trajectory: Trajectory) -> Tensor:
    """Score the sampler's own steps again, batch by batch: float32 [B, W].

    Raises:
        ValueError: rows of a batch are missing; names the batch.
    """
    places: dict[str, list[int]] = {}
    for row, place in enumerate(trajectory.places):
        places.setdefault(place.batch, []).append(row)
    result = torch.full_like(trajectory.log_probs, math.nan)
    for name, rows in places.items():
        rows.sort(key=lambda row: trajectory.places[row].place)
        _check_whole(name, [trajectory.places[row] for row in rows])
        _replay_batch(denoiser, trajectory, torch.tensor(rows), result)
    return result


def _replay_batch(denoiser: Denoiser, trajectory: Trajectory, rows: Tensor, result: Tensor) -> None:
    spec = trajectory.effective
    conditioning = trajectory.conditioning.select(trajectory.prompt_index[rows])
    windows = trajectory.step_indices[rows]
    for step in sorted(set(windows.flatten().tolist())):
        before = {name: value[rows, step] for name, value in trajectory.latents.items()}
        after = {name: value[rows, step + 1] for name, value in trajectory.latents.items()}
        index = torch.full((len(rows),), step, dtype=torch.int64)
        velocity = predict_velocity(denoiser, before, index, conditioning, spec)
        scored = score(before, velocity, after, index, spec).require_log_prob()
        row, column = (windows == step).nonzero(as_tuple=True)
        result[rows[row], column] = scored[row].float()


def _check_whole(name: str, places: list[BatchPlace]) -> None:
    have = [place.place for place in places]
    if have != list(range(places[0].size)):
        msg = f"replay needs all rows of batch {name!r}: {places[0].size} rows, got places {have}"
        raise ValueError(msg)


def _take(
    kind: StepKind,
    state: Latents,
    velocity: Latents,
    index: Tensor,
    spec: SamplingSpec,
    *,
    noise: Latents | None,
) -> dict[str, Tensor]:
    """One reverse step, rounded to the float32 that is stored."""
    schedule = spec.schedule()
    sigma, sigma_next = schedule.at(index)
    taken = reverse_step(
        kind,
        state,
        velocity,
        sigma,
        sigma_next,
        sigma_guard=schedule.sigma_guard,
        noise_level=spec.noise_level,
        noise=noise,
    )
    return {name: value.float() for name, value in taken.next_sample.items()}


def _per_row(values: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...] with as many axes as *like*."""
    return values.reshape(-1, *([1] * (like.ndim - 1)))
