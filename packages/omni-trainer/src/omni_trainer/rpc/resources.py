"""What a run asks of a cluster is held against what is there, before any worker starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs


class ResourceError(RuntimeError):
    """The devices that a run asks for are not there; the message is a table of both."""


@attrs.frozen(kw_only=True)
class Demand:
    """What one role asks for."""

    role: str
    count: int
    """Workers."""
    each: Mapping[str, float]
    """Ray resource -> amount for one worker."""


def totals(demands: Sequence[Demand]) -> dict[str, float]:
    """Add up what all roles ask for."""
    found: dict[str, float] = {}
    for demand in demands:
        for name, amount in demand.each.items():
            found[name] = found.get(name, 0.0) + demand.count * amount
    return {name: amount for name, amount in found.items() if amount > 0}


def wait_for_resources(
    demands: Sequence[Demand],
    available: Callable[[], Mapping[str, float]],
    *,
    timeout: float,
    can_grow: bool,
    interval: float = 0.5,
) -> None:
    """Return once everything that is asked for is free.

    Args:
        demands: Of every role.
        available: Asks the cluster what is free now.
        timeout: Seconds to wait for it.
        can_grow: Whether waiting can help; False answers at once.
        interval: Seconds between looks.

    Raises:
        ResourceError: it is not; shows what is wanted and what is available.
    """
    started = time.monotonic()
    while True:
        free = available()
        short = [name for name, amount in totals(demands).items() if free.get(name, 0.0) < amount]
        if not short:
            return
        waited = time.monotonic() - started
        if not can_grow or waited >= timeout:
            raise ResourceError(table(demands, free, waited=waited))
        time.sleep(min(interval, timeout))


def table(demands: Sequence[Demand], free: Mapping[str, float], *, waited: float) -> str:
    """Write what every role asks for beside what is free."""
    lines = [
        f"the cluster has not what this run asks for (waited {waited:.0f} s)",
        f"  {'role':<10}{'workers':>8}  each",
    ]
    for demand in demands:
        each = ", ".join(f"{name} {amount:g}" for name, amount in demand.each.items()) or "-"
        lines.append(f"  {demand.role:<10}{demand.count:>8}  {each}")
    lines.append(f"  {'resource':<10}{'wanted':>8}{'available':>12}")
    for name, amount in totals(demands).items():
        have = free.get(name, 0.0)
        mark = "  <- short" if have < amount else ""
        lines.append(f"  {name:<10}{amount:>8g}{have:>12g}{mark}")
    return "\n".join(lines)
