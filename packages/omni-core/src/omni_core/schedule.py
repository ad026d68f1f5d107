"""A schedule is one float32 sequence of sigmas, strictly decreasing, built once and sent as data.

Steps are addressed by their integer index, never by a float timestep: a look-up of a float among
timesteps picks the wrong row as soon as two of them round alike. Letters: T steps, so T+1 sigmas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

NUM_TRAIN_TIMESTEPS = 1000
"""What sigma 1 is called in timesteps: models of this family are conditioned on sigma * 1000."""


def _own_sigmas(sigmas: Tensor) -> Tensor:
    """A copy on the CPU that nobody else holds, without negative zeros."""
    return sigmas.detach().cpu() + 0.0


@attrs.frozen(eq=False)
class FlowMatchSchedule:
    """Sigmas of a flow-matching sampler, from noise (1) to data (0).

    Equality is asked with `difference`, which compares bit for bit and explains.

    Raises:
        ValueError: sigmas are not float32 [T+1] with T >= 1, not finite, outside [0, 1], or not
            strictly decreasing (the message names the index and both values). Equal neighbours are
            refused and never merged: a merged schedule has other steps than the one that was sent.
    """

    sigmas: Tensor = attrs.field(converter=_own_sigmas)
    """float32 [T+1] on the CPU, strictly decreasing; the last may be 0."""

    def __attrs_post_init__(self) -> None:
        """Check the sigmas; every message names the first value that is wrong."""
        if self.sigmas.dtype != torch.float32:
            raise ValueError(f"sigmas must be float32, got {self.sigmas.dtype}")
        if self.sigmas.ndim != 1 or self.sigmas.numel() < 2:
            raise ValueError(
                "sigmas must be one axis of at least 2 values (one step), "
                f"got shape {tuple(self.sigmas.shape)}"
            )
        values = self.values()
        for index, value in enumerate(values):
            if not math.isfinite(value) or not 0.0 <= value <= 1.0:
                raise ValueError(f"sigmas[{index}] = {value} is not within [0, 1]")
        for index, (high, low) in enumerate(itertools.pairwise(values)):
            if not high > low:
                raise ValueError(
                    f"sigmas are not strictly decreasing: sigmas[{index}] = {high:.9g} and "
                    f"sigmas[{index + 1}] = {low:.9g}"
                )

    @classmethod
    def from_values(cls, values: Sequence[float]) -> FlowMatchSchedule:
        """Build from T+1 floats, each rounded to float32 (the inverse of `values`)."""
        return cls(torch.tensor([float(value) for value in values], dtype=torch.float32))

    @classmethod
    def linear(cls, num_steps: int, *, shift: float = 1.0) -> FlowMatchSchedule:
        """Even sigmas from 1 to 0, shifted once: shift * s / (1 + (shift - 1) * s).

        Raises:
            ValueError: `num_steps` is below 1 or `shift` is not a positive number.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        if not (math.isfinite(shift) and shift > 0.0):
            raise ValueError(f"shift must be a positive number, got {shift}")
        even = [(num_steps - index) / num_steps for index in range(num_steps + 1)]
        return cls.from_values([shift * s / (1.0 + (shift - 1.0) * s) for s in even])

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return int(self.sigmas.numel()) - 1

    @property
    def timesteps(self) -> Tensor:
        """float32 [T]: sigma * 1000 of every step's start, scaled in float32 (cast after, never before)."""
        return self.sigmas[:-1] * float(NUM_TRAIN_TIMESTEPS)

    @property
    def sigma_guard(self) -> Tensor:
        """float32 scalar sigmas[1]: the largest sigma that 1 - sigma is divided by (see reverse_step)."""
        return self.sigmas[1]

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Sigma before and after each step of `index`.

        Args:
            index: int64 [...], steps in [0, T). Keep it on the CPU: it is checked, and one on
                another device is copied here first, which waits for that device.

        Returns:
            (sigma, sigma_next), float32 [...] on the CPU.

        Raises:
            TypeError: `index` is not int64.
            IndexError: a step outside [0, T); negative ones do not count from the end.
        """
        if index.dtype != torch.int64:
            raise TypeError(f"steps are addressed by int64 indices, got {index.dtype}")
        index = index.cpu()
        outside = index[(index < 0) | (index >= self.num_steps)]
        if outside.numel():
            raise IndexError(
                f"step {int(outside[0])} is outside [0, {self.num_steps}) of this schedule"
            )
        return self.sigmas[index], self.sigmas[index + 1]

    def values(self) -> tuple[float, ...]:
        """The T+1 sigmas as Python floats that are exactly the float32 values: what travels."""
        return tuple(float(value) for value in self.sigmas.tolist())

    def difference(self, other: FlowMatchSchedule) -> str | None:
        """None if both are bit-equal, else a table of both schedules with the differing rows marked."""
        if torch.equal(self.sigmas, other.sigmas):
            return None
        lines = [
            f"schedules differ: {self.num_steps} steps and {other.num_steps} steps",
            f"  {'index':>5}  {'this':>14}  {'other':>14}",
        ]
        pairs = itertools.zip_longest(self.values(), other.values())
        for index, (mine, theirs) in enumerate(pairs):
            cells = ["-" if value is None else f"{value:.9g}" for value in (mine, theirs)]
            mark = "" if mine == theirs else "  <-"
            lines.append(f"  {index:>5}  {cells[0]:>14}  {cells[1]:>14}{mark}")
        return "\n".join(lines)

    def check_window(self, start: int, stop: int, *, where: str) -> None:
        """Check that the steps [start, stop) exist and may be stochastic.

        A step that ends at sigma 0 has no density to score, so it is never in a window.

        Args:
            start: first step of the window.
            stop: one past its last step.
            where: the config path that a message names, such as `algorithm.window`.

        Raises:
            ValueError: an empty, reversed or out-of-range window, or one with the last step; the
                message gives the widest window that fits.
        """
        widest = self.num_steps - (1 if self.values()[-1] == 0.0 else 0)
        if 0 <= start < stop <= widest:
            return
        if start >= stop:
            reason = "is empty: its start must be below its stop"
        elif start < 0 or stop > self.num_steps:
            reason = f"leaves the {self.num_steps} steps of the schedule"
        else:
            reason = (
                f"includes step {self.num_steps - 1}, the last of {self.num_steps}, which ends at "
                "sigma 0 and is never stochastic"
            )
        fits = f"the widest that fits is [0, {widest})" if widest else "no window fits"
        raise ValueError(f"{where}: window [{start}, {stop}) {reason}; {fits}")
