"""REINFORCE: the log-prob of each stochastic step, weighted by what the sample is above its group.

With A = R - mean of the group, L = mean over (sample, step) of -A log p. Source: Williams 1992,
doi:10.1007/BF00992696, with the group's mean as baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from omni_core import (
    AdvantageStd,
    Algorithm,
    FlowMatchSchedule,
    GroupAdvantages,
    LossInputs,
    LossTerms,
    group_advantages,
)


class Reinforce(Algorithm):
    """See the module's docstring."""

    def window(self, schedule: FlowMatchSchedule, *, seed: int, iteration: int) -> tuple[int, ...]:
        """All steps but the last."""
        del seed, iteration
        return tuple(range(schedule.num_steps - 1))

    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """Centre by group."""
        return group_advantages(rewards, group_ids, valid=valid, std=AdvantageStd.NONE, clip=None)

    def loss(self, inputs: LossInputs) -> LossTerms:
        """-A log p, one term for each (sample, step) row."""
        log_probs = inputs.current.require_log_prob()
        terms = -inputs.advantages * log_probs
        return LossTerms(
            terms=terms, metrics={"loss": terms.detach(), "log_prob": log_probs.detach()}
        )
