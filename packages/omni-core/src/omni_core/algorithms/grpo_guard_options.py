"""What a recipe may say about GRPO-Guard. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import PolicyGradientOptions
from omni_core.options import positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class GRPOGuardOptions(PolicyGradientOptions):
    """GRPO-Guard, with a full or a short window."""

    title: ClassVar[str] = "grpo_guard"

    clip_ratio: float = attrs.field(default=1e-4, validator=positive)
    """The guarded ratio is clamped to 1 +- this; its log is s times that of the plain ratio."""

    @property
    def clip(self) -> float:
        """The clip in force."""
        return self.clip_ratio


plugin = Plugin(
    api=1,
    options=GRPOGuardOptions,
    target="omni_core.algorithms.grpo_guard:GRPOGuard",
    summary="clipped policy gradient on a ratio without bias and of one scale at all steps",
)
