"""The one sampling loop, for every family and every kind of reverse step.

It calls `Denoiser.velocity`, the very function that training and replay call, and scores what it
stores. Noise belongs to a sample (`omni_core.seeds`), so a sample does not depend on its batch but
for the rounding of the denoiser. Letters: B rows, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from omni_core.model import Denoiser, Guidance, Step
from omni_core.reverse_step import Latents
from omni_core.rollout_step import StepRule, rollout_step, rows_inside
from omni_core.seeds import Shapes, initial_noise_batch
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.kept_graphs import BatchKeeper


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
class SamplingRule(StepRule):
    """How all rows of a batch are denoised, and with what guidance."""

    guidance: Guidance


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
    keeper: BatchKeeper | None = None,
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
        keeper: Keeps the graphs of some steps; None keeps none.

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
        call = partial(denoiser.velocity, state, step, batch.conditioning, rule.guidance)
        velocity = call() if keeper is None else keeper.predict(index, call)
        inside = rows_inside(batch.windows, index)
        state, scores = rollout_step(
            rule, state, velocity, index, inside=inside, seeds=batch.seeds, shapes=shapes
        )
        states.append(state)
        if scores is not None:
            log_probs[torch.tensor(inside, device=device), index] = scores
    stored = {name: torch.stack([each[name] for each in states], dim=1) for name in shapes}
    return SampledBatch(latents=stored, log_probs=log_probs)


def _moved(latents: Latents, device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in latents.items()}
