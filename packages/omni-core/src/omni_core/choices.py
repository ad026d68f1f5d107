"""The names that choose a formula, apart from torch so that options can hold them.

An unknown name is answered with the known ones. The formulas are in the modules that read them
(reverse_step, kl, advantages), which export these enums too.
"""

from __future__ import annotations

import enum
from typing import Self


class Choice(enum.StrEnum):
    """Base of the enums whose values are written in configs, records and vectors."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The member of that name.

        Raises:
            ValueError: an unknown name; the message lists the known ones.
        """
        return cls(text)

    @classmethod
    def _missing_(cls, value: object) -> None:
        known = ", ".join(member.value for member in cls)
        raise ValueError(f"unknown {cls.__name__} {value!r}; known are: {known}")


class StepKind(Choice):
    """How one reverse step moves; there is no default."""

    SDE = "sde"
    """Flow-SDE: g = eta sqrt(sigma / (1 - min(sigma, sigmas[1])))."""
    CPS = "cps"
    """Coefficient-preserving sampling: s = sigma_next sin(eta pi / 2)."""
    DANCE_SDE = "dance_sde"
    """The mean of Flow-SDE with g = eta."""
    ODE = "ode"
    """The Euler step, which has no density."""


class KLForm(Choice):
    """Which number a KL weight multiplies."""

    EXACT = "exact"
    """mean_D (mu - mu_ref)^2 / (2 s^2)."""
    FLOW_GRPO = "flow_grpo"
    """The exact form times -dt: the Flow-GRPO code divides by g = s / sqrt(-dt)."""


class AdvantageStd(Choice):
    """What the centred rewards are divided by."""

    GLOBAL = "global"
    """The standard deviation of all scored rows."""
    GROUP = "group"
    """The standard deviation of the row's group."""
    NONE = "none"
    """Nothing: the centred reward is the advantage."""
