"""Several rewards as one: the score is their weighted sum, and each is reported raw.

    score = sum over terms of weight * score of the term

A sample's details hold, for each term NAME: `NAME` (its score, unweighted) and `NAME/DETAIL` for each
detail of its own. `algorithm.reward_scale` brings the terms to a common scale before they are summed
(`omni_core.reward_sum`). A sample that one term could not score has no score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omni_core.reward import RewardFunction, RewardInput, RewardResult
from omni_core.trajectory import Media
from omni_trainer.rewards.build import build_part
from omni_trainer.rewards.monitored import named_details
from omni_trainer.rewards.options import WeightedRewardConfig


class WeightedReward(RewardFunction):
    """Each term is scored, and tried again, by itself."""

    name = "weighted"

    def __init__(self, options: WeightedRewardConfig) -> None:
        self._weights = {term.name: term.weight for term in options.summed}
        self._terms = {
            name: build_part(choice, retries=options.retries)
            for name, choice in options.terms.items()
        }

    @property
    def retried(self) -> int:
        """Of all terms."""
        return sum(term.counts.retries for term in self._terms.values())

    def setup(self) -> None:
        """Load the terms' models."""
        for term in self._terms.values():
            term.setup()

    def target(self, prompt: str) -> str | None:
        """Return the target of those terms that take one.

        Raises:
            ValueError: a term refuses the prompt, or two take different targets from it.
        """
        found = {name: term.reward.target(prompt) for name, term in self._terms.items()}
        taken = {name: target for name, target in found.items() if target is not None}
        if len(set(taken.values())) > 1:
            said = ", ".join(f"{name} {target!r}" for name, target in taken.items())
            msg = f"the rewards take different targets from the prompt: {said}"
            raise ValueError(msg)
        return next(iter(taken.values()), None)

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score with every term."""
        found = {name: term.score(media, inputs) for name, term in self._terms.items()}
        return [
            self._sum({name: results[row] for name, results in found.items()})
            for row in range(len(inputs))
        ]

    def _sum(self, results: Mapping[str, RewardResult]) -> RewardResult:
        for name, result in results.items():
            if not result.ok:
                return RewardResult.failed(f"{name}: {result.error}")
        details: dict[str, float | str] = {}
        for name, result in results.items():
            details |= named_details(name, result)
        value = sum(self._weights[name] * result.value for name, result in results.items())
        return RewardResult(value=value, details=details)

    def close(self) -> None:
        """Free the terms' models."""
        for term in self._terms.values():
            term.close()
