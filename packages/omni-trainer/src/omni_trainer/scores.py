"""Scores of a step become advantages and weights, row for row in the natural order.

A sample without a score has advantage 0 and weight 0 and is in no mean; `drop_group` does the same to
its whole group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import structlog
import torch
from torch import Tensor

from omni_core.advantages import GroupAdvantages
from omni_core.algorithm import Algorithm
from omni_core.choices import RewardScale
from omni_core.options import AlgorithmConfig, OnRewardError, RewardTerm
from omni_core.reward import RewardResult
from omni_core.reward_sum import weighted_reward_sum
from omni_core.trajectory import RolloutRequest
from omni_trainer.samples import Samples, UnscoredError, detail_means, require_scores
from omni_trainer.update_plan import PlannedRow

log = structlog.get_logger()

SCORE = "score"
"""What a reward's own value is called among its numbers."""


@attrs.frozen(kw_only=True)
class ScoredStep:
    """What an update needs of the scores, and what is reported of them."""

    rows: tuple[PlannedRow, ...]
    metrics: dict[str, float]


def score_step(
    samples: Samples,
    algorithm: Algorithm,
    on_error: OnRewardError,
    summed: Sequence[RewardTerm] = (),
) -> ScoredStep:
    """Take the scores of all samples and make advantages of them.

    Args:
        samples: Scored, or not to be scored at all.
        algorithm: Says what rewards become.
        on_error: What happens to a sample without a score.
        summed: What the reward's own score is the weighted sum of, where it is one.

    Raises:
        UnscoredError: a sample has no score and *on_error* is `raise`; or none has one.
    """
    keys = samples.plan.keys
    groups = [group for group, _ in keys]
    if not samples.results:
        rows = _rows(samples, algorithm, [0.0] * len(keys), [(row,) for row in range(len(keys))])
        return ScoredStep(rows=rows, metrics={})
    if on_error is OnRewardError.RAISE:
        require_scores(samples)
    results = [samples.results[key] for key in keys]
    if not any(result.ok for result in results):
        msg = (
            f"none of the step's {len(results)} samples has a score, so there is nothing to learn "
            f"from; the first one's error: {results[0].error}"
        )
        raise UnscoredError(msg)
    failed = {group for group, result in zip(groups, results, strict=True) if not result.ok}
    dropped = failed if on_error is OnRewardError.DROP_GROUP else set()
    valid = [
        result.ok and group not in dropped for group, result in zip(groups, results, strict=True)
    ]
    rewards = _summed(results, valid, groups, algorithm.options, summed)
    found = algorithm.advantages(rewards, groups, torch.tensor(valid))
    kept = [result for result, ok in zip(results, valid, strict=True) if ok]
    metrics = {
        **_reward_metrics([result.value for result in kept]),
        **{f"reward/{name}": value for name, value in detail_means(kept).items()},
        "reward/unscored": float(sum(not result.ok for result in results)),
        **_advantage_metrics(found),
    }
    if not any(valid):
        log.warning("reward.every_group_dropped", unscored=len(failed), groups=len(set(groups)))
    units = algorithm.units(found.advantages, groups, torch.tensor(valid))
    rows = _rows(samples, algorithm, found.advantages.tolist(), units)
    return ScoredStep(rows=rows, metrics=metrics)


def _summed(
    results: Sequence[RewardResult],
    valid: Sequence[bool],
    groups: Sequence[str],
    options: AlgorithmConfig,
    summed: Sequence[RewardTerm] = (),
) -> Tensor:
    """What each sample is judged by: float64 [B].

    Raises:
        ValueError: the reward gives no number of a name that is asked for; lists those that it gives.
    """
    scaled = options.reward_scale is not RewardScale.NONE
    terms = options.rewards or (scaled and summed) or (RewardTerm(name=SCORE),)
    rewards = {
        term.name: torch.tensor(
            [
                _number(result, term.name) if ok else 0.0
                for result, ok in zip(results, valid, strict=True)
            ],
            dtype=torch.float64,
        )
        for term in terms
    }
    if not options.rewards and not scaled:
        return rewards[SCORE]
    weights = {term.name: term.weight for term in terms}
    return weighted_reward_sum(
        rewards, weights, groups, scale=options.reward_scale, valid=torch.tensor(valid)
    )


def _number(result: RewardResult, name: str) -> float:
    if name == SCORE:
        return result.value
    found = result.details.get(name)
    if isinstance(found, int | float) and math.isfinite(found):
        return float(found)
    numbers = [key for key, value in result.details.items() if not isinstance(value, str)]
    msg = (
        f"algorithm.rewards: a sample has no number named {name!r} ({found!r}); the reward gives "
        f"{', '.join([SCORE, *sorted(numbers)])}"
    )
    raise ValueError(msg)


def _rows(
    samples: Samples,
    algorithm: Algorithm,
    advantages: Sequence[float],
    units: Sequence[tuple[int, ...]],
) -> tuple[PlannedRow, ...]:
    """Rows in the natural order; one that is in no unit counts for nothing."""
    unit_of = {row: number for number, unit in enumerate(units) for row in unit}
    together = any(len(unit) > 1 for unit in units)
    steps = {
        request.group_id: _trained_steps(algorithm, request) for request in samples.plan.requests
    }
    teachers = {
        request.group_id: algorithm.teacher_of(row.metadata)
        for request, row in zip(samples.plan.requests, samples.plan.rows, strict=True)
    }
    return tuple(
        PlannedRow(
            source=samples.places[key][0],
            row=samples.places[key][1],
            advantage=advantage,
            weight=float(row in unit_of),
            trained_steps=steps[key[0]],
            unit=unit_of.get(row) if together else None,
            teacher=teachers[key[0]],
        )
        for row, (key, advantage) in enumerate(zip(samples.plan.keys, advantages, strict=True))
    )


def _trained_steps(algorithm: Algorithm, request: RolloutRequest) -> int:
    needs = algorithm.forward_needs
    return len(request.window) if needs is None else needs.draws_of(request.sampling.schedule())


def _reward_metrics(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    rewards = torch.tensor(values, dtype=torch.float64)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }


def _advantage_metrics(found: GroupAdvantages) -> dict[str, float]:
    return {
        "advantage/zero_std_groups": float(found.zero_std_groups),
        "advantage/single_groups": float(found.single_groups),
        "advantage/unscored_groups": float(found.unscored_groups),
        "advantage/clipped": float(found.clipped),
        "advantage/group_std_mean": found.group_std_mean,
    }
