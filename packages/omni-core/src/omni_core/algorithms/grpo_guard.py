"""GRPO-Guard: a ratio without bias and of one scale at all steps, so that its clip works at all of them.

On the true densities of a step, each row by itself,

    log r = s [(logp - logp_old) + mean_D (mu - mu_old)^2 / (2 s^2)] = mean_D noise (mu - mu_old),
    L = max(-A r, -A clip(r, 1 - c, 1 + c)) / (-dt),

with s the deviation of the step's own kind. The first form takes log-probs and means as published codes
have them; the second is the same number without its cancellation, and what this algorithm computes:
mu_old is x' - s noise, and the noise follows from the samples' seeds. Source: GRPO-Guard, arXiv
2510.22319. One published script takes the mean of s over its batch, so that a row's ratio depends on its
neighbours; here it does not.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from omni_core.algorithms.base import PolicyGradient, required
from omni_core.algorithms.grpo_guard_options import GRPOGuardOptions
from omni_core.choices import KLForm
from omni_core.engine import LossInputs, LossTerms
from omni_core.kl import gaussian_kl, squared_differences
from omni_core.policy_loss import SurrogateTerms, clipped_surrogate
from omni_core.reverse_step import Latents, old_mean
from omni_core.row_mean import row_mean


def guard_log_ratio(
    log_density: Tensor,
    old_log_density: Tensor,
    mean: Latents,
    old_mean: Latents,
    std: Tensor,
) -> Tensor:
    """log r of M rows from log-densities and means.

    Args:
        log_density: [M], `ReverseStep.log_density` of the trained policy (not the ratio form of `cps`).
        old_log_density: [M], of the policy that sampled; a constant.
        mean: modality -> [M, ...], of the trained policy.
        old_mean: The same of the policy that sampled; a constant.
        std: [M], s.

    Returns:
        [M], differentiable in the trained policy's log-density and mean.
    """
    old = {name: value.detach() for name, value in old_mean.items()}
    bias = gaussian_kl(mean, old, std, form=KLForm.EXACT)
    return std * (log_density - old_log_density.detach() + bias)


def noise_log_ratio(mean: Latents, old_mean: Latents, noise: Latents) -> Tensor:
    """log r of M rows from the noise that they were drawn with: mean_D noise (mu - mu_old).

    Args:
        mean: modality -> [M, ...], of the trained policy.
        old_mean: The same of the policy that sampled; a constant.
        noise: The same, standard normal.

    Returns:
        [M], differentiable in the trained policy's mean.
    """
    return row_mean(
        {
            name: noise[name].to(value) * (value - old_mean[name].detach())
            for name, value in mean.items()
        }
    )


def guard_terms(
    log_ratio: Tensor,
    advantages: Tensor,
    dt: Tensor,
    *,
    clip_ratio: float,
    adv_clip_max: float | None,
) -> SurrogateTerms:
    """GRPO-Guard's loss of M rows: PPO's clip of exp(log r), divided by -dt.

    Args:
        log_ratio: [M], with graph.
        advantages: [M].
        dt: [M], sigma' - sigma < 0.
        clip_ratio: c > 0.
        adv_clip_max: Advantages are clipped to +- this; None for no clip.
    """
    terms = clipped_surrogate(
        log_ratio,
        torch.zeros_like(log_ratio),
        advantages,
        clip_ratio=clip_ratio,
        adv_clip_max=adv_clip_max,
    )
    return attrs.evolve(terms, loss=terms.loss / -dt.to(terms.loss))


class GRPOGuard(PolicyGradient):
    """See the module's docstring."""

    options: GRPOGuardOptions

    @property
    def needs_noise(self) -> bool:
        """The old mean and the ratio are made of it."""
        return True

    def loss(self, inputs: LossInputs) -> LossTerms:
        """Clipped surrogate of the guarded ratio."""
        noise = required(inputs.noise, "the noise of the rollout's steps")
        old = old_mean(inputs.current, noise)
        terms = guard_terms(
            noise_log_ratio(inputs.current.mean, old, noise),
            inputs.advantages,
            inputs.dt,
            clip_ratio=self.options.clip,
            adv_clip_max=self.options.adv_clip,
        )
        moved = row_mean(squared_differences(inputs.current.mean, old)).detach()
        metrics = {**terms.row_metrics(), "mean_shift": moved.sqrt()}
        return self.finish(inputs, terms.loss, metrics)
