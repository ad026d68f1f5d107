"""A step's rows cut into optimizer steps and dealt to the ranks: indices and numbers, no tensor.

Axes: B rows, W trained steps of a row. The loss of an optimizer step is divided by its trained valid
(sample, step) pairs on all ranks, so it does not depend on how the rows are dealt.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from omni_core.seeds import derive_seed

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class PlannedRow:
    """One sample as an update needs it."""

    source: int
    """Which trajectory holds it."""
    row: int
    """Where in the trajectory."""
    advantage: float
    weight: float
    """1, or 0 for a sample that counts for nothing."""
    trained_steps: int
    """W of its window, or the sigmas that it is noised to."""
    unit: int | None = None
    """Rows of equal number are trained together; None for one that is trained by itself."""
    teacher: int | None = None
    """Place of its teacher in `Algorithm.teachers`; None where there is none to choose."""


@attrs.frozen(kw_only=True)
class OptimizerStepPlan:
    """One rank's rows of one optimizer step."""

    rows: tuple[tuple[int, int], ...]
    """(place among the trajectories handed over, row in it)."""
    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    denominator: float
    """Trained valid (sample, step) pairs of the optimizer step on all ranks."""
    units: tuple[int, ...] | None = None
    """Of each row; None where every row is a unit of its own."""
    teachers: tuple[int, ...] | None = None
    """Of each row; None where there is none to choose."""
    update: int = 0
    """Place among the optimizer steps of its rollout, also where some of them are left out."""


@attrs.frozen(kw_only=True)
class UpdatePlan:
    """What one rank does in one update."""

    steps: tuple[OptimizerStepPlan, ...]
    sources: tuple[int, ...]
    """The trajectories to be handed over, in this order."""
    floor: Mapping[int, float] = attrs.field(factory=dict)
    """Sampling step -> its noise floor, as the last canary measured it (rollout correction)."""


def plan_updates(
    rows: Sequence[PlannedRow], *, updates: int, ranks: int, seed: int, iteration: int
) -> tuple[UpdatePlan, ...]:
    """Plan an update for every rank.

    Rows keep their natural order for one optimizer step; for several they are dealt to them by a
    seeded permutation. Within a step each rank has a stretch of the natural order, which is mostly
    what it sampled itself. A step without a valid row is left out on all ranks. Where rows are trained
    together, whole units are dealt instead, rows that are in none are left out, and a rank without a
    unit gets a row that counts for nothing.

    Args:
        rows: All samples, in the natural order.
        updates: Optimizer steps; with *ranks* they divide the rows.
        ranks: Data-parallel ranks.
        seed: `seeds.train`.
        iteration: Trained steps so far: each has a permutation of its own.

    Raises:
        ValueError: the rows do not divide evenly (single rows).
    """
    together = any(row.unit is not None for row in rows)
    dealt = (_deal_units if together else _deal_rows)(
        rows, updates=updates, ranks=ranks, seed=derive_seed("update-order", seed, iteration)
    )
    counted = []
    for update, parts in enumerate(dealt):
        denominator = math.fsum(row.weight * row.trained_steps for part in parts for row in part)
        if denominator > 0:
            counted.append((update, denominator, parts))
    return tuple(
        _rank_plan([(update, total, parts[rank]) for update, total, parts in counted])
        for rank in range(ranks)
    )


Dealt = list[list[list[PlannedRow]]]
"""Rows of each rank in each optimizer step."""


def _deal_rows(rows: Sequence[PlannedRow], *, updates: int, ranks: int, seed: int) -> Dealt:
    if len(rows) % (updates * ranks):
        msg = (
            f"{len(rows)} rows do not divide evenly into {updates} optimizer steps on {ranks} ranks"
        )
        raise ValueError(msg)
    chosen = _shares(rows, updates=updates, seed=seed)
    return [_stretches(part, ranks) for part in chosen]


def _deal_units(rows: Sequence[PlannedRow], *, updates: int, ranks: int, seed: int) -> Dealt:
    units: dict[int, list[PlannedRow]] = {}
    for row in rows:
        if row.unit is not None:
            units.setdefault(row.unit, []).append(row)
    idle = attrs.evolve(rows[0], advantage=0.0, weight=0.0, unit=-1)
    return [
        [[row for unit in mine for row in unit] or [idle] for mine in _stretches(part, ranks)]
        for part in _shares(list(units.values()), updates=updates, seed=seed)
    ]


def _shares(items: Sequence[T], *, updates: int, seed: int) -> list[list[T]]:
    """Cut *items* into optimizer steps, each in the natural order; more than one by a permutation."""
    order = list(range(len(items)))
    if updates > 1:
        random.Random(seed).shuffle(order)
    return [[items[i] for i in sorted(part)] for part in _stretches(order, updates)]


def _stretches(items: Sequence[T], count: int) -> list[list[T]]:
    """Cut into stretches that differ by at most one item."""
    bounds = [len(items) * place // count for place in range(count + 1)]
    return [list(items[low:high]) for low, high in itertools.pairwise(bounds)]


def _rank_plan(steps: Sequence[tuple[int, float, Sequence[PlannedRow]]]) -> UpdatePlan:
    sources = sorted({row.source for _, _, rows in steps for row in rows})
    place = {source: index for index, source in enumerate(sources)}
    return UpdatePlan(
        steps=tuple(
            OptimizerStepPlan(
                rows=tuple((place[row.source], row.row) for row in rows),
                advantages=tuple(row.advantage for row in rows),
                weights=tuple(row.weight for row in rows),
                denominator=denominator,
                units=_all(row.unit for row in rows),
                teachers=_all(row.teacher for row in rows),
                update=update,
            )
            for update, denominator, rows in steps
        ),
        sources=tuple(sources),
    )


def _all(values: Iterable[int | None]) -> tuple[int, ...] | None:
    """The values, or None if any is missing."""
    known = tuple(values)
    given = tuple(value for value in known if value is not None)
    return given if len(given) == len(known) else None
