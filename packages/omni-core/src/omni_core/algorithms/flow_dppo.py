"""Flow-DPPO: a step stops learning when its exact KL from the old policy is large, not when its ratio is.

    kl = mean_D (mu - mu_old)^2 / (2 s^2),    r = exp(logp - logp_old),    L = -A r,

but 0 where kl >= delta and the row would move further away: r > 1 and A > 0, or r < 1 and A < 0. Dropped
rows stay in the denominator; advantages are not clipped. The KL is known exactly, since the noise of a
step, and so mu_old = x' - s noise, follows from the sample's seed. Source: Flow-DPPO, arXiv 2606.11025
(delta 1e-5).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from omni_core.algorithms.base import PolicyGradient, required
from omni_core.algorithms.flow_dppo_options import FlowDPPOOptions
from omni_core.choices import KLForm
from omni_core.engine import LossInputs, LossTerms
from omni_core.kl import gaussian_kl
from omni_core.reverse_step import Latents, old_mean


@attrs.frozen(kw_only=True, eq=False)
class DPPOTerms:
    """What Flow-DPPO is for each row; only `loss` carries a gradient."""

    loss: Tensor
    """[M]: -A r, or 0 where it is dropped."""
    log_ratio: Tensor
    """[M]."""
    kl: Tensor
    """[M]: from the old policy."""
    dropped_higher: Tensor
    """bool [M]: dropped with A > 0."""
    dropped_lower: Tensor
    """bool [M]: dropped with A < 0."""
    beyond: Tensor
    """bool [M]: kl >= delta, dropped or not."""

    def row_metrics(self) -> dict[str, Tensor]:
        """[M] values without a gradient."""
        dropped = self.dropped_higher | self.dropped_lower
        return {
            "policy_loss": self.loss.detach(),
            "ratio": self.log_ratio.exp(),
            "approx_kl": -self.log_ratio,
            "kl_old": self.kl,
            "clip_fraction": dropped.float(),
            "clip_fraction_higher": self.dropped_higher.float(),
            "clip_fraction_lower": self.dropped_lower.float(),
        }

    def metrics(self) -> dict[str, Tensor]:
        """Scalars over these rows, under their published names; `ratio_std` with ddof 0."""
        ratio = self.log_ratio.exp()
        dropped = (self.dropped_higher | self.dropped_lower).to(ratio).mean()
        return {
            "ppo_kl": -self.log_ratio.mean(),
            "approx_kl": 0.5 * self.log_ratio.square().mean(),
            "ratio_mean": ratio.mean(),
            "ratio_std": ratio.std(correction=0),
            "ratio_min": ratio.min(),
            "ratio_max": ratio.max(),
            "kl_new_old_mean": self.kl.mean(),
            "kl_new_old_max": self.kl.max(),
            "kl_mask_fraction": self.beyond.to(ratio).mean(),
            "pos_rm_fraction": self.dropped_higher.to(ratio).mean(),
            "neg_rm_fraction": self.dropped_lower.to(ratio).mean(),
            "masked_fraction": dropped,
            "unmasked_fraction": 1.0 - dropped,
        }


def dppo_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kl: Tensor,
    *,
    max_kl: float,
) -> DPPOTerms:
    """Flow-DPPO's loss of M rows.

    Args:
        log_probs: [M], with graph.
        old_log_probs: [M], of the policy that sampled.
        advantages: [M].
        kl: [M], from the old policy; a constant.
        max_kl: delta > 0.

    Raises:
        ValueError: shapes that differ, or delta not above 0.
    """
    shapes = {tuple(v.shape) for v in (log_probs, old_log_probs, advantages, kl)}
    if len(shapes) != 1 or log_probs.ndim != 1 or not max_kl > 0.0:
        raise ValueError(f"all must be [M] alike, got {sorted(shapes)}; max_kl {max_kl} above 0")
    advantages, kl = advantages.detach(), kl.detach()
    log_ratio = log_probs - old_log_probs.detach()
    ratio = log_ratio.exp()
    beyond = kl >= max_kl
    higher = beyond & (ratio > 1.0) & (advantages > 0.0)
    lower = beyond & (ratio < 1.0) & (advantages < 0.0)
    return DPPOTerms(
        loss=torch.where(higher | lower, 0.0, -advantages * ratio),
        log_ratio=log_ratio.detach(),
        kl=kl,
        dropped_higher=higher,
        dropped_lower=lower,
        beyond=beyond,
    )


def old_kl(mean: Latents, old: Latents, std: Tensor) -> Tensor:
    """KL of a step from the policy that drew it, per latent value: [M]."""
    return gaussian_kl(mean, old, std, form=KLForm.EXACT)


class FlowDPPO(PolicyGradient):
    """See the module's docstring."""

    options: FlowDPPOOptions

    @property
    def needs_noise(self) -> bool:
        """The old mean is made of it."""
        return True

    def loss(self, inputs: LossInputs) -> LossTerms:
        """Drop what moves away from too far."""
        noise = required(inputs.noise, "the noise of the rollout's steps")
        current = inputs.current
        terms = dppo_terms(
            current.require_log_prob(),
            inputs.old_log_probs,
            inputs.advantages,
            old_kl(current.mean, old_mean(current, noise), current.std),
            max_kl=self.options.max_kl,
        )
        return self.finish(inputs, terms.loss, terms.row_metrics())
