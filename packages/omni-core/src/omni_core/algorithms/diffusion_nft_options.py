"""What a recipe may say about DiffusionNFT. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import OldPolicyForwardOptions
from omni_core.choices import OldPolicy, RewardProbability
from omni_core.options import not_negative, positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class DiffusionNFTOptions(OldPolicyForwardOptions):
    """DiffusionNFT: sampled by the old policy, trained on the forward process."""

    title: ClassVar[str] = "diffusion_nft"

    beta: float = attrs.field(default=1.0, validator=positive)
    """How far the implied policies are from the old one (published: 1; 0.1 for OCR)."""
    probability: RewardProbability = RewardProbability.CONTINUOUS
    certain_advantage: float = attrs.field(default=5.0, validator=positive)
    """The advantage that counts as certainly good."""
    kl_coef: float = attrs.field(default=1e-4, validator=not_negative)
    """Weight of mean_D (v - v_ref)^2."""
    old_policy: OldPolicy = OldPolicy.RAMP


plugin = Plugin(
    api=1,
    options=DiffusionNFTOptions,
    target="omni_core.algorithms.diffusion_nft:DiffusionNFT",
    summary="good samples pull the velocity and bad ones push it, on the forward process",
)
