"""The clipped policy-gradient surrogate, one term per row, so that the caller owns the denominator.

Terms are not averaged here: a loss is their sum over the global number of rows, whatever
micro-batches and ranks they were cut into. Letters: M rows (a sample at a step). Source: PPO arXiv
1707.06347, on log-probs that are means over the latent values as in Flow-GRPO (arXiv 2505.05470).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class SurrogateTerms:
    """What the surrogate is for each row; only `loss` carries a gradient."""

    loss: Tensor
    """[M]: weight * max(-A r, -A clip(r, 1 - eps, 1 + eps)); the loss is its mean over all rows."""
    log_ratio: Tensor
    """[M]: log-prob minus old log-prob."""
    ratio: Tensor
    """[M]: r = exp(log_ratio)."""
    clipped_higher: Tensor
    """bool [M]: r above 1 + eps."""
    clipped_lower: Tensor
    """bool [M]: r below 1 - eps."""

    def row_metrics(self) -> dict[str, Tensor]:
        """[M] values without a gradient: `policy_loss`, `ratio`, `approx_kl` = old - new, and whether
        the ratio is outside its clip: `clip_fraction` (`_higher`, `_lower`)."""
        return {
            "policy_loss": self.loss.detach(),
            "ratio": self.ratio,
            "clip_fraction": (self.clipped_higher | self.clipped_lower).float(),
            "clip_fraction_higher": self.clipped_higher.float(),
            "clip_fraction_lower": self.clipped_lower.float(),
            "approx_kl": -self.log_ratio,
        }

    def metrics(self) -> dict[str, Tensor]:
        """Scalars over these rows (weights play no part): `ppo_kl` = mean(old - new), the clipped
        shares `pg_clipfrac` (`_higher`, `_lower`), `ratio_mean`, and `ratio_std` with ddof 1 (0 for
        one row)."""
        one_row = self.ratio.numel() < 2
        return {
            "ppo_kl": -self.log_ratio.mean(),
            "pg_clipfrac": (self.clipped_higher | self.clipped_lower).to(self.ratio).mean(),
            "pg_clipfrac_higher": self.clipped_higher.to(self.ratio).mean(),
            "pg_clipfrac_lower": self.clipped_lower.to(self.ratio).mean(),
            "ratio_mean": self.ratio.mean(),
            "ratio_std": self.ratio.new_zeros(()) if one_row else self.ratio.std(correction=1),
        }


def clipped_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio: float,
    adv_clip_max: float | None,
    weights: Tensor | None = None,
) -> SurrogateTerms:
    """PPO's clipped surrogate of M rows.

    Args:
        log_probs: [M], differentiable; the ratio form of `ReverseStep.log_prob`.
        old_log_probs: [M], of the policy that sampled.
        advantages: [M].
        clip_ratio: eps > 0; published values belong to mean-reduced log-probs (1e-4 full window, 1e-5
            short windows).
        adv_clip_max: advantages are clipped to +- this; None for no clip.
        weights: [M], multiplied after the maximum and before the mean (rollout correction); a row of
            weight 0 stays in the denominator.

    Raises:
        ValueError: shapes that differ, or an option out of range.
    """
    given = {"old_log_probs": old_log_probs, "advantages": advantages, "weights": weights}
    for name, value in given.items():
        if log_probs.ndim != 1 or (value is not None and value.shape != log_probs.shape):
            got = None if value is None else tuple(value.shape)
            raise ValueError(
                f"log_probs and {name} must be [M] alike, got {tuple(log_probs.shape)} and {got}"
            )
    if not clip_ratio > 0.0 or (adv_clip_max is not None and not adv_clip_max > 0.0):
        raise ValueError(f"clip_ratio {clip_ratio} and adv_clip_max {adv_clip_max} must be above 0")
    advantages = advantages.detach()
    if adv_clip_max is not None:
        advantages = advantages.clamp(-adv_clip_max, adv_clip_max)
    log_ratio = log_probs - old_log_probs.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if weights is not None:
        loss = loss * weights.detach()
    ratio = ratio.detach()
    return SurrogateTerms(
        loss=loss,
        log_ratio=log_ratio.detach(),
        ratio=ratio,
        clipped_higher=ratio > 1.0 + clip_ratio,
        clipped_lower=ratio < 1.0 - clip_ratio,
    )
