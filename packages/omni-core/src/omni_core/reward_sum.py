"""Several rewards become one: each brought to a common scale, weighted, added.

A reward in [20, 30] would drown one in [0, 1]; centred and divided by its own standard deviation, within
its group or over the batch, each counts by its weight. Letters: B rows. Source: the `advantage_aggr` of
MixGRPO (arXiv 2507.21802).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from omni_core.advantages import AdvantageStd, group_advantages
from omni_core.choices import RewardScale as RewardScale


def weighted_reward_sum(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    group_ids: Sequence[Hashable],
    *,
    scale: RewardScale,
    valid: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """Add B rows' rewards.

    Args:
        rewards: Name -> [B]; the value of an unscored row is not read.
        weights: Name -> weight, for every reward.
        group_ids: One for each row.
        scale: What each reward is centred and divided by first. A reward that is the same for all rows
            it is compared with adds 0.
        valid: bool [B], False where a row was not scored by all.
        ddof: Subtracted from the count under the standard deviation, 0 or 1.
        eps: Added to the standard deviation.

    Returns:
        [B], float32 (float64 where a reward is); 0 for unscored rows.

    Raises:
        ValueError: no reward, names that differ, or what `group_advantages` refuses.
    """
    if not rewards or set(rewards) != set(weights):
        raise ValueError(f"rewards are {sorted(rewards)}, weights are for {sorted(weights)}")
    total: Tensor | None = None
    for name, values in rewards.items():
        scale = RewardScale.parse(scale)
        batch = scale is not RewardScale.GROUP
        found = group_advantages(
            values,
            [""] * len(group_ids) if batch else group_ids,
            valid=valid,
            std=AdvantageStd.GROUP,
            ddof=ddof,
            eps=eps,
            clip=None,
        ).advantages
        if scale is RewardScale.NONE:
            found = values.to(found)
            if valid is not None:
                found = torch.where(valid, found, torch.zeros_like(found))
        share = weights[name] * found
        total = share if total is None else total + share
    assert total is not None
    return total
