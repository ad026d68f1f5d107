"""DGPO: the better part of a group is preferred to the worse part, as Diffusion-DPO does with pairs.

With d = mean_D (v - (x1 - x0))^2 at one noise and sigma for all G samples of a group,

    L = w A d,    w = sigmoid(b / G sum over the group of A (d - d_ref)), a constant,

which has the gradient of -log sigmoid(-b / G sum A (d - d_ref)) but for the factor b. A group that
already has the order that its advantages ask for weighs little. Source: Direct Group Preference
Optimization, arXiv 2510.08425, and its official code (b = 100, one noise for a group).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni_core.advantages import GroupAdvantages
from omni_core.algorithms.base import (
    ForwardAlgorithm,
    advantages_within_groups,
    rows_of_units,
)
from omni_core.algorithms.dgpo_options import DGPOOptions
from omni_core.engine import LossTerms
from omni_core.forward_process import ForwardLossInputs, denoising_error


def group_weights(
    error: Tensor, reference: Tensor, advantages: Tensor, unit: Tensor, *, beta: float
) -> Tensor:
    """w of every row's group.

    Args:
        error: [M], d of the trained policy; its gradient is not followed.
        reference: [M], d_ref.
        advantages: [M].
        unit: int64 [M] on the CPU: rows of equal number are a whole group.
        beta: b > 0.

    Returns:
        [M], without a gradient.
    """
    place, sizes = rows_of_units(unit)
    place, sizes = place.to(error.device), sizes.to(error)
    away = (advantages * (error - reference)).detach()
    sums = torch.zeros_like(sizes).index_add(0, place, away)
    return torch.sigmoid(beta * sums / sizes)[place]


class DGPO(ForwardAlgorithm):
    """See the module's docstring."""

    options: DGPOOptions

    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """Centre by group, divide by the configured standard deviation, clip."""
        return advantages_within_groups(self.options, rewards, group_ids, valid)

    @property
    def shares_draws(self) -> bool:
        """A group is compared at one noise and sigma."""
        return True

    def units(
        self, advantages: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> tuple[tuple[int, ...], ...]:
        """Whole groups, without their unscored rows."""
        del advantages
        found: dict[str, list[int]] = {}
        for row, (group, ok) in enumerate(zip(group_ids, valid.tolist(), strict=True)):
            if ok:
                found.setdefault(group, []).append(row)
        return tuple(tuple(rows) for rows in found.values())

    def loss(self, inputs: ForwardLossInputs) -> LossTerms:
        """Weigh every row's error by its advantage and its group."""
        error = denoising_error(inputs.current, inputs.clean, inputs.noise)
        reference = denoising_error(self.reference(inputs), inputs.clean, inputs.noise)
        weights = group_weights(
            error, reference, inputs.advantages, inputs.unit, beta=self.options.beta
        )
        terms = weights * inputs.advantages.detach() * error
        metrics = {
            "policy_loss": terms.detach(),
            "group_weight": weights,
            "denoising_error": error.detach(),
        }
        return self.finish(inputs, terms, metrics)
