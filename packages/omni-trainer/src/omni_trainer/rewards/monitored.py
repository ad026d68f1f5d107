"""A reward with others measured beside it: their numbers are reported and change nothing.

A sample's details gain, for each monitor NAME: `NAME` (its score), `NAME/DETAIL` for each of its own
details, and `NAME/unscored`, 1 where it could not score the sample and 0 otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from omni_core.reward import RewardFunction, RewardInput, RewardResult
from omni_core.trajectory import Media
from omni_trainer.rewards.scoring import Scorer

Details = Mapping[str, float | str]


def named_details(name: str, result: RewardResult) -> dict[str, float | str]:
    """Write a part's score and its details as details of the whole."""
    return {
        name: result.value,
        **{f"{name}/{key}": value for key, value in result.details.items()},
    }


class MonitoredReward(RewardFunction):
    """Scores as *reward* does; a monitor that fails is counted and fails no sample."""

    def __init__(self, reward: RewardFunction, monitors: Mapping[str, Scorer]) -> None:
        self.name = reward.name
        self._reward = reward
        self._monitors = dict(monitors)

    @property
    def retried(self) -> int:
        """Of the reward and of its monitors."""
        monitors = sum(monitor.counts.retries for monitor in self._monitors.values())
        return self._reward.retried + monitors

    def setup(self) -> None:
        """Load the reward's and the monitors' models."""
        self._reward.setup()
        for monitor in self._monitors.values():
            monitor.setup()

    def target(self, prompt: str) -> str | None:
        """Return the reward's target; where it has none, that of the first monitor with one.

        Raises:
            ValueError: the reward refuses the prompt. What a monitor refuses is trained on.
        """
        found = self._reward.target(prompt)
        return next(self._targets(prompt), None) if found is None else found

    def _targets(self, prompt: str) -> Iterator[str]:
        for monitor in self._monitors.values():
            try:
                found = monitor.reward.target(prompt)
            except ValueError:
                continue
            if found is not None:
                yield found

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score, and measure beside it.

        Raises:
            ValueError: a monitor has the name of a number that the reward gives itself.
        """
        results = self._reward.score(media, inputs)
        for name, monitor in self._monitors.items():
            measured = monitor.score(media, inputs)
            results = [
                self._joined(result, name, beside)
                for result, beside in zip(results, measured, strict=True)
            ]
        return results

    def _joined(self, result: RewardResult, name: str, measured: RewardResult) -> RewardResult:
        more: Details = {f"{name}/unscored": float(not measured.ok)}
        if measured.ok:
            more = {**named_details(name, measured), **more}
        twice = sorted(result.details.keys() & more.keys())
        if twice:
            msg = (
                f"reward.monitors.{name}: reward {self.name!r} gives {twice[0]!r} itself; rename it"
            )
            raise ValueError(msg)
        return attrs.evolve(result, details={**result.details, **more})

    def close(self) -> None:
        """Free all models."""
        self._reward.close()
        for monitor in self._monitors.values():
            monitor.close()
