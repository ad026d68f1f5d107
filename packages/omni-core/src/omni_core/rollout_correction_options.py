"""What chooses a rollout correction, apart from torch so that configs can hold it.

The formulas are in rollout_correction.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from omni_core.choices import ImportanceLevel, RejectionStatistic
from omni_core.options import positive


@attrs.frozen(kw_only=True)
class RolloutCorrectionOptions:
    """Rows of a rollout whose policy was not quite the one that is trained."""

    importance: ImportanceLevel | None = None
    """None weighs no row."""
    importance_threshold: float = attrs.field(default=2.0, validator=positive)
    """Weights are clipped above at this."""
    rejection: RejectionStatistic | None = None
    """None rejects no row."""
    band: tuple[float, ...] = attrs.field(default=(0.5, 2.0))
    """`[lo, hi]`, or `[hi]`. k1 is kept within [log lo, log hi] (lo is 1 / hi if not given); k2, k3 and z up
    to hi. The band of language models, [0.5, 2], never rejects mean-reduced log-probs: take `z_k1`, or
    a band on the scale of the noise floor."""

    bypass: bool = False
    """Old log-probs stay the rollout's own, so that the loss's ratio corrects by itself and steps are only
    rejected. Else (decoupled) they are those of the policy that training starts from."""

    @property
    def low(self) -> float:
        """lo."""
        return self.band[0] if len(self.band) == 2 else 1.0 / self.band[0]

    @property
    def high(self) -> float:
        """hi."""
        return self.band[-1]

    @band.validator
    def _one_or_two(self, _: Any, value: tuple[float, ...]) -> None:
        if len(value) not in (1, 2) or not all(0.0 < number < math.inf for number in value):
            msg = f"expected [hi] or [lo, hi], above 0, got {list(value)}"
            raise ValueError(msg)

    def __attrs_post_init__(self) -> None:
        if self.bypass and self.importance is not None:
            msg = "bypass: the ratio is to the rollout's policy, so importance weights would count twice"
            raise ValueError(msg)
        two_sided = self.rejection is not None and self.rejection.two_sided
        if (two_sided or len(self.band) == 2) and not self.low < self.high:
            msg = f"band: expected lo < hi, got {self.low:g} and {self.high:g}"
            raise ValueError(msg)
