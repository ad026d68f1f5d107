"""What a recipe may say about DGPO. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import AdvantageOptions, ForwardOptions, unit_mistakes
from omni_core.options import RunFacts, positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class DGPOOptions(AdvantageOptions, ForwardOptions):
    """Direct Group Preference Optimization. A whole group has to fit into a micro-batch."""

    title: ClassVar[str] = "dgpo"

    beta: float = attrs.field(default=100.0, validator=positive)
    """How sharply a group's weight answers to its order (published: 100)."""

    @property
    def needs_reference(self) -> bool:
        """A group is compared with what the reference makes of it."""
        return True

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """Check also that what is compared fits into a micro-batch."""
        return {
            **unit_mistakes(self.title, facts, rows=facts.samples_per_prompt),
            **super().mistakes(facts),
        }


plugin = Plugin(
    api=1,
    options=DGPOOptions,
    target="omni_core.algorithms.dgpo:DGPO",
    summary="the better part of each group is preferred to the worse part",
)
