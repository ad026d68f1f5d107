"""Metrics are moments until they are logged, so that they add up over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import attrs
from torch import Tensor


@attrs.frozen
class Moments:
    """Count, sums and extremes of a set of numbers."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    """Sum of squared differences from the mean."""
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Moments:
        """Take the moments of a tensor [M], or of the entries where *mask* [M] is true."""
        kept = values.detach().double()
        kept = (kept if mask is None else kept[mask.to(kept.device)]).flatten().cpu()
        if kept.numel() == 0:
            return cls()
        centred = kept - kept.mean()
        return cls(
            float(kept.numel()),
            float(kept.sum()),
            float((centred * centred).sum()),
            float(kept.min()),
            float(kept.max()),
        )

    def __add__(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        return Moments(
            count,
            self.total + other.total,
            squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float:
        """Arithmetic mean; NaN of nothing."""
        return self.total / self.count if self.count else math.nan

    def std(self, ddof: int = 1) -> float:
        """Standard deviation; NaN of too few."""
        return math.sqrt(self.squares / (self.count - ddof)) if self.count > ddof else math.nan


def merge(parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """Add up the same metric of several micro-batches or ranks."""
    total: dict[str, Moments] = {}
    for part in parts:
        for name, moments in part.items():
            total[name] = total.get(name, Moments()) + moments
    return total


def mean_by_name(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Average each number over the parts that have it."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
