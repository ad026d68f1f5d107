"""A step's rows cut into optimizer steps and dealt to the ranks: indices and numbers, no tensor.

Axes: B rows, W trained steps of a row. The loss of an optimizer step is divided by its trained valid
(sample, step) pairs on all ranks, so it does not depend on how the rows are dealt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from omni_core.seeds import derive_seed


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
    """W of its window."""


@attrs.frozen(kw_only=True)
class OptimizerStepPlan:
    """One rank's rows of one optimizer step."""

    rows: tuple[tuple[int, int], ...]
    """(place among the trajectories handed over, row in it)."""
    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    denominator: float
    """Trained valid (sample, step) pairs of the optimizer step on all ranks."""


@attrs.frozen(kw_only=True)
class UpdatePlan:
    """What one rank does in one update."""

    steps: tuple[OptimizerStepPlan, ...]
    sources: tuple[int, ...]
    """The trajectories to be handed over, in this order."""


def plan_updates(
    rows: Sequence[PlannedRow], *, updates: int, ranks: int, seed: int, iteration: int
) -> tuple[UpdatePlan, ...]:
    """Plan an update for every rank.

    Rows keep their natural order for one optimizer step; for several they are dealt to them by a
    seeded permutation. Within a step each rank has a stretch of the natural order, which is mostly
    what it sampled itself. A step without a valid row is left out on all ranks.

    Args:
        rows: All samples, in the natural order.
        updates: Optimizer steps; with *ranks* they divide the rows.
        ranks: Data-parallel ranks.
        seed: `seeds.train`.
        iteration: Trained steps so far: each has a permutation of its own.

    Raises:
        ValueError: the rows do not divide evenly.
    """
    if len(rows) % (updates * ranks):
        msg = (
            f"{len(rows)} rows do not divide evenly into {updates} optimizer steps on {ranks} ranks"
        )
        raise ValueError(msg)
    order = list(range(len(rows)))
    if updates > 1:
        random.Random(derive_seed("update-order", seed, iteration)).shuffle(order)
    size, share = len(rows) // updates, len(rows) // (updates * ranks)
    steps: list[list[tuple[list[PlannedRow], float]]] = [[] for _ in range(ranks)]
    for update in range(updates):
        chosen = [rows[i] for i in sorted(order[update * size : (update + 1) * size])]
        denominator = float(sum(row.weight * row.trained_steps for row in chosen))
        if denominator > 0:
            for rank in range(ranks):
                part = chosen[rank * share : (rank + 1) * share]
                steps[rank].append((part, denominator))
    return tuple(_rank_plan(own) for own in steps)


def _rank_plan(steps: Sequence[tuple[Sequence[PlannedRow], float]]) -> UpdatePlan:
    sources = sorted({row.source for rows, _ in steps for row in rows})
    place = {source: index for index, source in enumerate(sources)}
    return UpdatePlan(
        steps=tuple(
            OptimizerStepPlan(
                rows=tuple((place[row.source], row.row) for row in rows),
                advantages=tuple(row.advantage for row in rows),
                weights=tuple(row.weight for row in rows),
                denominator=denominator,
            )
            for rows, denominator in steps
        ),
        sources=tuple(sources),
    )
