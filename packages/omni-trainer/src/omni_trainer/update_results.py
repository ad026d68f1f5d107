"""What an update did on the ranks, and the metrics that come of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from omni_core.metrics import Moments, merge


@attrs.frozen(kw_only=True)
class UpdateResult:
    """What an update did on one rank."""

    metrics: Mapping[str, Moments]
    """Of this rank's rows, over all optimizer steps."""
    lr: float | None
    """Of the last optimizer step; None if there was none."""
    skipped: int
    """Optimizer steps that a non-finite gradient stopped (the same on all ranks)."""
    weight_version: int
    compile_seconds: float = 0.0
    """Spent compiling since the worker's process began."""
    resident: int = 0
    """Bytes that the rank's process holds."""


def update_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Name what the ranks measured in an update.

    A metric without a value is left out, and so is one that is not finite: `actor/skipped_steps` counts
    the steps that come of it.
    """
    found: dict[str, float] = {}
    for name, moments in merge(result.metrics for result in results).items():
        if not moments.count:
            continue
        found[f"actor/{name}"] = moments.mean
        if name == "ratio":
            found |= {"actor/ratio_min": moments.low, "actor/ratio_max": moments.high}
    found = {name: value for name, value in found.items() if math.isfinite(value)}
    if results[0].lr is not None:
        found["actor/lr"] = results[0].lr
    found["actor/skipped_steps"] = float(results[0].skipped)
    found["actor/weight_version"] = float(results[0].weight_version)
    return found
