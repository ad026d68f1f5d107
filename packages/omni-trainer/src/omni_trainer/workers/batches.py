"""Rows of several trajectories, put together for training.

Axes: B rows of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch

from omni_core.engine import TrainBatch
from omni_core.trajectory import Trajectory
from omni_trainer.update_plan import OptimizerStepPlan


def gather_rows(trajectories: Sequence[Trajectory], rows: Sequence[tuple[int, int]]) -> Trajectory:
    """Take (trajectory, row) pairs in order, without media: training looks at none.

    Raises:
        ValueError: no rows, or trajectories that were not sampled alike.
    """
    parts = []
    for source, pairs in itertools.groupby(rows, key=lambda pair: pair[0]):
        bare = attrs.evolve(trajectories[source], media=None)
        wanted = [row for _, row in pairs]
        whole = wanted == list(range(bare.rows))
        parts.append(bare if whole else bare.select(torch.tensor(wanted)))
    return Trajectory.concat(parts)


def train_batch(trajectories: Sequence[Trajectory], plan: OptimizerStepPlan) -> TrainBatch:
    """Build one rank's batch of one optimizer step."""
    return TrainBatch(
        trajectory=gather_rows(trajectories, plan.rows),
        advantages=torch.tensor(plan.advantages, dtype=torch.float32),
        weights=torch.tensor(plan.weights, dtype=torch.float32),
        denominator=plan.denominator,
        units=None if plan.units is None else torch.tensor(plan.units),
        update=plan.update,
        teachers=None if plan.teachers is None else torch.tensor(plan.teachers),
    )


def first_sampling_batch(trajectories: Sequence[Trajectory]) -> list[tuple[int, int]]:
    """Find the rows of the first batch that was denoised together, as (trajectory, row) pairs."""
    name = trajectories[0].places[0].batch
    return [
        (source, row)
        for source, trajectory in enumerate(trajectories)
        for row, place in enumerate(trajectory.places)
        if place.batch == name
    ]


def filled_up(
    trajectories: Sequence[Trajectory], chosen: Sequence[tuple[int, int]], *, pairs: int
) -> list[tuple[int, int]]:
    """Add rows to *chosen*, as (trajectory, row) pairs, until they hold *pairs* trained steps.

    Args:
        trajectories: All that there are; where they hold less, all rows are taken.
        chosen: Rows that are taken anyway.
        pairs: (sample, step) pairs of a micro-batch.

    Returns:
        The rows in the order of the trajectories, as a training plan has them.
    """
    taken = set(chosen)
    held = sum(trajectories[source].step_indices.shape[1] for source, _ in taken)
    for source, trajectory in enumerate(trajectories):
        for row in range(trajectory.rows):
            if held >= pairs:
                return sorted(taken)
            if (source, row) not in taken:
                taken.add((source, row))
                held += trajectory.step_indices.shape[1]
    return sorted(taken)
