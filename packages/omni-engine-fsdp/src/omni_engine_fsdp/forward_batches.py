"""Finished samples at drawn sigmas, packed into micro-batches that leave every unit whole.

A cell is one unit at one of its draws: what it is noised by and to follows from its samples' seeds
alone. Cells are packed in the order of their units, draws ascending, expert by expert; ranks fill up
to a common number of micro-batches with dummies. Letters: B samples, M rows of a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from omni_core.choices import PredictionGuidance
from omni_core.engine import TrainBatch
from omni_core.forward_needs import ForwardNeeds
from omni_core.forward_process import draw_sigmas, forward_noise, unit_seed
from omni_core.model import Denoiser, Guidance
from omni_core.schedule import FlowMatchSchedule
from omni_engine_fsdp.call_plan import Call, CallPlan, agree, common_counts


@attrs.frozen
class Row:
    """One sample at one sigma."""

    row: int
    """Of the batch."""
    seed: int
    """Of its noise: the sample's own, or its unit's where a unit shares its draws."""
    draw: int
    """Number of the draw within the update."""
    sigma: float
    """A float32 value in (0, 1]."""
    unit: int
    """The same for the rows of one cell alone."""


@attrs.frozen(kw_only=True, eq=False)
class ForwardMicroBatch:
    """Rows that one forward takes."""

    data: TrainBatch
    needs: ForwardNeeds
    schedule: FlowMatchSchedule
    expert: str
    rows: tuple[Row, ...]
    """M."""
    last: bool
    """Of its expert: gradients are synced after it."""
    dummy: bool = False
    """Run for the other ranks' sake: counts for nothing."""

    def noise(self) -> dict[str, Tensor]:
        """x1 of every row: modality -> float32 [M, ...] on the CPU; a draw of several rows is made once."""
        shapes = {
            name: tuple(value.shape[2:]) for name, value in self.data.trajectory.latents.items()
        }
        drawn = {
            key: forward_noise(key[0], self.data.update, key[1], shapes)
            for key in dict.fromkeys((row.seed, row.draw) for row in self.rows)
        }
        each = [drawn[row.seed, row.draw] for row in self.rows]
        return {name: torch.cat([noise[name] for noise in each]) for name in shapes}

    @property
    def samples(self) -> Tensor:
        """int64 [M]: rows of the batch."""
        return torch.tensor([row.row for row in self.rows])

    @property
    def sigma(self) -> Tensor:
        """float32 [M]."""
        return torch.tensor([row.sigma for row in self.rows], dtype=torch.float32)

    @property
    def unit(self) -> Tensor:
        """int64 [M]."""
        return torch.tensor([row.unit for row in self.rows])


def guidance_of(needs: ForwardNeeds, data: TrainBatch, denoiser: Denoiser) -> Guidance:
    """Return how strongly the prompt is followed in the loss's predictions."""
    sampled = Guidance.of(data.trajectory.effective)
    if needs.guidance is PredictionGuidance.NONE:
        return denoiser.single_branch(sampled)
    return sampled


def step_of(schedule: FlowMatchSchedule, sigma: float) -> int:
    """Return the step of a schedule that a sigma lies in: the last that starts at or above it, else the first."""
    return max(int((schedule.sigmas[:-1] >= sigma).sum()) - 1, 0)


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
        ValueError: a rank has no row (on every rank), or a unit does not fit into a micro-batch.
        CallPlanError: ranks are about to do different things.
    """
    trajectory = data.trajectory
    if common_counts([-trajectory.rows], group)[0] == 0:
        msg = f"{phase}: every rank needs a row; this one has {trajectory.rows}"
        raise ValueError(msg)
    schedule = trajectory.effective.schedule()
    parts: dict[str, list[list[Row]]] = {name: [] for name in denoiser.experts}
    for expert, cells in _by_expert(_cells(data, needs, schedule), denoiser).items():
        parts[expert] = _pack(cells, size)
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
            schedule=schedule,
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
    return (Row(0, 0, 0, next(s for s in sigmas if denoiser.expert_at(s) == expert), 0),)


def _units(data: TrainBatch) -> list[list[int]]:
    """Rows of each unit that count, in the order of their first row."""
    given = range(data.trajectory.rows) if data.units is None else data.units.tolist()
    units: dict[int, list[int]] = {}
    for row, (unit, weight) in enumerate(zip(given, data.weights.tolist(), strict=True)):
        if weight > 0:
            units.setdefault(unit, []).append(row)
    return list(units.values())


def _cells(
    data: TrainBatch, needs: ForwardNeeds, schedule: FlowMatchSchedule
) -> Iterator[list[Row]]:
    draws = needs.draws_of(schedule)
    numbers = itertools.count()
    for rows in _units(data):
        seeds = [data.trajectory.records[row].seed for row in rows]
        if needs.shares_draws and len(rows) > 1:
            seeds = [unit_seed(seeds)] * len(rows)
        sigmas = {
            seed: draw_sigmas(
                needs.sigmas,
                draws,
                seed=seed,
                update=data.update,
                schedule=schedule,
                shift=needs.shift,
            ).tolist()
            for seed in dict.fromkeys(seeds)
        }
        for draw in range(draws):
            unit = next(numbers)
            yield [
                Row(row, seed, draw, sigmas[seed][draw], unit)
                for row, seed in zip(rows, seeds, strict=True)
            ]


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


def _pack(cells: Sequence[list[Row]], size: int) -> list[list[Row]]:
    packed: list[list[Row]] = []
    for cell in cells:
        if len(cell) > size:
            msg = (
                f"a unit of {len(cell)} rows, which the loss has to see together, does not fit into a "
                f"micro-batch: engine.micro_batch_size is {size}, and must be at least {len(cell)}"
            )
            raise ValueError(msg)
        if not packed or len(packed[-1]) + len(cell) > size:
            packed.append([])
        packed[-1].extend(cell)
    return packed
