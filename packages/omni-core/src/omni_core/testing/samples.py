"""Requests, batches and loss inputs that the suites use; a fork's own tests may, too.

Axes: B rows, W trained steps of a row, M (sample, step) pairs, D latent values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.engine import LossInputs, StepPrediction, TrainBatch
from omni_core.forward_process import ForwardLossInputs, noise_to
from omni_core.records import map_tensors
from omni_core.reverse_step import Latents, reverse_step
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import sample_seed
from omni_core.trajectory import RolloutRequest, SampleRecord, SamplingSpec, Trajectory

AnyInputs = TypeVar("AnyInputs", bound=LossInputs | ForwardLossInputs)

PROMPTS = ("a bright sign", "a dark room", "a green tree")


def requests_for(
    sampling: SamplingSpec,
    prompts: Sequence[str] = PROMPTS,
    *,
    samples_per_prompt: int = 2,
    window: tuple[int, ...] | None = None,
    adapter: str = "default",
    step: int = 0,
) -> list[RolloutRequest]:
    """One request for each prompt, seeds as a trainer derives them.

    Args:
        sampling: Of all requests.
        prompts: One group each.
        samples_per_prompt: Group size.
        window: Stochastic steps; None takes all but the last (none for `ode` or without noise).
        adapter: That samples.
        step: Training step, part of ids and seeds.
    """
    if window is None:
        deterministic = sampling.kind is StepKind.ODE or sampling.noise_level == 0.0
        window = () if deterministic else tuple(range(sampling.num_steps - 1))
    return [
        RolloutRequest(
            samples=tuple(
                SampleRecord(
                    group_id=f"{step}/{row}",
                    row_id=str(row),
                    k=k,
                    seed=sample_seed(
                        purpose="rollout",
                        base_seed=0,
                        step=step,
                        row_id=str(row),
                        occurrence=0,
                        k=k,
                    ),
                    prompt=prompt,
                )
                for k in range(samples_per_prompt)
            ),
            sampling=sampling,
            window=window,
            adapter=adapter,
        )
        for row, prompt in enumerate(prompts)
    ]


def train_batch(trajectory: Trajectory, *, seed: int = 0) -> TrainBatch:
    """All rows of a trajectory with drawn advantages (float32 [B], standard normal), each of weight 1."""
    generator = torch.Generator().manual_seed(seed)
    return TrainBatch(
        trajectory=trajectory,
        advantages=torch.randn(trajectory.rows, generator=generator),
        weights=torch.ones(trajectory.rows),
        denominator=float(trajectory.step_indices.numel()),
    )


def loss_inputs(
    *,
    rows: int = 6,
    shape: tuple[int, ...] = (2, 3),
    kind: StepKind = StepKind.SDE,
    noise_level: float = 0.7,
    apart: float = 0.01,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """Drawn inputs of a loss: the current policy, the one that sampled (its log-probs and its noise), a
    reference and a teacher, all a little apart.

    Args:
        rows: M; they are at different steps of a schedule.
        shape: Of one sample's latents.
        kind: Of the reverse step.
        noise_level: Of the reverse step.
        apart: How far the other policies' velocities are from the current one; 0 makes them equal.
        seed: Of everything drawn.
        dtype: Of latents and velocities.

    Returns:
        Inputs whose `current.velocity["image"]` is a leaf that requires a gradient.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=dtype)

    schedule = FlowMatchSchedule.linear(6, shift=3.0)
    index = torch.arange(rows) % (schedule.num_steps - 1)
    sigma, sigma_next = schedule.at(index)
    sample, velocity, noise = {"image": draw()}, draw(), {"image": draw()}
    other = {name: {"image": velocity + apart * draw()} for name in ("old", "reference")}
    advantages = torch.randn(rows, generator=generator, dtype=dtype)
    other["teacher"] = {"image": velocity + apart * draw()}

    def predict(velocity: Latents, after: Mapping[str, Tensor] | None) -> StepPrediction:
        step = reverse_step(
            kind,
            sample,
            velocity,
            sigma,
            sigma_next,
            sigma_guard=schedule.sigma_guard,
            noise_level=noise_level,
            noise=noise if after is None else None,
            next_sample=after,
        )
        fields = {field.name: getattr(step, field.name) for field in attrs.fields(type(step))}
        return StepPrediction(**fields, velocity=velocity)

    old = predict(other["old"], None)
    return LossInputs(
        current=predict({"image": velocity.requires_grad_()}, old.next_sample),
        reference=predict(other["reference"], old.next_sample),
        teacher=predict(other["teacher"], old.next_sample),
        noise=noise,
        old_log_probs=old.require_log_prob(),
        advantages=advantages,
        weights=torch.ones(rows, dtype=dtype),
        dt=(sigma_next - sigma).to(dtype),
    )


def forward_loss_inputs(
    *,
    units: int = 6,
    unit_rows: int = 1,
    shape: tuple[int, ...] = (2, 3),
    apart: float = 0.01,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> ForwardLossInputs:
    """Drawn inputs of a loss of the forward process, every policy a little apart from the current one.

    Args:
        units: Of the algorithm; rows of a unit share their noise and sigma.
        unit_rows: Rows of a unit. Of several, advantages are above and below 0 in turn.
        shape: Of one sample's latents.
        apart: How far the other policies' velocities are from the current one; 0 makes them equal.
        seed: Of everything drawn.
        dtype: Of latents, velocities and sigmas.

    Returns:
        Inputs of units * unit_rows rows, whose `current["image"]` is a leaf that requires a gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = units * unit_rows

    def draw(count: int = rows) -> Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=dtype)

    unit = torch.arange(units).repeat_interleave(unit_rows)
    sigma = 0.1 + 0.9 * torch.rand(units, generator=generator, dtype=dtype)[unit]
    clean, noise, velocity = {"image": draw()}, {"image": draw(units)[unit]}, draw()
    advantages = torch.randn(rows, generator=generator, dtype=dtype)
    if unit_rows > 1:
        advantages = advantages.abs() * (1.0 - 2.0 * (torch.arange(rows) % unit_rows % 2))
    others = {
        name: {"image": velocity + apart * draw()}
        for name in ("old", "reference", "teacher", "ema")
    }
    return ForwardLossInputs(
        current={"image": velocity.requires_grad_()},
        clean=clean,
        noise=noise,
        noised=noise_to(clean, noise, sigma),
        sigma=sigma,
        advantages=advantages,
        weights=torch.ones(rows, dtype=dtype),
        unit=unit,
        **others,
    )


def trained_leaf(inputs: LossInputs | ForwardLossInputs) -> Tensor:
    """The current policy's velocity of drawn inputs: what a loss's gradient is taken of."""
    if isinstance(inputs, ForwardLossInputs):
        return inputs.current["image"]
    return inputs.current.velocity["image"]


def take_rows(inputs: AnyInputs, rows: Tensor) -> AnyInputs:
    """Some rows of a loss's inputs (int64 [n]), with their graph."""

    def select(value: Any) -> Any:
        if isinstance(value, StepPrediction):
            parts = {f.name: select(getattr(value, f.name)) for f in attrs.fields(StepPrediction)}
            return attrs.evolve(value, **parts)
        return map_tensors(value, lambda tensor: tensor.index_select(0, rows))

    fields = {f.name: select(getattr(inputs, f.name)) for f in attrs.fields(type(inputs))}
    return attrs.evolve(inputs, **fields)
