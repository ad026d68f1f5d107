"""What a recipe may say about DanceGRPO. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import AdvantageStd, StepKind
from omni_core.options import positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class DanceGRPOOptions(FlowGRPOOptions):
    """FlowGRPO's options with DanceGRPO's defaults."""

    title: ClassVar[str] = "dance_grpo"

    kind: StepKind = StepKind.DANCE_SDE
    noise_level: float = attrs.field(default=0.3, validator=positive)
    """eta of the reverse step."""
    std: AdvantageStd = AdvantageStd.GROUP


plugin = Plugin(
    api=1,
    options=DanceGRPOOptions,
    target="omni_core.algorithms.dance_grpo:DanceGRPO",
    summary="clipped policy gradient on steps of constant diffusion, std of each group",
)
