"""The names that choose a formula, apart from torch so that options can hold them.

An unknown name is answered with the known ones. The formulas are in the modules that read them
(reverse_step, kl, advantages, ...), which export these enums too.
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


class Policy(Choice):
    """Whose prediction."""

    CURRENT = "current"
    OLD = "old"
    REFERENCE = "reference"
    TEACHER = "teacher"
    EMA = "ema"


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


class PredictionGuidance(Choice):
    """Under which guidance a policy predicts for a loss."""

    NONE = "none"
    """The conditional branch alone."""
    AS_ROLLOUT = "as_rollout"
    """As the rollout sampled."""


class WindowStrategy(Choice):
    """How MixGRPO's window of stochastic steps moves; l is its first step."""

    PROGRESSIVE = "progressive"
    """A stride on after every `interval` iterations."""
    RANDOM = "random"
    """Anywhere, anew in every iteration."""
    DECAY = "decay"
    """Progressive, with an interval that falls linearly with l."""
    EXP_DECAY = "exp_decay"
    """Progressive, with an interval that falls exponentially once l is past a threshold."""


class SigmaDraw(Choice):
    """Where a forward-process loss noises a finished sample to."""

    SCHEDULE = "schedule"
    """Steps of the rollout's own schedule, none twice."""
    UNIFORM = "uniform"
    """Uniform in (0, 1), then shifted."""
    LOGIT_NORMAL = "logit_normal"
    """sigmoid of a standard normal, then shifted."""


class OldPolicy(Choice):
    """How the policy that samples follows the trained one, rollout after rollout.

    After n optimizer steps: old <- d old + (1 - d) new.
    """

    COPY = "copy"
    """d = 0 (published as type 0)."""
    RAMP = "ramp"
    """d = min(0.001 n, 0.5) (type 1)."""
    DELAYED_RAMP = "delayed_ramp"
    """d = 0 for n < 75, then min(0.0075 (n - 75), 0.999) (type 2)."""


class RewardProbability(Choice):
    """What DiffusionNFT makes of an advantage before it is mapped to a probability of being good."""

    CONTINUOUS = "continuous"
    """The advantage."""
    POSITIVE_ONLY = "positive_only"
    """Negative advantages count as 0."""
    NEGATIVE_ONLY = "negative_only"
    """Positive advantages count as 0."""
    ONE_ONLY = "one_only"
    """1 where the advantage is positive, else 0."""
    BINARY = "binary"
    """The sign."""


class ElboForm(Choice):
    """Which policy gradient is taken on the evidence lower bound."""

    EPG = "epg"
    """-rho A E."""
    PEPG = "pepg"
    """-rho (A - (E - E_old)) E, the bracket a constant: proximal."""
    PAR = "par"
    """0.5 rho (A - (E - E_old))^2: proximal advantage regression."""


class DistillationForm(Choice):
    """How far the student is from its teacher."""

    KL = "kl"
    """The exact KL of one reverse step."""
    VELOCITY = "velocity"
    """mean_D (v - v_teacher)^2."""


class RewardScale(Choice):
    """What every single reward is centred and divided by before several are added."""

    NONE = "none"
    """Nothing: rewards are added as they are."""
    GROUP = "group"
    """Mean and standard deviation of the row's group."""
    BATCH = "batch"
    """Mean and standard deviation of all scored rows."""


class ImportanceLevel(Choice):
    """What a rollout-correction weight is the ratio of."""

    TOKEN = "token"
    """One step: exp(d)."""
    SEQUENCE = "sequence"
    """All steps of a sample: exp(sum d)."""


class RejectionStatistic(Choice):
    """What a step of a rollout is rejected by; d = old log-prob - rollout's log-prob.

    k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d; per step, or over a sample's steps.
    """

    TOKEN_K1 = "token_k1"
    TOKEN_K2 = "token_k2"
    TOKEN_K3 = "token_k3"
    SEQ_SUM_K1 = "seq_sum_k1"
    SEQ_SUM_K2 = "seq_sum_k2"
    SEQ_SUM_K3 = "seq_sum_k3"
    SEQ_MEAN_K1 = "seq_mean_k1"
    SEQ_MEAN_K2 = "seq_mean_k2"
    SEQ_MEAN_K3 = "seq_mean_k3"
    SEQ_MAX_K2 = "seq_max_k2"
    SEQ_MAX_K3 = "seq_max_k3"
    Z_K1 = "z_k1"
    """|d| of a step in units of the measured noise floor of its timestep."""

    @property
    def estimator(self) -> str:
        """k1, k2 or k3."""
        return self.value.rpartition("_")[2]

    @property
    def two_sided(self) -> bool:
        """Whether it may be too small as well as too large."""
        return self.estimator == "k1" and self.over != "z"

    @property
    def over(self) -> str:
        """token, seq_sum, seq_mean, seq_max or z."""
        return self.value.rpartition("_")[0]
