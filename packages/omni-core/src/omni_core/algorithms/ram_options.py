"""What a recipe may say about RAM. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import OldPolicyForwardOptions
from omni_core.options import positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class RAMOptions(OldPolicyForwardOptions):
    """Reinforce Adjoint Matching."""

    title: ClassVar[str] = "ram"

    strength: float = attrs.field(default=1.0, validator=positive)
    """How far an advantage of 1 moves the target from the reference."""

    @property
    def needs_reference(self) -> bool:
        """The target is built around it."""
        return True


plugin = Plugin(
    api=1,
    options=RAMOptions,
    target="omni_core.algorithms.ram:RAM",
    summary="the pretraining target, corrected by the reward around the reference",
)
