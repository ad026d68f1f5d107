"""Losses on the forward process: finished samples are noised again, and the velocity there is trained.

No log-prob and no stored state but the last of a trajectory is looked at, so any sampler will do. All
policies that a loss compares predict the same rows, one forward each. Letters: B samples, M rows (a
sample at a drawn sigma).
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_core.choices import Policy
from omni_core.engine import BatchOutput, LossFunction, TrainBatch
from omni_core.forward_cells import ForwardModelInputs, model_inputs
from omni_core.forward_needs import forward_needs
from omni_core.forward_process import ForwardLossInputs
from omni_core.reverse_step import Latents
from omni_engine_fsdp.accumulation import (
    AccumulatingEngine,
    Forward,
    moments,
    nothing,
    output_of,
)
from omni_engine_fsdp.forward_batches import (
    ForwardMicroBatch,
    cut_forward,
)


class ForwardDiffusersFSDPEngine(AccumulatingEngine[ForwardMicroBatch]):
    """Trains on finished samples at sigmas that it draws for them."""

    def initialize(self) -> None:
        """Load, adapt and shard; see `DiffusersFSDPEngine.initialize`.

        Raises:
            ValueError: also for `engine.keep_graph`: no step of sampling is trained.
        """
        if self.engine_config.keep_graph:
            msg = "engine.keep_graph: samples are noised again, so the graph of sampling is no use"
            raise ValueError(msg)
        super().initialize()

    def forward_backward_batch(
        self,
        data: TrainBatch | TensorDict,
        loss_function: LossFunction | None = None,
        *,
        forward_only: bool = False,
    ) -> BatchOutput:
        """Run all micro-batches, gradients accumulated, and synced once at each expert's last.

        Returns:
            Metrics of this rank's rows that count; there are no log-probs.

        Raises:
            ValueError: no loss, nothing to train on, a unit that does not fit into a micro-batch, or a
                policy that this engine does not have.
            CallPlanError: ranks are about to make different calls.
            RuntimeError: an earlier call failed after its first backward.
        """
        batch, loss = self._begin(data, loss_function, forward_only=forward_only)
        if loss is None:
            msg = "an engine of the forward process scores no log-probs: infer_batch needs a loss"
            raise ValueError(msg)
        needs = forward_needs(loss)
        self._check_policies(needs.others)
        micro_batches = cut_forward(
            batch,
            self.denoiser,
            needs,
            size=self.engine_config.micro_batch_size,
            phase="predict" if forward_only else "train",
            group=self.mesh.group,
        )
        done = self._accumulate(micro_batches, loss, forward_only=forward_only)
        return BatchOutput(metrics=moments([forward for _, forward in done]))

    def forward_step(
        self,
        micro_batch: ForwardMicroBatch,
        loss_function: LossFunction | None,
        *,
        forward_only: bool,
    ) -> tuple[Tensor | None, BatchOutput]:
        """Run one micro-batch forward: the objective's share, with graph, and metrics."""
        del forward_only
        forward = self._forward(micro_batch, loss_function)
        return forward.share, output_of(forward)

    def _forward(self, micro_batch: ForwardMicroBatch, loss: LossFunction | None) -> Forward:
        assert loss is not None
        inputs = self.prepare_model_inputs(micro_batch)
        others = {
            policy.value: self._prediction_of(policy, inputs) for policy in micro_batch.needs.others
        }
        current = self._velocity(inputs)
        if micro_batch.dummy:
            return nothing(current, len(micro_batch.rows))
        like = next(iter(current.values()))
        data, rows = micro_batch.data, micro_batch.samples
        weights = data.weights[rows].to(like)
        terms = loss(
            ForwardLossInputs(
                current=current,
                clean=inputs.clean,
                noise=inputs.noise,
                noised=inputs.noised,
                sigma=inputs.step.sigma,
                advantages=data.advantages[rows].to(like),
                weights=weights,
                unit=micro_batch.unit,
                **others,
            )
        )
        counts = weights > 0
        return Forward(
            share=self._share(terms, weights, counts, data.denominator),
            metrics=terms.metrics,
            counts=counts,
        )

    def prepare_model_inputs(self, micro_batch: ForwardMicroBatch) -> ForwardModelInputs:
        """Noise the final samples of M rows, and gather what the denoiser takes beside them."""
        return model_inputs(
            micro_batch.rows, micro_batch.data, micro_batch.needs, self.denoiser, device=self.device
        )

    def _velocity(self, inputs: ForwardModelInputs) -> Latents:
        return self.denoiser.velocity(
            inputs.noised, inputs.step, inputs.conditioning, inputs.guidance
        )

    def _prediction_of(self, policy: Policy, inputs: ForwardModelInputs) -> Latents:
        with torch.no_grad(), self.use_policy(policy):
            return self._velocity(inputs)

    def _check_policies(self, policies: tuple[Policy, ...]) -> None:
        for policy in policies:
            with self.use_policy(policy):
                pass
