"""What chooses a rollout correction, apart from torch so that configs can hold it.

The formulas are in rollout_correction.
"""

from __future__ import annotations

import math

import attrs

from omni_core.choices import ImportanceLevel, RejectionStatistic
from omni_core.options import positive


def _band_of(value: object) -> tuple[float, ...]:
    """`0.5_2.0`, a pair or one number, as numbers."""
    if isinstance(value, str):
        parts = value.split("_")
    elif isinstance(value, int | float):
        parts = [str(value)]
    elif isinstance(value, tuple | list):
        parts = [str(part) for part in value]
    else:
        parts = []
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0.0 < n < math.inf for n in numbers):
        msg = f"expected `hi` or `lo_hi`, above 0, got {value!r}"
        raise ValueError(msg)
    return tuple(numbers)


@attrs.frozen(kw_only=True)
class RolloutCorrectionOptions:
    """Rows of a rollout whose policy was not quite the one that is trained."""

    importance: ImportanceLevel | None = None
    """None weighs no row."""
    importance_threshold: float = attrs.field(default=2.0, validator=positive)
    """Weights are clipped above at this."""
    rejection: RejectionStatistic | None = None
    """None rejects no row."""
    band: tuple[float, ...] = attrs.field(default=(0.5, 2.0), converter=_band_of)
    """`lo_hi`, or `hi`. k1 is kept within [log lo, log hi] (lo is 1 / hi if not given); k2, k3 and z up
    to hi. The band of language models, 0.5_2.0, never rejects mean-reduced log-probs: take `z_k1`, or
    a band on the scale of the noise floor."""

    @property
    def low(self) -> float:
        """lo."""
        return self.band[0] if len(self.band) == 2 else 1.0 / self.band[0]

    @property
    def high(self) -> float:
        """hi."""
        return self.band[-1]

    def __attrs_post_init__(self) -> None:
        two_sided = self.rejection is not None and self.rejection.two_sided
        if (two_sided or len(self.band) == 2) and not self.low < self.high:
            msg = f"band: expected lo < hi, got {self.low:g} and {self.high:g}"
            raise ValueError(msg)
