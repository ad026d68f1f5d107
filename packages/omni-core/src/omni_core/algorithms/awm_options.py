"""What a recipe may say about AWM. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import OldPolicyForwardOptions
from omni_core.options import not_negative, positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class AWMOptions(OldPolicyForwardOptions):
    """Advantage Weighted Matching."""

    title: ClassVar[str] = "awm"

    clip_ratio: float = attrs.field(default=1.0, validator=positive)
    """The ratio of surrogate likelihoods is clamped to 1 +- this."""
    kl_coef: float = attrs.field(default=0.003, validator=not_negative)
    """Weight of mean_D (v - v_ref)^2."""
    ema_coef: float = attrs.field(default=1.0, validator=not_negative)
    """Weight of mean_D (v - v_ema)^2; 0 keeps no moving average."""
    ema_decay: float = attrs.field(
        default=0.3, validator=(attrs.validators.ge(0.0), attrs.validators.lt(1.0))
    )
    """The moving average's decay rises to this, by 0.001 an optimizer step."""

    @property
    def other_policies(self) -> tuple[str, ...]:
        """Also the moving average, where it is looked at."""
        return (*super().other_policies, "ema") if self.ema_coef > 0 else super().other_policies


plugin = Plugin(
    api=1,
    options=AWMOptions,
    target="omni_core.algorithms.awm:AWM",
    summary="the pretraining loss, weighted by the advantage",
)
