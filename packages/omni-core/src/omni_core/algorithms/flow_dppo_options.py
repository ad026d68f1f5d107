"""What a recipe may say about Flow-DPPO. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import PolicyGradientOptions
from omni_core.options import optional_positive, positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class FlowDPPOOptions(PolicyGradientOptions):
    """Flow-DPPO, with a full or a short window."""

    title: ClassVar[str] = "flow_dppo"
    clip_key: ClassVar[str] = "max_kl"

    max_kl: float = attrs.field(default=1e-5, validator=positive)
    """delta: a step that is this far from the old policy learns nothing that moves it further."""
    adv_clip: float | None = attrs.field(default=None, validator=optional_positive)
    """Bound on |advantage|; None (published) for no bound."""

    @property
    def clip(self) -> float:
        """Log-ratios of the size of the KL decide what is dropped."""
        return self.max_kl


plugin = Plugin(
    api=1,
    options=FlowDPPOOptions,
    target="omni_core.algorithms.flow_dppo:FlowDPPO",
    summary="policy gradient whose steps stop at an exact KL from the old policy",
)
