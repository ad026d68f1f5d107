"""Rows are trained as (sample, step) pairs, packed into micro-batches in a fixed order.

Axes: B rows, W trained steps of a row, M packed pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from omni_core.engine import LossInputs, StepPrediction, TrainBatch
from omni_core.model import Denoiser, Guidance, Step
from omni_core.reverse_step import Latents, reverse_step
from omni_core.trajectory import Conditioning, SamplingSpec, Trajectory


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """M (sample, step) pairs."""

    trajectory: Trajectory
    rows: Tensor
    """int64 [M], rows of the trajectory."""
    index: Tensor
    """int64 [M], steps of the schedule."""
    before: Latents
    """modality -> float32 [M, ...], the state that each step starts from."""
    after: Latents
    """modality -> float32 [M, ...], the state that it led to."""
    conditioning: Conditioning
    """[M, ...]."""
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    """[M] each."""
    denominator: float

    @property
    def spec(self) -> SamplingSpec:
        """How the rows were sampled."""
        return self.trajectory.effective

    def loss_inputs(
        self, current: StepPrediction, reference: StepPrediction | None, *, noise: bool
    ) -> LossInputs:
        """Put predictions and data together, with the noise of the steps if it is asked for."""
        sigma, sigma_next = self.spec.schedule().at(self.index)
        return LossInputs(
            current=current,
            reference=reference,
            noise=self.trajectory.drawn_noise(self.rows, self.index) if noise else None,
            old_log_probs=self.old_log_probs,
            advantages=self.advantages,
            weights=self.weights,
            dt=(sigma_next.double() - sigma.double()).to(current.std.dtype),
        )


def pack(batch: TrainBatch, size: int) -> Iterator[MicroBatch]:
    """Cut all pairs of a batch, row after row, into micro-batches of at most *size*."""
    trajectory = batch.trajectory
    rows, window = trajectory.step_indices.shape
    row_of = torch.arange(rows).repeat_interleave(window)
    index_of = trajectory.step_indices.flatten()
    old = trajectory.log_probs.flatten()
    weights = batch.weights.repeat_interleave(window)
    if batch.step_weights is not None:
        weights = weights * batch.step_weights.flatten()
    for start in range(0, rows * window, size):
        row, index = row_of[start : start + size], index_of[start : start + size]
        yield MicroBatch(
            trajectory=trajectory,
            rows=row,
            index=index,
            before={name: value[row, index] for name, value in trajectory.latents.items()},
            after={name: value[row, index + 1] for name, value in trajectory.latents.items()},
            conditioning=trajectory.conditioning.select(trajectory.prompt_index[row]),
            old_log_probs=old[start : start + size],
            advantages=batch.advantages[row],
            weights=weights[start : start + size],
            denominator=batch.denominator,
        )


def predict_velocity(
    denoiser: Denoiser,
    latents: Latents,
    index: Tensor,
    conditioning: Conditioning,
    spec: SamplingSpec,
) -> Latents:
    """The one call of the module, in sampling, replay and training: modality -> [M, ...]."""
    sigma, _ = spec.schedule().at(index)
    step = Step(index=index, sigma=sigma)
    return denoiser.velocity(latents, step, conditioning, Guidance.of(spec))


def score(
    before: Latents, velocity: Latents, after: Latents, index: Tensor, spec: SamplingSpec
) -> StepPrediction:
    """Score the steps from *before* to *after* under a velocity."""
    schedule = spec.schedule()
    sigma, sigma_next = schedule.at(index)
    taken = reverse_step(
        spec.kind,
        before,
        velocity,
        sigma,
        sigma_next,
        sigma_guard=schedule.sigma_guard,
        noise_level=spec.noise_level,
        next_sample=after,
    )
    return StepPrediction(
        next_sample=taken.next_sample,
        mean=taken.mean,
        std=taken.std,
        log_prob=taken.log_prob,
        log_density=taken.log_density,
        velocity=velocity,
    )
