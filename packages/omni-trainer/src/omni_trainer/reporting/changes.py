"""What changed between two evaluations of the same held-out prompts, paired by prompt."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from omni_trainer.evaluation import Evaluation, PromptScores
from omni_trainer.reporting.intervals import Interval, bootstrap, paired_bootstrap


@attrs.frozen(kw_only=True)
class Change:
    """One number before and after, and the change, each with its 95% interval over prompts."""

    before: Interval
    after: Interval
    change: Interval


def scored_pairs(before: Evaluation, after: Evaluation) -> list[tuple[PromptScores, PromptScores]]:
    """Prompts that have a score in both, in the order of *before*."""
    later = {prompt.row_id: prompt for prompt in after.prompts if prompt.rewards}
    return [
        (prompt, later[prompt.row_id])
        for prompt in before.prompts
        if prompt.rewards and prompt.row_id in later
    ]


def change_of(
    before: Evaluation, after: Evaluation, value: Callable[[PromptScores], float]
) -> Change:
    """Compare the mean over prompts of what *value* takes from a prompt's scores.

    Raises:
        ValueError: no prompt has a score in both.
    """
    pairs = scored_pairs(before, after)
    if not pairs:
        msg = f"no prompt has a score after both {before.step} and {after.step} steps"
        raise ValueError(msg)
    first, second = [value(prompt) for prompt, _ in pairs], [value(prompt) for _, prompt in pairs]
    return Change(
        before=bootstrap(first), after=bootstrap(second), change=paired_bootstrap(first, second)
    )


def reward_change(before: Evaluation, after: Evaluation) -> Change | None:
    """Compare the mean reward; None where no prompt has a score in both."""
    if not scored_pairs(before, after):
        return None
    return change_of(before, after, lambda prompt: prompt.mean)
