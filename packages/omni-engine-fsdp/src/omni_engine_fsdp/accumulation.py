"""Micro-batches of one update: gradients add up, and are synced once at each expert's last.

What a micro-batch is, and what its forward gives, is a subclass's; letters: B samples, M rows of a
micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor

from omni_core.engine import BatchOutput, LossFunction, LossTerms, TrainBatch
from omni_core.metrics import Moments
from omni_core.reverse_step import Latents
from omni_core.trajectory import Trajectory
from omni_engine_fsdp import call_plan, sharding
from omni_engine_fsdp.engine import DiffusersFSDPEngine
from omni_engine_fsdp.replay import replay


class AnyMicroBatch(Protocol):
    """What the accumulation has to know of a micro-batch."""

    @property
    def expert(self) -> str:
        """Whose forward it is."""

    @property
    def last(self) -> bool:
        """Of its expert: gradients are synced after it."""

    @property
    def dummy(self) -> bool:
        """Run for the other ranks' sake: counts for nothing."""


M = TypeVar("M", bound=AnyMicroBatch)


@attrs.frozen(kw_only=True, eq=False)
class Forward:
    """What one micro-batch gave, still on the device."""

    share: Tensor | None
    """Of the objective, with graph; None without a loss."""
    metrics: Mapping[str, Tensor]
    """Name -> [M]."""
    counts: Tensor
    """bool [M]: rows that are in the metrics."""
    log_probs: Tensor | None = None
    """[M], without graph, where the rows have any."""


class AccumulatingEngine(DiffusersFSDPEngine, Generic[M]):
    """Runs the micro-batches that a subclass cuts."""

    _half_way = False
    """Whether gradients of some micro-batches are not synced: FSDP2 keeps those to itself."""

    @abstractmethod
    def _forward(self, micro_batch: M, loss: LossFunction | None) -> Forward:
        """Run one micro-batch forward."""

    def _begin(
        self,
        data: TrainBatch | TensorDict,
        loss_function: LossFunction | None,
        *,
        forward_only: bool,
    ) -> tuple[TrainBatch, LossFunction | None]:
        """Return the batch and the loss in force.

        Raises:
            ValueError: no loss to train with.
            CallPlanError: ranks that compute one forward together were given different rows.
            RuntimeError: an earlier call failed after its first backward.
        """
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
        batch = TrainBatch.of(data)
        told = zip(batch.trajectory.records, batch.advantages.tolist(), strict=True)
        rows = ((record.group_id, record.k, advantage) for record, advantage in told)
        call_plan.agree_on_rows(rows, self.mesh.together, phase="a batch")
        return batch, loss

    def _accumulate(
        self, micro_batches: Iterable[M], loss: LossFunction | None, *, forward_only: bool
    ) -> Iterator[tuple[M, Forward]]:
        """Run all micro-batches; yields those that count, without their graphs."""
        for micro_batch in micro_batches:
            if not forward_only:
                sharding.sync_gradients(self.units[micro_batch.expert], micro_batch.last)
            with self._as_training():
                forward = self._forward(micro_batch, loss)
            if not forward_only:
                self._backward(forward)
            if not micro_batch.dummy:
                yield micro_batch, attrs.evolve(forward, share=None)
        if not forward_only:
            sharding.average_gradients(self.replicated(), self.mesh.group)
        self._half_way = False

    @contextmanager
    def _as_training(self) -> Iterator[None]:
        """Run the function that training runs: a compiled one is another without gradients."""
        with torch.enable_grad() if self.engine_config.compile else nullcontext():
            yield

    def _backward(self, forward: Forward) -> None:
        assert forward.share is not None
        self._half_way = True
        forward.share.backward()  # type: ignore[no-untyped-call]

    def _share(
        self, terms: LossTerms, weights: Tensor, counts: Tensor, denominator: float
    ) -> Tensor:
        """A micro-batch's share of the objective: terms and weights [M], counts bool [M].

        Gradients are averaged over all ranks, and the denominator is already that of all of them. Ranks
        that hold the same rows have a part of each row's gradient.
        """
        # Not a product with 0: the value is finite whatever the term of a row that counts for nothing. Its
        # gradient is 0 times that of the term, so what the row itself holds has to be finite.
        weighed = torch.where(counts, weights * terms.terms, 0.0)
        return weighed.sum() * (self.mesh.size / denominator)

    def replay(self, trajectory: Trajectory) -> Tensor:
        """Score a rollout's own steps again in its own batches; see `replay.replay`."""
        with self.eval_mode(), self.use_adapter(trajectory.adapter):
            return replay(
                trajectory,
                self.denoiser,
                device=self.device,
                group=self.mesh.group,
                with_graph=self.engine_config.compile and self.graphs is not None,
            )


def nothing(velocity: Latents, rows: int) -> Forward:
    """What a dummy of so many rows gives: gradients of zero."""
    share = sum(value.sum() for value in velocity.values()) * 0.0
    assert isinstance(share, Tensor)
    return Forward(share=share, metrics={}, counts=torch.zeros(rows, dtype=torch.bool))


def moments(done: Sequence[Forward]) -> dict[str, Moments]:
    """Moments of each metric over the rows that count: one copy from the device at the end."""
    names = list(dict.fromkeys(name for forward in done for name in forward.metrics))
    found = {}
    for name in names:
        given = [forward for forward in done if name in forward.metrics]
        values = torch.cat([forward.metrics[name].detach() for forward in given])
        found[name] = Moments.of(values, torch.cat([forward.counts for forward in given]))
    return found


def output_of(forward: Forward) -> BatchOutput:
    """What `forward_step` returns of one micro-batch; log-probs as [1, M]."""
    scores = None if forward.log_probs is None else forward.log_probs.float().cpu()[None]
    return BatchOutput(metrics=moments([forward]), log_probs=scores)
