"""Training rows are (sample, step) pairs, packed into micro-batches of one expert each.

The order is the same for the same rows: expert by expert, teacher by teacher (where a loss looks at
several), sample by sample, steps ascending. Ranks fill up to a common number of micro-batches for each
expert and teacher, with dummies that weigh nothing. Letters:
B samples, W trained steps of a sample, M pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from omni_core.engine import TrainBatch
from omni_core.model import Denoiser, Guidance
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_engine_fsdp.call_plan import Call, CallPlan, agree, common_counts


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """M pairs that one forward takes."""

    data: TrainBatch
    schedule: FlowMatchSchedule
    expert: str
    rows: Tensor
    """int64 [M]: samples of `data`."""
    columns: Tensor
    """int64 [M]: the pair's place among the sample's trained steps."""
    steps: Tensor
    """int64 [M]: the step itself."""
    teacher: int = 0
    """Of all its rows: a place among the engine's teachers."""
    last: bool
    """Of its expert: gradients are synced after it."""
    dummy: bool = False
    """Run for the other ranks' sake: counts for nothing."""
    velocity: Latents | None = None
    """Modality -> [M, ...] with the graph of sampling, where that was kept: no forward is run."""


def routes(denoiser: Denoiser, schedule: FlowMatchSchedule) -> list[str]:
    """Name the expert of every step but the last, which is never trained."""
    return [denoiser.route(step, schedule) for step in range(max(schedule.num_steps - 1, 1))]


def cut(
    data: TrainBatch,
    denoiser: Denoiser,
    *,
    size: int,
    all_rows: bool,
    phase: str,
    group: Any | None,
    teachers: int = 1,
) -> list[MicroBatch]:
    """Cut a batch into micro-batches, as many of each expert as on every other rank. A collective.

    Args:
        data: This rank's rows, at least one.
        denoiser: Routes steps to experts.
        size: M, at most.
        all_rows: Also the rows of weight 0 (to predict); training leaves them out.
        phase: For the message if ranks differ.
        group: All ranks (`RankMesh.group`).
        teachers: How many the loss looks at; more than one have micro-batches of their own.

    Raises:
        ValueError: a rank has no row, or rows have no stochastic step (ode); on every rank.
        CallPlanError: ranks are about to do different things.
    """
    trajectory = data.trajectory
    schedule = trajectory.effective.schedule()
    width = trajectory.step_indices.shape[1]
    fewest = -common_counts([-min(trajectory.rows, width)], group)[0]
    if fewest == 0:
        msg = (
            f"{phase}: every rank needs a row with a stochastic step; this one has "
            f"{trajectory.rows} rows of {width} steps"
        )
        raise ValueError(msg)
    expert_of = routes(denoiser, schedule)
    pairs = _pairs(data, expert_of, list(denoiser.experts), all_rows=all_rows)
    parts = {
        (expert, teacher): _split(own, size)
        for expert, found in pairs.items()
        for teacher, own in enumerate(_by_teacher(data, found, teachers))
    }
    counts = common_counts([len(found) for found in parts.values()], group)
    if not any(counts):
        # Nothing counts anywhere: gradients of zero are still gradients.
        first = next(key for key in parts if key[0] in expert_of)
        counts = tuple(int(key == first) for key in parts)
    branches = denoiser.branches(Guidance.of(trajectory.effective))
    shape = (size, branches, *_latent_shape(trajectory.latents))
    calls = (Call(e, shape, n) for (e, _), n in zip(parts, counts, strict=True) if n)
    agree(CallPlan(phase=phase, calls=tuple(calls)), group)
    batches = []
    ends = {key[0]: key for key, count in zip(parts, counts, strict=True) if count}
    for ((expert, teacher), found), count in zip(parts.items(), counts, strict=True):
        for place in range(count):
            dummy = place >= len(found)
            picked = _dummy(expert_of.index(expert)) if dummy else found[place]
            batches.append(
                MicroBatch(
                    data=data,
                    schedule=schedule,
                    expert=expert,
                    rows=picked[0],
                    columns=picked[1],
                    steps=picked[2],
                    teacher=teacher,
                    last=ends[expert] == (expert, teacher) and place == count - 1,
                    dummy=dummy,
                )
            )
    return batches


def _pairs(
    data: TrainBatch, expert_of: Sequence[str], experts: Sequence[str], *, all_rows: bool
) -> dict[str, Tensor]:
    """Expert -> int64 [3, n]: rows, columns and steps of its pairs."""
    steps = data.trajectory.step_indices.cpu()
    if steps.numel() and int(steps.max()) >= len(expert_of):
        msg = f"step {int(steps.max())} is the last of the schedule or beyond it: it is not trained"
        raise ValueError(msg)
    counted = torch.ones(len(steps), dtype=torch.bool) if all_rows else data.weights.cpu() > 0
    rows = torch.arange(len(steps))[:, None].expand_as(steps)
    columns = torch.arange(steps.shape[1]).expand_as(steps)
    table = torch.stack([rows, columns, steps])[:, counted].flatten(1)
    owner = torch.tensor([experts.index(name) for name in expert_of])[table[2]]
    return {name: table[:, owner == place] for place, name in enumerate(experts)}


def _by_teacher(data: TrainBatch, pairs: Tensor, teachers: int) -> list[Tensor]:
    if teachers == 1 or data.teachers is None:
        return [pairs]
    owner = data.teachers.cpu()[pairs[0]]
    return [pairs[:, owner == teacher] for teacher in range(teachers)]


def _split(pairs: Tensor, size: int) -> list[Tensor]:
    return list(torch.split(pairs, size, dim=1)) if pairs.shape[1] else []


def _dummy(step: int) -> Tensor:
    return torch.tensor([[0], [0], [step]])


def _latent_shape(latents: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(side for value in latents.values() for side in value.shape[2:])
