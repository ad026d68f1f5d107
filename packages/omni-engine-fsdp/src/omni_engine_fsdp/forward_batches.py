"""Finished samples at drawn sigmas, packed into micro-batches that leave every unit whole.

Cells (`omni_core.forward_cells`) are packed in their order, expert by expert; ranks fill up
to a common number of micro-batches with dummies. Letters: B samples, M rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from omni_core.engine import TrainBatch
from omni_core.forward_cells import Row, cells_of, guidance_of, packed
from omni_core.forward_needs import ForwardNeeds
from omni_core.model import Denoiser
from omni_core.schedule import FlowMatchSchedule
from omni_engine_fsdp.call_plan import Call, CallPlan, agree, common_counts


@attrs.frozen(kw_only=True, eq=False)
class ForwardMicroBatch:
    """Rows that one forward takes."""

    data: TrainBatch
    needs: ForwardNeeds
    expert: str
    rows: tuple[Row, ...]
    """M."""
    last: bool
    """Of its expert: gradients are synced after it."""
    dummy: bool = False
    """Run for the other ranks' sake: counts for nothing."""

    @property
    def samples(self) -> Tensor:
        """int64 [M]: rows of the batch."""
        return torch.tensor([row.row for row in self.rows])

    @property
    def unit(self) -> Tensor:
        """int64 [M]."""
        return torch.tensor([row.unit for row in self.rows])


def cut_forward(
    data: TrainBatch,
    denoiser: Denoiser,
    needs: ForwardNeeds,
    *,
    size: int,
    phase: str,
    group: Any | None,
) -> list[ForwardMicroBatch]:
    """Cut a batch into micro-batches, as many of each expert as on every other rank. A collective.

    Args:
        data: This rank's rows, at least one; those of weight 0 are left out.
        denoiser: Routes steps to experts.
        needs: What is drawn.
        size: M, at most.
        phase: For the message if ranks differ.
        group: All ranks (`RankMesh.group`).

    Raises:
        ValueError: a rank has no row (on every rank), a unit does not fit into a micro-batch, or an expert
            that another rank runs serves no sigma that is known here.
        CallPlanError: ranks are about to do different things.
    """
    trajectory = data.trajectory
    if common_counts([-trajectory.rows], group)[0] == 0:
        msg = f"{phase}: every rank needs a row; this one has {trajectory.rows}"
        raise ValueError(msg)
    schedule = trajectory.effective.schedule()
    parts: dict[str, list[list[Row]]] = {name: [] for name in denoiser.experts}
    for expert, cells in _by_expert(cells_of(data, needs, schedule), denoiser).items():
        parts[expert] = packed(cells, size)
    counts = common_counts([len(found) for found in parts.values()], group)
    if not any(counts):
        # Nothing counts anywhere: gradients of zero are still gradients.
        first = denoiser.route(0, schedule)
        counts = tuple(int(expert == first) for expert in parts)
    branches = denoiser.branches(guidance_of(needs, data, denoiser))
    sides = [side for value in trajectory.latents.values() for side in value.shape[2:]]
    calls = (Call(e, (size, branches, *sides), n) for e, n in zip(parts, counts, strict=True) if n)
    said = ", ".join(["current", *(policy.value for policy in needs.others)])
    agree(CallPlan(phase=f"{phase} ({said})", calls=tuple(calls)), group)
    return [
        ForwardMicroBatch(
            data=data,
            needs=needs,
            expert=expert,
            rows=tuple(found[place]) if place < len(found) else _dummy(expert, schedule, denoiser),
            last=place == count - 1,
            dummy=place >= len(found),
        )
        for (expert, found), count in zip(parts.items(), counts, strict=True)
        for place in range(count)
    ]


def _dummy(expert: str, schedule: FlowMatchSchedule, denoiser: Denoiser) -> tuple[Row, ...]:
    # Other ranks may have drawn sigmas of an expert that serves no step of this schedule.
    sigmas = (*schedule.values()[:-1], *(place / 64 for place in range(64, 0, -1)))
    sigma = next((s for s in sigmas if denoiser.expert_at(s) == expert), None)
    if sigma is None:
        msg = f"expert {expert!r} serves no step of this schedule, nor any multiple of 1/64"
        raise ValueError(msg)
    return (Row(0, 0, 0, sigma, 0),)


def _by_expert(cells: Iterator[list[Row]], denoiser: Denoiser) -> dict[str, list[list[Row]]]:
    found: dict[str, list[list[Row]]] = {}
    for cell in cells:
        experts = {denoiser.expert_at(row.sigma) for row in cell}
        if len(experts) > 1:
            msg = (
                f"the rows of a unit are at sigmas of several experts ({', '.join(sorted(experts))}): an "
                "algorithm whose loss sees several rows together shares their draws (shares_draws)"
            )
            raise ValueError(msg)
        found.setdefault(experts.pop(), []).append(cell)
    return found
