"""What a recipe may say about online Diffusion-DPO. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import ForwardOptions, unit_mistakes
from omni_core.options import RunFacts, positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class DiffusionDPOOptions(ForwardOptions):
    """Diffusion-DPO on the best and the worst sample of each prompt."""

    title: ClassVar[str] = "diffusion_dpo"

    beta: float = attrs.field(default=100.0, validator=positive)
    """How sharply a preference is learned (published: 5000 and 2000 on data sets, about 100 online)."""

    @property
    def needs_reference(self) -> bool:
        """A pair is compared with what the reference makes of it."""
        return True

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """Check also that what is compared fits into a micro-batch."""
        return {
            **unit_mistakes(self.title, facts, rows=2),
            **super().mistakes(facts),
        }


plugin = Plugin(
    api=1,
    options=DiffusionDPOOptions,
    target="omni_core.algorithms.diffusion_dpo:DiffusionDPO",
    summary="the best sample of each prompt is preferred to the worst",
)
