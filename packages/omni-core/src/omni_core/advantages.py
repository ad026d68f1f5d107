"""Group-relative advantages: a row's reward against the mean of its group, in input order.

A reward that was not given is not a zero: an unscored row has advantage exactly 0 and is in no mean.
A group that says nothing (all rewards alike up to rounding, or one scored row) has advantage exactly
0 and is counted. Letters: B rows. Sources: Flow-GRPO arXiv 2505.05470 (global standard deviation),
DanceGRPO 2505.07818 (per group).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import attrs
import torch
from torch import Tensor

from omni_core.choices import AdvantageStd as AdvantageStd

ZERO_STD_TOLERANCE = 8 * torch.finfo(torch.float32).eps
"""A group has zero std where std <= this * max |reward|: rewards that differ by float32 rounding
alone (8 units in the last place) are equal, whatever their scale."""


@attrs.frozen(kw_only=True, eq=False)
class GroupAdvantages:
    """Advantages of B rows, with what was left out of them."""

    advantages: Tensor
    """[B], float32 (float64 where the rewards are), on the rewards' device."""
    groups: int
    """Distinct group ids."""
    zero_std_groups: int
    """Groups of two or more scored rows whose rewards are equal up to rounding: advantage 0."""
    single_groups: int
    """Groups left with one scored row: advantage 0."""
    unscored_groups: int
    """Groups left with no scored row: advantage 0."""
    unscored: int
    """Rows without a reward: advantage 0."""
    clipped: int
    """Rows whose |advantage| was above the clip."""
    group_std_mean: float
    """Mean over the groups of two or more scored rows of their rewards' std; 0 without any."""


def group_advantages(
    rewards: Tensor,
    group_ids: Sequence[Hashable],
    *,
    valid: Tensor | None = None,
    std: AdvantageStd = AdvantageStd.GLOBAL,
    ddof: int = 1,
    eps: float = 1e-4,
    clip: float | None = 5.0,
) -> GroupAdvantages:
    """(reward - group mean) / (std + eps), clipped to +-clip; computed in float64.

    A row's advantage has the same bits in every order of the rows.

    Args:
        rewards: [B]; an unscored row's value is not read.
        group_ids: one per row, in any order; ids make groups, not prompt texts.
        valid: bool [B], False where a row was not scored; None means that all were.
        std: what to divide by. VeRL-Omni and the default: global, ddof 1; flow_grpo's code: global,
            ddof 0.
        ddof: subtracted from the count under the std, 0 or 1.
        eps: added to the std.
        clip: bound on |advantage|; None for no bound.

    Raises:
        ValueError: shapes or lengths that differ, no row, a non-finite reward of a scored row, or an
            option out of range.
    """
    rows = _check_rows(rewards, group_ids, valid)
    if ddof not in (0, 1) or not eps >= 0.0 or (clip is not None and not clip > 0.0):
        raise ValueError(f"ddof {ddof} (0 or 1), eps {eps} (>= 0) or clip {clip} (> 0) is wrong")
    std = AdvantageStd.parse(std)
    values: list[float] = rewards.detach().double().tolist()
    members: dict[Hashable, list[int]] = {group: [] for group in group_ids}
    for row in rows:
        members[group_ids[row]].append(row)
    _, global_std = _mean_and_std([values[row] for row in rows], ddof)
    advantages = [0.0] * len(values)
    group_stds: list[float] = []
    zero_std_groups = 0
    for group_rows in members.values():
        if len(group_rows) < 2:
            continue
        group = [values[row] for row in group_rows]
        mean, group_std = _mean_and_std(group, ddof)
        group_stds.append(group_std)
        if group_std <= ZERO_STD_TOLERANCE * max(abs(value) for value in group):
            zero_std_groups += 1
            continue
        divisor = {
            AdvantageStd.GLOBAL: global_std + eps,
            AdvantageStd.GROUP: group_std + eps,
            AdvantageStd.NONE: 1.0,
        }[std]
        for row, value in zip(group_rows, group, strict=True):
            advantages[row] = (value - mean) / divisor
    clipped = 0
    if clip is not None:
        clipped = sum(abs(advantage) > clip for advantage in advantages)
        advantages = [max(-clip, min(clip, advantage)) for advantage in advantages]
    sizes = [len(group_rows) for group_rows in members.values()]
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return GroupAdvantages(
        advantages=torch.tensor(advantages, dtype=dtype, device=rewards.device),
        groups=len(members),
        zero_std_groups=zero_std_groups,
        single_groups=sizes.count(1),
        unscored_groups=sizes.count(0),
        unscored=len(group_ids) - len(rows),
        clipped=clipped,
        group_std_mean=sum(group_stds) / len(group_stds) if group_stds else 0.0,
    )


def _mean_and_std(values: list[float], ddof: int) -> tuple[float, float]:
    """Mean and standard deviation, exactly rounded sums: the same for every order of the values.

    The std is 0 below two values, the mean 0 below one.
    """
    if not values:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - ddof))


def _check_rows(rewards: Tensor, group_ids: Sequence[Hashable], valid: Tensor | None) -> list[int]:
    """The scored rows, in order."""
    if rewards.ndim != 1 or not rewards.numel() or len(group_ids) != rewards.numel():
        raise ValueError(
            f"rewards must be [B] with one group id per row and B > 0, got {tuple(rewards.shape)} "
            f"and {len(group_ids)} ids"
        )
    if valid is None:
        valid = torch.ones_like(rewards, dtype=torch.bool)
    if valid.dtype != torch.bool or valid.shape != rewards.shape:
        raise ValueError(
            f"valid must be bool {tuple(rewards.shape)}, got {valid.dtype} {tuple(valid.shape)}"
        )
    rows = [row for row, scored in enumerate(valid.tolist()) if scored]
    values: list[float] = rewards.tolist()
    for row in rows:
        if not math.isfinite(values[row]):
            raise ValueError(
                f"row {row} (group {group_ids[row]!r}) has reward {values[row]}: a reward is a "
                "finite number, or the row is marked unscored"
            )
    return rows
