"""MixGRPO: FlowGRPO's loss on a window of stochastic steps that slides down the schedule; the rest is ode.

The window is [l, l + w), the same for all groups of an iteration. It starts at the first step, moves by
`stride` every `interval` iterations, and wraps (or stays at its last place). The interval of a place is

    progressive: T      decay: T (1 - p) + T_min p, p = l / (last place)      exp_decay: T exp(-k max(0, l - l0)),

rounded down (decay) or up (exp_decay), at least 1; `random` draws a place in every iteration. Source:
MixGRPO, arXiv 2507.21802, and its official code (w = 4, stride 1, T = 25, wraps, T_min = T / 4, k = 0.1,
l0 = 13). There the last windows are cut short by the end of the schedule; here every window is whole.
"""

from __future__ import annotations

import random

from omni_core.algorithms.flow_grpo import FlowGRPO
from omni_core.algorithms.mix_grpo_options import MixGRPOOptions
from omni_core.choices import WindowStrategy
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import derive_seed


def window_start(options: MixGRPOOptions, iteration: int, *, low: int, high: int) -> int:
    """l: the first step of the window in an iteration.

    Args:
        options: Strategy, stride, interval and what follows the last place.
        iteration: Trained steps so far.
        low: First place of the window.
        high: Last place of the window.
    """
    if options.strategy is WindowStrategy.RANDOM:
        return random.Random(derive_seed("mix-window", iteration)).randint(low, high)
    places = range(low, high + 1, options.stride)
    intervals = [options.interval_at(place, last=high) for place in places]
    cycle = sum(intervals)
    if iteration >= cycle and not options.wrap:
        return places[-1]
    left = iteration % cycle
    for place, interval in zip(places, intervals, strict=True):
        if left < interval:
            return place
        left -= interval
    raise AssertionError("the intervals add up to the cycle")


class MixGRPO(FlowGRPO):
    """See the module's docstring."""

    options: MixGRPOOptions

    def window(self, schedule: FlowMatchSchedule, *, seed: int, iteration: int) -> tuple[int, ...]:
        """The iteration's window, the same for every group."""
        del seed
        size = self.options.window_size
        low, high = self.options.window_bounds(schedule.num_steps)
        schedule.check_window(low, high, where="algorithm.window_range")
        if size > high - low:
            msg = f"algorithm.window_size: {size} steps do not fit into [{low}, {high})"
            raise ValueError(msg)
        start = window_start(self.options, iteration, low=low, high=high - size)
        return tuple(range(start, start + size))
