"""Old log-probs that were computed again, and what they say of the policy that sampled.

Where a rollout runs another engine, or in another precision, its policy is not quite the one that is
trained: its steps are weighed and rejected by the difference. Axes: B rows, W trained steps of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from omni_core.algorithms.base_options import StochasticOptions
from omni_core.engine import TrainBatch
from omni_core.metrics import Moments
from omni_core.options import AlgorithmConfig
from omni_core.rollout_correction import RolloutWeights, rollout_correction
from omni_core.rollout_correction_options import RolloutCorrectionOptions

LEAST_FLOOR = 2.0**-24
"""Half of the spacing of float32 numbers at 1: no ratio is known better."""


def correction_of(options: AlgorithmConfig) -> RolloutCorrectionOptions | None:
    """Return what an algorithm's options say about it; None where steps are trusted or not scored."""
    return options.rollout_correction if isinstance(options, StochasticOptions) else None


def with_old_log_probs(
    batch: TrainBatch,
    old: Tensor,
    correction: RolloutCorrectionOptions | None,
    floor: Mapping[int, float],
) -> tuple[TrainBatch, dict[str, Moments]]:
    """Give a batch the log-probs of the policy that training starts from.

    Args:
        batch: B rows as they were sampled.
        old: float32 [B, W], through training micro-batches.
        correction: None only replaces the log-probs.
        floor: Sampling step -> largest |ratio - 1| of unchanged weights.

    Returns:
        The batch, with step weights where there is a correction, and what is reported of them.
    """
    replaced = attrs.evolve(batch.trajectory, log_probs=old)
    if correction is None:
        return attrs.evolve(batch, trajectory=replaced), {}
    steps = batch.trajectory.step_indices
    floors = torch.tensor(
        [[max(floor.get(step, 0.0), LEAST_FLOOR) for step in row] for row in steps.tolist()]
    ).reshape(steps.shape)
    found = rollout_correction(correction, old, batch.trajectory.log_probs, floor=floors)
    trajectory = batch.trajectory if correction.bypass else replaced
    changed = attrs.evolve(batch, trajectory=trajectory, step_weights=found.weights)
    return changed, _reported(found, batch.weights)


def _reported(found: RolloutWeights, weights: Tensor) -> dict[str, Moments]:
    counts = (weights > 0)[:, None].expand_as(found.weights).flatten()
    values = {
        "rollout_weight": found.weights,
        "rollout_rejected": (~found.kept).float(),
        "rollout_log_ratio": found.log_ratio.abs(),
    }
    return {name: Moments.of(value.flatten(), counts) for name, value in values.items()}
