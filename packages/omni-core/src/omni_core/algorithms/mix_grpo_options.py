"""What a recipe may say about MixGRPO. Imports no torch."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import WindowStrategy
from omni_core.options import not_negative, optional_positive, positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class MixGRPOOptions(FlowGRPOOptions):
    """FlowGRPO on a sliding window."""

    title: ClassVar[str] = "mix_grpo"

    window_size: int = attrs.field(default=4, validator=positive)
    """w: stochastic and trained steps."""
    window_range: tuple[int, ...] | None = None
    """`[first, stop]` that the window slides over; None is the whole schedule but its last step."""
    strategy: WindowStrategy = WindowStrategy.PROGRESSIVE
    stride: int = attrs.field(default=1, validator=positive)
    """Steps that the window moves by."""
    interval: int = attrs.field(default=25, validator=positive)
    """Iterations that it stays."""
    wrap: bool = True
    """Start again after the last place; else stay there."""
    min_interval: int | None = attrs.field(default=None, validator=optional_positive)
    """Of `decay`: the interval at the last place; None is a quarter of `interval`."""
    decay_rate: float = attrs.field(default=0.1, validator=not_negative)
    """Of `exp_decay`: k."""
    decay_from: int = attrs.field(default=13, validator=not_negative)
    """Of `exp_decay`: the place after which the interval falls."""

    def window_bounds(self, num_steps: int) -> tuple[int, int]:
        """`[first, stop)`: what the window slides over."""
        if self.window_range is None:
            return 0, num_steps - 1
        first, stop = self.window_range
        return first, stop

    def interval_at(self, place: int, *, last: int) -> int:
        """Iterations that the window stays at *place*, where *last* is its last place."""
        match self.strategy:
            case WindowStrategy.DECAY:
                lowest = self.min_interval or max(self.interval // 4, 1)
                progress = place / last if last else 0.0
                return max(lowest, math.floor(self.interval * (1.0 - progress) + lowest * progress))
            case WindowStrategy.EXP_DECAY:
                past = max(0, place - self.decay_from)
                return max(1, math.ceil(self.interval * math.exp(-self.decay_rate * past)))
            case WindowStrategy.PROGRESSIVE | WindowStrategy.RANDOM:
                return self.interval


plugin = Plugin(
    api=1,
    options=MixGRPOOptions,
    target="omni_core.algorithms.mix_grpo:MixGRPO",
    summary="clipped policy gradient on a window that slides over the schedule, ode outside",
)
