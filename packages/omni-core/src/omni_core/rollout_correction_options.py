"""What chooses a rollout correction, apart from torch so that configs can hold it.

The formulas are in rollout_correction.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from omni_core.choices import ImportanceLevel, RejectionStatistic
from omni_core.options import positive


def _band_of(value: object) -> tuple[float, float]:
    """(lo, hi) of `0.5_2.0`, of a pair, or of hi alone, which means (1 / hi, hi)."""
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
    match numbers:
        case [high]:
            return (1.0 / high if high else 0.0), high
        case [low, high]:
            return low, high
    msg = f"expected `hi` or `lo_hi`, got {value!r}"
    raise ValueError(msg)


@attrs.frozen(kw_only=True)
class RolloutCorrectionOptions:
    """Rows of a rollout whose policy was not quite the one that is trained."""

    importance: ImportanceLevel | None = None
    """None weighs no row."""
    importance_threshold: float = attrs.field(default=2.0, validator=positive)
    """Weights are clipped above at this."""
    rejection: RejectionStatistic | None = None
    """None rejects no row."""
    band: tuple[float, float] = attrs.field(default=(0.5, 2.0), converter=_band_of)
    """`lo_hi`, or `hi` (then lo = 1 / hi). k1 is kept within [log lo, log hi]; k2, k3 and z up to hi.
    Bands of language models (0.5_2.0) never reject mean-reduced log-probs: take `z_k1`, or scale."""

    @band.validator
    def _a_band(self, _: Any, value: tuple[float, float]) -> None:
        low, high = value
        if not (math.isfinite(high) and 0.0 < low < high):
            msg = f"expected 0 < lo < hi, got {low:g} and {high:g}"
            raise ValueError(msg)
