"""Policy gradients of the reverse process: each (sample, step) pair is one action of the policy.

The velocity of a stored state gives the log-prob of the stored next state; the loss sees nothing
else. Letters: B samples, W trained steps of a sample, M pairs of a micro-batch, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor

from omni_core.engine import (
    BatchOutput,
    LossFunction,
    LossInputs,
    StepPrediction,
    TrainBatch,
    needs_noise,
    needs_reference,
)
from omni_core.metrics import Moments
from omni_core.reverse_step import Latents
from omni_core.trajectory import Trajectory
from omni_engine_fsdp import sharding
from omni_engine_fsdp.engine import DiffusersFSDPEngine
from omni_engine_fsdp.micro_batch import MicroBatch, cut
from omni_engine_fsdp.model_inputs import ModelInputs, gather, score
from omni_engine_fsdp.replay import replay


@attrs.frozen(kw_only=True, eq=False)
class _Forward:
    """What one micro-batch gave, still on the device."""

    share: Tensor | None
    log_probs: Tensor
    """[M], without graph."""
    metrics: Mapping[str, Tensor]
    """Name -> [M]."""
    counts: Tensor
    """bool [M]: rows that are in the metrics."""


class PPODiffusersFSDPEngine(DiffusersFSDPEngine):
    """Trains on trajectories by the log-probs of their stochastic steps."""

    _half_way = False
    """Whether gradients of some micro-batches are not synced: FSDP2 keeps those to itself."""

    def forward_backward_batch(
        self,
        data: TrainBatch | TensorDict,
        loss_function: LossFunction | None = None,
        *,
        forward_only: bool = False,
    ) -> BatchOutput:
        """Run all micro-batches, gradients accumulated, and synced once at each expert's last.

        Returns:
            Metrics of this rank's rows that count; with *forward_only* also log-probs of all rows.

        Raises:
            ValueError: no loss to train with, or nothing to train on.
            CallPlanError: ranks are about to make different calls.
            RuntimeError: an earlier call failed after its first backward.
        """
        batch = TrainBatch.of(data)
        loss = loss_function or self.loss_function
        if loss is None and not forward_only:
            msg = "forward_backward_batch needs a loss: set_loss_fn, or pass loss_function"
            raise ValueError(msg)
        if self._half_way and not forward_only:
            msg = (
                "an earlier update failed between its micro-batches, and FSDP2 still holds part of its "
                "gradients: load a checkpoint into a new engine"
            )
            raise RuntimeError(msg)
        phase = ("predict" if forward_only else "train") + (
            " with reference" if needs_reference(loss) else ""
        )
        micro_batches = cut(
            batch,
            self.denoiser,
            size=self.engine_config.micro_batch_size,
            all_rows=forward_only,
            phase=phase,
            group=self.get_data_parallel_group(),
        )
        log_probs = torch.full(batch.trajectory.step_indices.shape, torch.nan)
        done: list[_Forward] = []
        for micro_batch in micro_batches:
            if not forward_only:
                sharding.sync_gradients(self.units[micro_batch.expert], micro_batch.last)
            forward = self._forward(micro_batch, loss)
            if not forward_only:
                self._backward(forward)
            if not micro_batch.dummy:
                done.append(attrs.evolve(forward, share=None))
                if forward_only:
                    scores = forward.log_probs.float().cpu()
                    log_probs[micro_batch.rows, micro_batch.columns] = scores
        self._half_way = False
        return BatchOutput(metrics=_moments(done), log_probs=log_probs if forward_only else None)

    def _backward(self, forward: _Forward) -> None:
        assert forward.share is not None
        self._half_way = True
        forward.share.backward()  # type: ignore[no-untyped-call]

    def forward_step(
        self, micro_batch: MicroBatch, loss_function: LossFunction | None, *, forward_only: bool
    ) -> tuple[Tensor | None, BatchOutput]:
        """Run one micro-batch forward.

        Returns:
            The objective's share, with graph (None without a loss), and metrics; with *forward_only*
            also the log-probs [1, M] of its pairs.
        """
        forward = self._forward(micro_batch, loss_function)
        log_probs = forward.log_probs.float().cpu()[None] if forward_only else None
        return forward.share, BatchOutput(metrics=_moments([forward]), log_probs=log_probs)

    def _forward(self, micro_batch: MicroBatch, loss: LossFunction | None) -> _Forward:
        inputs = self.prepare_model_inputs(micro_batch)
        reference = self._reference(inputs) if needs_reference(loss) else None
        velocity = self._velocity(inputs)
        current = self.prepare_model_outputs(inputs, velocity)
        log_probs = current.require_log_prob()
        if micro_batch.dummy:
            nothing = sum(value.sum() for value in velocity.values()) * 0.0
            assert isinstance(nothing, Tensor)
            return _Forward(
                share=nothing,
                log_probs=log_probs.detach(),
                metrics={},
                counts=torch.zeros(len(log_probs), dtype=torch.bool),
            )
        data, rows = micro_batch.data, micro_batch.rows
        weights = data.weights[rows].to(log_probs)
        counts = weights > 0
        if loss is None:
            return _Forward(share=None, log_probs=log_probs.detach(), metrics={}, counts=counts)
        terms = loss(
            LossInputs(
                current=current,
                reference=reference,
                noise=self._noise(micro_batch) if needs_noise(loss) else None,
                old_log_probs=data.trajectory.log_probs[rows, micro_batch.columns].to(log_probs),
                advantages=data.advantages[rows].to(log_probs),
                weights=weights,
                dt=(inputs.sigma_next - inputs.sigma).to(log_probs),
            )
        )
        # FSDP averages gradients over ranks, and the denominator is already that of all of them.
        scale = self.get_data_parallel_size() / data.denominator
        return _Forward(
            # Not a product with 0: a row that counts for nothing may be anything, also not finite.
            share=torch.where(counts, weights * terms.terms, 0.0).sum() * scale,
            log_probs=log_probs.detach(),
            metrics=terms.metrics,
            counts=counts,
        )

    def prepare_model_inputs(self, micro_batch: MicroBatch) -> ModelInputs:
        """Gather what the denoiser takes: stored states, sigmas and conditioning of M pairs."""
        return gather(
            micro_batch.data.trajectory,
            micro_batch.schedule,
            micro_batch.rows,
            micro_batch.steps,
            self.device,
        )

    def prepare_model_outputs(self, inputs: ModelInputs, velocity: Latents) -> StepPrediction:
        """Score the stored next states under the policy that predicted *velocity* [M, ...]."""
        return score(inputs, velocity)

    def replay(self, trajectory: Trajectory) -> Tensor:
        """Score a rollout's own steps again in its own batches; see `replay.replay`."""
        with self.eval_mode(), self.use_adapter(trajectory.adapter):
            return replay(
                trajectory,
                self.denoiser,
                device=self.device,
                group=self.get_data_parallel_group(),
            )

    def _velocity(self, inputs: ModelInputs) -> Latents:
        return self.denoiser.velocity(
            inputs.latents, inputs.step, inputs.conditioning, inputs.guidance
        )

    def _noise(self, micro_batch: MicroBatch) -> Latents:
        """What the rollout drew the pairs' steps with, from the samples' seeds."""
        drawn = micro_batch.data.trajectory.drawn_noise(micro_batch.rows, micro_batch.steps)
        return {name: value.to(self.device) for name, value in drawn.items()}

    def _reference(self, inputs: ModelInputs) -> StepPrediction:
        with torch.no_grad(), self.disable_adapter():
            return self.prepare_model_outputs(inputs, self._velocity(inputs))


def _moments(done: Sequence[_Forward]) -> dict[str, Moments]:
    """Moments of each metric over the rows that count: one copy from the device at the end."""
    names = list(dict.fromkeys(name for forward in done for name in forward.metrics))
    found = {}
    for name in names:
        given = [forward for forward in done if name in forward.metrics]
        values = torch.cat([forward.metrics[name].detach() for forward in given])
        found[name] = Moments.of(values, torch.cat([forward.counts for forward in given]))
    return found
