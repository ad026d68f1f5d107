"""One step of a rollout's batch: every row by its own window, with its own noise, scored as stored.

Whoever samples (the engine's loop, a scheduler inside another engine) steps here, so that the same
velocities give the same bits. Letters: B rows, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.reverse_step import Latents, ReverseStep, reverse_step
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import Shapes, step_noise_batch


@attrs.frozen(kw_only=True)
class StepRule:
    """How all rows of a batch are denoised."""

    schedule: FlowMatchSchedule
    kind: StepKind
    """Of the steps in a row's window; the others are Euler steps."""
    noise_level: float


def rows_inside(windows: Sequence[Sequence[int]], index: int) -> list[int]:
    """Find the rows whose step *index* is stochastic, from each row's stochastic steps."""
    return [row for row, window in enumerate(windows) if index in window]


def rollout_step(
    rule: StepRule,
    state: Latents,
    velocity: Latents,
    index: int,
    *,
    inside: Sequence[int],
    seeds: Sequence[int],
    shapes: Shapes,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Take step *index*: rows *inside* their window by the rule's kind, the others by Euler.

    Args:
        rule: What holds for all rows.
        state: Modality -> float32 [B, ...].
        velocity: Of the same modalities and shapes, there.
        index: Of the step, below T.
        inside: Rows, ascending (`rows_inside`).
        seeds: B, of `omni_core.seeds.sample_seed`.
        shapes: Modality -> shape of one row's latents.

    Returns:
        The next states, float32 [B, ...], and the log-probs float32 [len(inside)] of what is stored;
        None without any.

    Raises:
        ValueError: a stochastic step without noise (kind `ode` or noise level 0), or one that ends at
            sigma 0.
    """
    if len(inside) == len(seeds):
        return _stochastic(rule, state, velocity, index, step_noise_batch(seeds, index, shapes))
    euler = attrs.evolve(rule, kind=StepKind.ODE, noise_level=0.0)
    after = _stored(_reverse(euler, state, velocity, index).next_sample)
    if not inside:
        return after, None
    picked = torch.tensor(inside, device=_device(state))
    drawn, scores = _stochastic(
        rule,
        {name: value[picked] for name, value in state.items()},
        {name: value[picked] for name, value in velocity.items()},
        index,
        step_noise_batch([seeds[row] for row in inside], index, shapes),
    )
    merged = {name: value.index_copy(0, picked, drawn[name]) for name, value in after.items()}
    return merged, scores


def _stochastic(
    rule: StepRule, state: Latents, velocity: Latents, index: int, noise: Latents
) -> tuple[dict[str, Tensor], Tensor]:
    """Draw the next state and score what is stored of it."""
    noise = {name: value.to(_device(state)) for name, value in noise.items()}
    step = _reverse(rule, state, velocity, index, noise=noise)
    stored = _stored(step.next_sample)
    if any(stored[name].dtype != value.dtype for name, value in step.next_sample.items()):
        step = _reverse(rule, state, velocity, index, next_sample=stored)
    return stored, step.require_log_prob().float()


def _reverse(
    rule: StepRule,
    state: Latents,
    velocity: Latents,
    index: int,
    *,
    noise: Latents | None = None,
    next_sample: Latents | None = None,
) -> ReverseStep:
    """`reverse_step` with all rows at step *index*."""
    rows = len(next(iter(state.values())))
    sigma, sigma_next = rule.schedule.at(torch.full((rows,), index))
    return reverse_step(
        rule.kind,
        state,
        velocity,
        sigma,
        sigma_next,
        sigma_guard=rule.schedule.sigma_guard,
        noise_level=rule.noise_level,
        noise=noise,
        next_sample=next_sample,
    )


def _stored(latents: Latents) -> dict[str, Tensor]:
    return {name: value.float() for name, value in latents.items()}


def _device(latents: Latents) -> torch.device:
    return next(iter(latents.values())).device
