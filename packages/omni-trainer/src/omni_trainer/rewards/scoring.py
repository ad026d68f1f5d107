"""What scores with a reward: checks, retries and counts; a sample it could not score stays unscored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
import structlog

from omni_core.reward import (
    RetryableRewardError,
    RewardFunction,
    RewardInput,
    RewardResult,
    check_scores,
)
from omni_core.trajectory import Media

log = structlog.get_logger()

FIRST_WAIT = 0.1
"""Seconds before the first retry; each later one waits twice as long, up to `LONGEST_WAIT`."""
LONGEST_WAIT = 10.0


@attrs.define(kw_only=True)
class ScoreCounts:
    """What a scorer has done since it was made."""

    scored: int = 0
    """Samples with a score."""
    failed: int = 0
    """Samples without one."""
    retries: int = 0
    """Batches tried again."""
    seconds: float = 0.0
    """Time spent in `score`, waits included."""
    resident: int = 0
    """Bytes that the scorer's process holds."""


class Scorer:
    """Scores batches with one reward; not to be shared by threads."""

    def __init__(
        self,
        reward: RewardFunction,
        *,
        retries: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.reward = reward
        self._counts = ScoreCounts()
        self._retries = retries
        self._sleep = sleep

    def setup(self) -> None:
        """Load the reward's models."""
        self.reward.setup()

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score every row of *media*: one result for each input, in order.

        A batch that fails with `RetryableRewardError` is tried again; once the retries are used up, all
        of its samples are failures that carry the error. Any other exception is a mistake and passes on.

        Raises:
            ValueError: the reward returned a wrong number of scores; names it, and both numbers.
        """
        start = time.perf_counter()
        results = check_scores(self._try(media, inputs), len(inputs), self.reward.name)
        failed = sum(not result.ok for result in results)
        self._counts.failed += failed
        self._counts.scored += len(results) - failed
        self._counts.seconds += time.perf_counter() - start
        return results

    @property
    def counts(self) -> ScoreCounts:
        """What was done so far; the retries of a reward's parts are among the retries."""
        retries = self._counts.retries + self.reward.retried
        return attrs.evolve(self._counts, retries=retries)

    def close(self) -> None:
        """Free what the reward loaded."""
        self.reward.close()

    def _try(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        for attempt in range(self._retries + 1):
            try:
                return self.reward.score(media, inputs)
            except RetryableRewardError as exc:
                error = f"reward {self.reward.name!r}: {exc}"
            if attempt < self._retries:
                self._counts.retries += 1
                log.warning("reward.retry", error=error, attempt=attempt + 1, of=self._retries)
                self._sleep(min(FIRST_WAIT * 2**attempt, LONGEST_WAIT))
        return [RewardResult.failed(f"{error} (tried {attempt + 1} times)") for _ in inputs]
