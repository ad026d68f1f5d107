"""Windows of stochastic steps: `[start, stop)` inside a schedule, never its last step. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence


def widest_window(num_steps: int) -> str:
    """Name the widest window of a schedule of *num_steps*: all but the last step."""
    return f"[0, {num_steps - 1})"


def window_mistake(window: Sequence[int], *, num_steps: int) -> str | None:
    """Say what is wrong with a window, or None.

    Args:
        window: `(start, stop)`, start included.
        num_steps: Steps of the schedule; the last one (sigma' = 0) is never stochastic.
    """
    if len(window) != 2:
        return f"expected [start, stop], got {list(window)}"
    start, stop = window
    if start < 0 or start >= stop:
        return f"[{start}, {stop}) holds no step; expected 0 <= start < stop <= {num_steps - 1}"
    if stop > num_steps - 1:
        return (
            f"[{start}, {stop}) reaches the last of {num_steps} steps, which is never stochastic; "
            f"the widest window that fits is {widest_window(num_steps)}"
        )
    return None
