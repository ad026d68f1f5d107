"""Means with intervals by the bootstrap over prompts: prompts are what was drawn, samples of one are not.

Percentile bootstrap (Efron, 1979): prompts are drawn with replacement and the mean is taken anew, many
times; the interval holds the middle of those means. A difference is paired: both sides of one prompt are
drawn together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 2_000_000
"""Values drawn at once: bounds the memory."""


@attrs.frozen(kw_only=True)
class Interval:
    """A mean and the interval that holds it at the asked level."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    values: Sequence[float], *, seed: int = 0, samples: int = 10_000, level: float = 0.95
) -> Interval:
    """Take the mean over prompts.

    Args:
        values: One finite number for each prompt: the mean of its samples.
        seed: Of the draws.
        samples: Draws.
        level: Share of the means that the interval holds.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    data: NDArray[np.float64] = np.asarray(values, np.float64)
    if data.ndim != 1 or not len(data):
        msg = f"an interval needs one value for each of some prompts, got shape {data.shape}"
        raise ValueError(msg)
    if not np.isfinite(data).all():
        msg = f"an interval needs finite values, got {int((~np.isfinite(data)).sum())} that are not"
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    step = max(1, _AT_ONCE // len(data))
    means = [
        data[rng.integers(len(data), size=(min(step, samples - start), len(data)))].mean(axis=1)
        for start in range(0, samples, step)
    ]
    return _interval(float(data.mean()), np.concatenate(means), level)


def bootstrap_statistic(
    statistic: Callable[[NDArray[np.int64]], float],
    count: int,
    *,
    seed: int = 0,
    samples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Take a statistic that is no mean over prompts, a ratio of two for instance.

    Args:
        statistic: What it is over the prompts of these places, int64 [count], some of them repeated.
        count: Prompts.
        seed: Of the draws.
        samples: Draws.
        level: Share of the draws that the interval holds.

    Raises:
        ValueError: no prompt, or a draw whose statistic is not finite.
    """
    if count < 1:
        msg = "an interval needs some prompts, got 0"
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    found = np.asarray([statistic(rng.integers(count, size=count)) for _ in range(samples)])
    if not np.isfinite(found).all():
        msg = f"{int((~np.isfinite(found)).sum())} of {samples} draws have no finite value"
        raise ValueError(msg)
    return _interval(float(statistic(np.arange(count))), found, level)


def _interval(value: float, drawn: NDArray[np.float64], level: float) -> Interval:
    """Put the middle of what was *drawn* around a value."""
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(mean=value, low=float(low), high=float(high))


def paired_bootstrap(
    before: Sequence[float],
    after: Sequence[float],
    *,
    seed: int = 0,
    samples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Take the mean of *after* - *before*, prompt by prompt; arguments as for `bootstrap`.

    Raises:
        ValueError: the two differ in length.
    """
    if len(before) != len(after):
        msg = f"pairs need two values for each prompt, got {len(before)} before and {len(after)} after"
        raise ValueError(msg)
    change = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    return bootstrap(change.tolist(), seed=seed, samples=samples, level=level)
