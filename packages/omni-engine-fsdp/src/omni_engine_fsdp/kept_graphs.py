"""The graph of sampling, kept for the one update that follows: training runs no forward of its own.

At a step that is trained, the denoiser predicts with gradients on; the velocity is stored with its graph
and the sampler goes on with its value, so what is sampled is what it was. The update then takes the
gradient of the loss through the stored velocities: the very function that sampled, so old log-probs are
exact whatever the floor. The price is memory: every kept forward holds its activations until the update.

A kept forward holds a whole sampling batch at one step. Ranks keep the same ones (a backward is a
collective), also where only another rank's rows are trained there. Letters: B rows of a sampling batch,
M pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from omni_core import device as devices
from omni_core.engine import TrainBatch
from omni_core.reverse_step import Latents
from omni_engine_fsdp.call_plan import Call, CallPlan, agree, common_counts
from omni_engine_fsdp.micro_batch import MicroBatch

_GIB = 2**30


@attrs.frozen(kw_only=True, eq=False)
class KeptForward:
    """What the denoiser predicted of a sampling batch at one step."""

    batch: str
    """Its name (`BatchPlace.batch`)."""
    step: int
    expert: str
    velocity: Latents
    """Modality -> [B, ...], with graph."""

    def rows(self, places: Tensor) -> dict[str, Tensor]:
        """Take some rows [M, ...], in the graph."""
        return {name: value[places.to(value.device)] for name, value in self.velocity.items()}


class KeptGraphs:
    """The forwards of one rollout on one rank."""

    def __init__(self, device: torch.device, group: Any | None) -> None:
        self.device = device
        self.group = group
        self.open = False
        """Whether what is sampled now is trained next."""
        self.forwards: list[KeptForward] = []
        self.expected = 0
        """Forwards that the requests at hand will add."""

    def begin(self) -> None:
        """Keep what is sampled from now on; what an earlier rollout left is dropped."""
        self.end()
        self.open = True

    def end(self) -> None:
        """Drop every graph, and keep no more."""
        self.open = False
        self.forwards.clear()
        self.expected = 0

    def keeper(
        self, batch: str, steps: frozenset[int], expert_of: Callable[[int], str]
    ) -> BatchKeeper:
        """Return what keeps one batch's forwards at *steps*.

        Raises:
            ValueError: a batch of that name is kept: rollouts count their batches each for itself.
        """
        if any(each.batch == batch for each in self.forwards):
            msg = (
                f"engine.keep_graph: a batch named {batch} was sampled since begin_rollout; sample with "
                "one rollout of this engine until the update"
            )
            raise ValueError(msg)
        return BatchKeeper(graphs=self, batch=batch, steps=steps, expert_of=expert_of)

    def add(self, forward: KeptForward, nbytes: int) -> None:
        """Keep one more; the first of a rollout tells whether all of them will fit.

        Args:
            forward: With graph.
            nbytes: What it took on the device; 0 where that is not measured (the CPU).

        Raises:
            ValueError: they will not; on every rank, with what would help.
        """
        self.forwards.append(forward)
        if len(self.forwards) > 1:
            return
        free = devices.total_memory(self.device) - devices.memory_allocated(self.device)
        # One more: a backward needs about as much again for the gradients of what it frees.
        more = nbytes * self.expected
        needed, short = common_counts([more, more - free], self.group, phase="keep_graph")
        if needed > 0 and short > 0:
            count = self.expected
            self.end()
            msg = (
                f"engine.keep_graph: the graphs of {count} forwards take about {needed / _GIB:.1f} GiB "
                f"beside what is there, {short / _GIB:.1f} GiB more than is free; take fewer trained "
                "steps or samples, engine.gradient_checkpointing, more ranks, or keep_graph=false"
            )
            raise ValueError(msg)


@attrs.frozen(kw_only=True, eq=False)
class BatchKeeper:
    """Keeps the forwards of one sampling batch at some of its steps."""

    graphs: KeptGraphs
    batch: str
    steps: frozenset[int]
    expert_of: Callable[[int], str]

    def predict(self, step: int, call: Callable[[], Latents]) -> Latents:
        """Predict the velocity of the batch, kept if the step is; what is returned has no graph."""
        if step not in self.steps:
            return call()
        device = self.graphs.device
        before = devices.memory_allocated(device)
        with torch.enable_grad():
            velocity = call()
        forward = KeptForward(
            batch=self.batch, step=step, expert=self.expert_of(step), velocity=velocity
        )
        self.graphs.add(forward, devices.memory_allocated(device) - before)
        return {name: value.detach() for name, value in velocity.items()}


def cut_kept(
    data: TrainBatch, kept: Sequence[KeptForward], *, phase: str, group: Any | None
) -> list[MicroBatch]:
    """Make a micro-batch of each kept forward: its rows that count. A collective.

    Args:
        data: This rank's rows, at least one, all of them sampled here since `KeptGraphs.begin`.
        kept: In the order of sampling, the same on every rank.
        phase: For the message if ranks differ.
        group: All ranks (`RankMesh.group`).

    Raises:
        ValueError: a rank has no row, or a pair of a row has no graph; on every rank.
        CallPlanError: ranks are about to do different things.
    """
    calls = [Call(each.expert, (each.step,), 1) for each in kept]
    agree(CallPlan(phase=phase, calls=tuple(calls)), group)
    places = {(p.batch, p.place): row for row, p in enumerate(data.trajectory.places)}
    steps = data.trajectory.step_indices.cpu()
    counted = data.weights.cpu() > 0
    pairs = [_pairs(each, places, steps) for each in kept]
    found = sum(len(rows) for rows, _, _ in pairs)
    wrong = found != steps.numel() or not found
    if common_counts([int(wrong)], group, phase=phase)[0] > 0:
        msg = (
            f"engine.keep_graph: {found} of {steps.numel()} (sample, step) pairs of this batch were "
            "sampled with their graph on this rank, since begin_rollout and with these weights"
        )
        raise ValueError(msg)
    schedule = data.trajectory.effective.schedule()
    last = {each.expert: index for index, each in enumerate(kept)}
    batches = []
    for index, (each, (rows, columns, where)) in enumerate(zip(kept, pairs, strict=True)):
        own = counted[rows]
        dummy = not bool(own.any())
        batches.append(
            MicroBatch(
                data=data,
                schedule=schedule,
                expert=each.expert,
                rows=torch.tensor([0]) if dummy else rows[own],
                columns=torch.tensor([0]) if dummy else columns[own],
                steps=torch.tensor([each.step]) if dummy else torch.full_like(rows[own], each.step),
                last=last[each.expert] == index,
                dummy=dummy,
                velocity=each.rows(torch.tensor([0]) if dummy else where[own]),
            )
        )
    return batches


def _pairs(
    kept: KeptForward, places: dict[tuple[str, int], int], steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """int64 [n] each: rows of the batch with this step, its column, and the row's place when sampled."""
    size = len(next(iter(kept.velocity.values())))
    found = []
    for place in range(size):
        row = places.get((kept.batch, place))
        if row is not None:
            columns = (steps[row] == kept.step).nonzero().flatten().tolist()
            found += [(row, column, place) for column in columns]
    table = torch.tensor(found, dtype=torch.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]
