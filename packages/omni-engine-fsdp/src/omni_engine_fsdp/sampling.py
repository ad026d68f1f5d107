"""The one sampling loop, for every family and every kind of reverse step.

It calls `Denoiser.velocity`, the very function that training and replay call, and scores what it
stores. Noise belongs to a sample (`omni_core.seeds`), so a sample does not depend on its batch but
for the rounding of the denoiser. Letters: B rows, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from omni_core.model import Denoiser, Guidance, Step
from omni_core.reverse_step import Latents, ReverseStep, StepKind, reverse_step
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import Shapes, initial_noise_batch, step_noise_batch
from omni_core.trajectory import Conditioning


@attrs.frozen(kw_only=True, eq=False)
class SamplingBatch:
    """B rows that are denoised together."""

    seeds: Sequence[int]
    """B, of `omni_core.seeds.sample_seed`."""
    windows: Sequence[tuple[int, ...]]
    """B: the row's stochastic steps; every other step is an Euler step."""
    conditioning: Conditioning
    """[B, ...], one row for each sample, where the denoiser computes."""


@attrs.frozen(kw_only=True)
class SamplingRule:
    """How all rows of a batch are denoised."""

    schedule: FlowMatchSchedule
    guidance: Guidance
    kind: StepKind
    """Of the steps in a row's window."""
    noise_level: float


@attrs.frozen(kw_only=True, eq=False)
class SampledBatch:
    """What the loop stored."""

    latents: Mapping[str, Tensor]
    """Modality -> float32 [B, T+1, ...]: from noise (index 0) to the final latents (index T)."""
    log_probs: Tensor
    """float32 [B, T]: of the stored latents, not a number where the step was deterministic."""


@torch.no_grad()  # inference_mode would poison what training reads later
def sample(
    denoiser: Denoiser,
    batch: SamplingBatch,
    rule: SamplingRule,
    *,
    shapes: Shapes,
    device: torch.device,
) -> SampledBatch:
    """Denoise B rows from their own noise.

    With windows empty, or kind `ode`, this is the stock pipeline's sampler. With several ranks each
    step is a collective.

    Args:
        denoiser: In evaluation mode, with the adapter that samples.
        batch: The rows.
        rule: What holds for all of them.
        shapes: Modality -> shape of one row's latents (`Codec.latent_shapes`).
        device: Where the denoiser computes; what is returned lies there too.

    Raises:
        ValueError: a stochastic step without noise (kind `ode` or noise level 0 in a window), or one
            that ends at sigma 0.
    """
    rows = len(batch.seeds)
    state: Latents = _moved(initial_noise_batch(batch.seeds, shapes), device)
    states = [state]
    schedule = rule.schedule
    log_probs = torch.full((rows, schedule.num_steps), torch.nan, device=device)
    for index in range(schedule.num_steps):
        sigma, _ = schedule.at(torch.full((rows,), index))
        step = Step(
            index=torch.full((rows,), index, device=device),
            sigma=sigma.to(device),
        )
        velocity = denoiser.velocity(state, step, batch.conditioning, rule.guidance)
        inside = [row for row, window in enumerate(batch.windows) if index in window]
        state, scores = _advance(state, velocity, index, inside, batch, rule, shapes)
        states.append(state)
        if scores is not None:
            log_probs[torch.tensor(inside, device=device), index] = scores
    stored = {name: torch.stack([each[name] for each in states], dim=1) for name in shapes}
    return SampledBatch(latents=stored, log_probs=log_probs)


def _advance(
    state: Latents,
    velocity: Latents,
    index: int,
    inside: list[int],
    batch: SamplingBatch,
    rule: SamplingRule,
    shapes: Shapes,
) -> tuple[Latents, Tensor | None]:
    """Take step *index*: rows *inside* their window by the rule's kind, the others by Euler.

    Returns:
        The next states, float32 [B, ...], and the log-probs [len(inside)], None without any.
    """
    if len(inside) == len(batch.seeds):
        noise = step_noise_batch(batch.seeds, index, shapes)
        return _stochastic_step(state, velocity, index, noise, rule)
    euler = _reverse(StepKind.ODE, 0.0, state, velocity, index, rule.schedule)
    after = _stored(euler.next_sample)
    if not inside:
        return after, None
    noise = step_noise_batch([batch.seeds[row] for row in inside], index, shapes)
    picked = torch.tensor(inside, device=_device(state))
    drawn, scores = _stochastic_step(
        {name: value[picked] for name, value in state.items()},
        {name: value[picked] for name, value in velocity.items()},
        index,
        noise,
        rule,
    )
    merged = {name: value.index_copy(0, picked, drawn[name]) for name, value in after.items()}
    return merged, scores


def _stochastic_step(
    state: Latents, velocity: Latents, index: int, noise: Latents, rule: SamplingRule
) -> tuple[Latents, Tensor]:
    """Draw the next state and score what is stored of it."""
    noise = _moved(noise, _device(state))
    taken = (rule.kind, rule.noise_level, state, velocity, index, rule.schedule)
    step = _reverse(*taken, noise=noise)
    stored = _stored(step.next_sample)
    if any(stored[name].dtype != value.dtype for name, value in step.next_sample.items()):
        step = _reverse(*taken, next_sample=stored)
    return stored, step.require_log_prob().float()


def _reverse(
    kind: StepKind,
    noise_level: float,
    state: Latents,
    velocity: Latents,
    index: int,
    schedule: FlowMatchSchedule,
    *,
    noise: Latents | None = None,
    next_sample: Latents | None = None,
) -> ReverseStep:
    """`reverse_step` with all rows at step *index*."""
    rows = len(next(iter(state.values())))
    sigma, sigma_next = schedule.at(torch.full((rows,), index))
    return reverse_step(
        kind,
        state,
        velocity,
        sigma,
        sigma_next,
        sigma_guard=schedule.sigma_guard,
        noise_level=noise_level,
        noise=noise,
        next_sample=next_sample,
    )


def _stored(latents: Latents) -> dict[str, Tensor]:
    return {name: value.float() for name, value in latents.items()}


def _moved(latents: Latents, device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in latents.items()}


def _device(latents: Latents) -> torch.device:
    return next(iter(latents.values())).device
