"""DiffusionNFT: a good sample pulls the velocity, a bad one pushes it, on the forward process.

With r in [0, 1] how likely a sample is a good one, taken from its advantage,

    r = clip(clip(A, -c, c) / (2 c) + 1/2, 0, 1),  c = 5 (`certain_advantage`),

and two policies implied by the trained one, v+ = b v + (1 - b) v_old and v- = (1 + b) v_old - b v,

    L = c (r L+ + (1 - r) L-) / b + kl_coef mean_D (v - v_ref)^2,
    L+- = mean_D (x0^(v+-) - x0)^2 / w+-,  w+- = max(mean_D |x0^(v+-) - x0|, 1e-5), a constant.

At v = v_old the value does not depend on r, and its gradient is c (2 r - 1) grad L+ at b = 1. Samples
come from the old policy. Source: DiffusionNFT, arXiv 2509.16117, and its official code (b = 1, or 0.1
for OCR and for several rewards; kl_coef = 1e-4).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from omni_core.algorithms.base import OldPolicyAlgorithm
from omni_core.algorithms.diffusion_nft_options import DiffusionNFTOptions
from omni_core.choices import RewardProbability
from omni_core.engine import LossTerms
from omni_core.forward_process import (
    MIN_WEIGHT,
    ForwardLossInputs,
    adaptive_error,
    velocity_error,
)
from omni_core.reverse_step import Latents


@attrs.frozen(kw_only=True, eq=False)
class NFTTerms:
    """What DiffusionNFT is for each row; only `loss` carries a gradient."""

    loss: Tensor
    """[M]: c (r L+ + (1 - r) L-) / b."""
    positive: Tensor
    """[M]: L+."""
    negative: Tensor
    """[M]: L-."""


def reward_probability(
    advantages: Tensor, *, mode: RewardProbability, adv_clip_max: float
) -> Tensor:
    """r of every row, in [0, 1].

    Args:
        advantages: [M].
        mode: What is made of them first.
        adv_clip_max: c > 0: advantages are clipped to +- c, and c counts as certainly good.
    """
    if not adv_clip_max > 0.0:
        raise ValueError(f"adv_clip_max must be above 0, got {adv_clip_max}")
    clipped = advantages.detach().clamp(-adv_clip_max, adv_clip_max)
    match RewardProbability.parse(mode):
        case RewardProbability.CONTINUOUS:
            pass
        case RewardProbability.POSITIVE_ONLY:
            clipped = clipped.clamp_min(0.0)
        case RewardProbability.NEGATIVE_ONLY:
            clipped = clipped.clamp_max(0.0)
        case RewardProbability.ONE_ONLY:
            clipped = (clipped > 0).to(clipped)
        case RewardProbability.BINARY:
            clipped = torch.sign(clipped)
    return (clipped / adv_clip_max / 2.0 + 0.5).clamp(0.0, 1.0)


def nft_terms(
    velocity: Latents,
    old: Latents,
    noised: Latents,
    clean: Latents,
    sigma: Tensor,
    probability: Tensor,
    *,
    beta: float,
    scale: float,
    min_weight: float = MIN_WEIGHT,
) -> NFTTerms:
    """DiffusionNFT's policy loss of M rows.

    Args:
        velocity: modality -> [M, ...], of the trained policy, with graph.
        old: The same of the policy that sampled; a constant.
        noised: x_sigma.
        clean: x0.
        sigma: [M].
        probability: [M], r.
        beta: b > 0, how far the implied policies are from the old one.
        scale: c, the advantage that counts as certainly good.
        min_weight: Smallest adaptive weight.

    Raises:
        ValueError: modalities or shapes that differ, or beta not above 0.
    """
    if not beta > 0.0:
        raise ValueError(f"beta must be above 0, got {beta}")
    constant = {name: value.detach() for name, value in old.items()}
    errors = []
    for sign in (1.0, -1.0):
        implied = {
            name: (1.0 - sign * beta) * constant[name] + sign * beta * value
            for name, value in velocity.items()
        }
        errors.append(adaptive_error(implied, noised, clean, sigma, min_weight=min_weight))
    positive, negative = errors
    loss = scale * (probability * positive + (1.0 - probability) * negative) / beta
    return NFTTerms(loss=loss, positive=positive.detach(), negative=negative.detach())


class DiffusionNFT(OldPolicyAlgorithm):
    """See the module's docstring."""

    options: DiffusionNFTOptions

    def loss(self, inputs: ForwardLossInputs) -> LossTerms:
        """Both implied policies, and the reference."""
        probability = reward_probability(
            inputs.advantages,
            mode=self.options.probability,
            adv_clip_max=self.options.certain_advantage,
        )
        old = self.old(inputs)
        terms = nft_terms(
            inputs.current,
            old,
            inputs.noised,
            inputs.clean,
            inputs.sigma,
            probability,
            beta=self.options.beta,
            scale=self.options.certain_advantage,
        )
        metrics = {
            "policy_loss": terms.loss.detach(),
            "positive_loss": terms.positive,
            "negative_loss": terms.negative,
            "reward_probability": probability,
            "old_deviation": velocity_error(inputs.current, old).detach(),
        }
        return self.finish(inputs, terms.loss, metrics)
