"""The toy engine for losses of the forward process: finished samples are noised again and predicted there.

Letters: B samples, M rows (a sample at a drawn sigma).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor

from omni_core.choices import PredictionGuidance
from omni_core.engine import BatchOutput, LossFunction, TrainBatch
from omni_core.forward_cells import Row, cells_of, noise_of, packed, step_of
from omni_core.forward_needs import ForwardNeeds, forward_needs
from omni_core.forward_process import ForwardLossInputs, noise_to
from omni_core.metrics import Moments, merge
from omni_core.model import Guidance, Step
from omni_core.reverse_step import Latents
from omni_core.testing.toys.engine import ToyEngine


@attrs.frozen(kw_only=True, eq=False)
class ForwardMicroBatch:
    """M rows that are predicted together."""

    batch: TrainBatch
    needs: ForwardNeeds
    rows: Sequence[Row]


class ToyForwardEngine(ToyEngine):
    """Trains on the last state of every trajectory; scores no step."""

    def forward_backward_batch(
        self,
        data: TrainBatch | TensorDict,
        loss_function: LossFunction | None = None,
        *,
        forward_only: bool = False,
    ) -> BatchOutput:
        """Run all micro-batches.

        Raises:
            ValueError: no loss, a unit that does not fit into a micro-batch, or a policy that is not there.
        """
        if loss_function is None:
            msg = "an engine of the forward process scores no log-probs: infer_batch needs a loss"
            raise ValueError(msg)
        batch, needs = TrainBatch.of(data), forward_needs(loss_function)
        cells = list(cells_of(batch, needs, batch.trajectory.effective.schedule()))
        outputs = []
        for rows in packed(cells, self.engine_config.micro_batch_size):
            micro_batch = ForwardMicroBatch(batch=batch, needs=needs, rows=rows)
            share, output = self.forward_step(micro_batch, loss_function, forward_only=forward_only)
            if not forward_only:
                cast(Any, share).backward()
            outputs.append(output.metrics)
        return BatchOutput(metrics=merge(outputs))

    def forward_step(
        self, micro_batch: Any, loss_function: LossFunction | None, *, forward_only: bool
    ) -> tuple[Tensor | None, BatchOutput]:
        """Run one `ForwardMicroBatch`; without a loss there is nothing to say."""
        if loss_function is None:
            return None, BatchOutput(metrics={})
        with torch.set_grad_enabled(not forward_only):
            inputs = self._inputs(micro_batch)
            result = loss_function(inputs)
        counts = inputs.weights > 0
        weighed = torch.where(counts, inputs.weights * result.terms, 0.0)
        share = weighed.sum() / micro_batch.batch.denominator
        metrics = {name: Moments.of(value, counts) for name, value in result.metrics.items()}
        return share, BatchOutput(metrics=metrics)

    def _inputs(self, micro_batch: ForwardMicroBatch) -> ForwardLossInputs:
        batch, rows = micro_batch.batch, micro_batch.rows
        trajectory = batch.trajectory
        samples = torch.tensor([row.row for row in rows])
        sigma = torch.tensor([row.sigma for row in rows], dtype=torch.float32)
        schedule = trajectory.effective.schedule()
        step = Step(index=torch.tensor([step_of(schedule, s) for s in sigma.tolist()]), sigma=sigma)
        clean = {name: value[samples, -1] for name, value in trajectory.latents.items()}
        shapes = {name: tuple(value.shape[1:]) for name, value in clean.items()}
        noise = noise_of(rows, update=batch.update, shapes=shapes)
        noised = noise_to(clean, noise, sigma)
        conditioning = trajectory.conditioning.select(trajectory.prompt_index[samples])
        guidance = Guidance.of(trajectory.effective)
        if micro_batch.needs.guidance is PredictionGuidance.NONE:
            guidance = self.denoiser.single_branch(guidance)

        def predict() -> Latents:
            return self.denoiser.velocity(noised, step, conditioning, guidance)

        others: dict[str, Latents] = {}
        for policy in micro_batch.needs.others:
            with torch.no_grad(), self.use_policy(policy):
                others[policy.value] = predict()
        return ForwardLossInputs(
            current=predict(),
            clean=clean,
            noise=noise,
            noised=noised,
            sigma=sigma,
            advantages=batch.advantages[samples],
            weights=batch.weights[samples],
            unit=torch.tensor([row.unit for row in rows]),
            **others,
        )
