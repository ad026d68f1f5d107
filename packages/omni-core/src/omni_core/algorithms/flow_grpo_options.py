"""What a recipe may say about FlowGRPO. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import PolicyGradientOptions
from omni_core.choices import StepKind
from omni_core.options import optional_positive
from omni_core.plugins import Plugin

SHORT_CLIP = 1e-5
FULL_CLIP = 1e-4


@attrs.frozen(kw_only=True)
class FlowGRPOOptions(PolicyGradientOptions):
    """FlowGRPO, with a full or a short window (Flow-GRPO-Fast)."""

    title: ClassVar[str] = "flow_grpo"

    clip_ratio: float | None = attrs.field(default=None, validator=optional_positive)
    """The ratio is clamped to 1 +- this; None is 1e-4, or 1e-5 for short windows and cps."""

    @property
    def clip(self) -> float:
        """The clip in force."""
        if self.clip_ratio is not None:
            return self.clip_ratio
        short = self.window_size is not None or self.kind is StepKind.CPS
        return SHORT_CLIP if short else FULL_CLIP


plugin = Plugin(
    api=1,
    options=FlowGRPOOptions,
    target="omni_core.algorithms.flow_grpo:FlowGRPO",
    summary="clipped policy gradient on stochastic denoising steps, full or short windows",
)
