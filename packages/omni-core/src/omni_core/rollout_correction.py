"""Weights for steps that another policy sampled than the one that training starts from.

With d = old log-prob - rollout's log-prob of each step, clamped to +-20, a step weighs

    w = min(exp(d), threshold) (`token`), or min(exp(sum of d), threshold) for all steps of a sample,

and is rejected (weight 0, still in the denominator) where a statistic of d leaves a band. Log-probs that
are means over D latent values differ by 1e-5, so `z_k1` measures |d| in units of the noise floor: the
deviation of d that a step shows for unchanged weights, which differs from timestep to timestep.

Decoupled: `old` is recomputed by the trainer before its first update, the loss's ratio starts from it, and
these weights correct the rest. Bypass: the loss's ratio starts from the rollout's log-probs themselves;
then give the trained policy's own as `old` and leave `importance` out, since the ratio has it already.

Letters: B rows, W trained steps of a row. Sources: truncated importance sampling as in VeRL, and its
rejection statistics.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from omni_core.choices import ImportanceLevel, RejectionStatistic
from omni_core.rollout_correction_options import RolloutCorrectionOptions

MAX_LOG_RATIO = 20.0
"""d, and a sum of d, are clamped to +- this."""


@attrs.frozen(kw_only=True, eq=False)
class RolloutWeights:
    """What a rollout's steps count; nothing carries a gradient."""

    weights: Tensor
    """[B, W]: importance weight times whether the step is kept."""
    importance: Tensor
    """[B, W]: 1 without importance weights."""
    kept: Tensor
    """bool [B, W]."""
    log_ratio: Tensor
    """[B, W]: d."""


def rollout_correction(
    options: RolloutCorrectionOptions,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    floor: Tensor | None = None,
) -> RolloutWeights:
    """Weigh and reject the steps of B rows.

    Args:
        options: What is done.
        old_log_probs: [B, W], of the policy that training starts from.
        rollout_log_probs: [B, W], of the policy that sampled.
        floor: [W] or [B, W] > 0, the noise floor of each step's d, for `z_k1`.

    Raises:
        ValueError: shapes that differ, or `z_k1` without a floor above 0.
    """
    if old_log_probs.ndim != 2 or old_log_probs.shape != rollout_log_probs.shape:
        raise ValueError(
            "log-probs must be [B, W] alike, got "
            f"{tuple(old_log_probs.shape)} and {tuple(rollout_log_probs.shape)}"
        )
    ratio = (old_log_probs - rollout_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match options.importance:
        case None:
            importance = torch.ones_like(ratio)
        case ImportanceLevel.TOKEN:
            importance = ratio.exp().clamp_max(options.importance_threshold)
        case ImportanceLevel.SEQUENCE:
            whole = ratio.sum(1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            importance = whole.exp().clamp_max(options.importance_threshold).expand_as(ratio)
    if options.rejection is None:
        kept = torch.ones_like(ratio, dtype=torch.bool)
    else:
        kept = _kept(options.rejection, ratio, (options.low, options.high), floor)
    return RolloutWeights(
        weights=importance * kept, importance=importance, kept=kept, log_ratio=ratio
    )


def _kept(
    statistic: RejectionStatistic, ratio: Tensor, band: tuple[float, float], floor: Tensor | None
) -> Tensor:
    low, high = band
    if statistic is RejectionStatistic.Z_K1:
        if floor is None or not (floor > 0).all():
            raise ValueError("z_k1 needs the noise floor of every step, above 0")
        return ratio.abs() <= high * floor.to(ratio)
    match statistic.estimator:
        case "k1":
            values = -ratio
        case "k2":
            values = 0.5 * ratio.square()
        case _:
            values = ratio.exp() - 1.0 - ratio
    match statistic.over:
        case "seq_sum":
            values = values.sum(1, keepdim=True)
        case "seq_mean":
            values = values.mean(1, keepdim=True)
        case "seq_max":
            values = values.amax(1, keepdim=True)
    if statistic.two_sided:
        kept = (values >= math.log(low)) & (values <= math.log(high))
    else:
        kept = values <= high
    return kept.expand_as(ratio)
