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

from omni_core.engine import BatchOutput, LossFunction, TrainBatch
from omni_core.forward_cells import Row, cells_of, model_inputs, packed
from omni_core.forward_needs import ForwardNeeds, forward_needs
from omni_core.forward_process import ForwardLossInputs
from omni_core.metrics import Moments, merge
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
        given = model_inputs(rows, batch, micro_batch.needs, self.denoiser, device=self.device)
        samples = torch.tensor([row.row for row in rows])

        def predict() -> Latents:
            return self.denoiser.velocity(
                given.noised, given.step, given.conditioning, given.guidance
            )

        others: dict[str, Latents] = {}
        for policy in micro_batch.needs.others:
            with torch.no_grad(), self.use_policy(policy):
                others[policy.value] = predict()
        return ForwardLossInputs(
            current=predict(),
            clean=given.clean,
            noise=given.noise,
            noised=given.noised,
            sigma=given.step.sigma,
            advantages=batch.advantages[samples],
            weights=batch.weights[samples],
            unit=torch.tensor([row.unit for row in rows]),
            **others,
        )
