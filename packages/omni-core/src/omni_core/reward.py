"""A reward scores finished samples; a scorer that failed is an error, never a zero."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import attrs

from omni_core.input_image import InputImage
from omni_core.trajectory import Media


@attrs.frozen(kw_only=True)
class RewardResult:
    """One sample's score."""

    value: float
    """Meaningless unless `ok`."""
    ok: bool = True
    error: str | None = None
    """Why it could not be scored."""
    details: Mapping[str, float | str] = attrs.field(factory=dict)
    """Beside the score, for logs and reports (numbers are averaged, texts shown)."""

    @classmethod
    def failed(cls, error: str) -> RewardResult:
        """Say that the sample has no score."""
        return cls(value=math.nan, ok=False, error=error)


@attrs.frozen(kw_only=True)
class RewardInput:
    """What is known of a row beside its media."""

    prompt: str
    target: str | None = None
    """What the prompt asks for, by the reward's target rule (OCR: the text to be read)."""
    metadata: Mapping[str, object] = attrs.field(factory=dict)
    """The other columns of the row."""
    image: InputImage | None = None
    """What the sample is an edit of."""


class RetryableRewardError(RuntimeError):
    """A scorer failed in a way that may pass (a server's 500, a time-out)."""


class RewardFunction(ABC):
    """Scores a batch. Built as `Reward(options)`; heavy state is loaded by `setup`."""

    name: str = "reward"

    @property
    def retried(self) -> int:
        """Batches that it has tried again by itself, as one made of others does: they are counted too."""
        return 0

    def setup(self) -> None:
        """Load models; called once in the process that scores."""

    def target(self, prompt: str) -> str | None:
        """Take the row's target from its prompt, where the reward has such a rule.

        Called at load for every row, so a prompt that cannot be scored is found by its line number.

        Raises:
            ValueError: the prompt has no target by the rule; says why.
        """
        del prompt
        return None

    @abstractmethod
    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score every row of *media*, in order: one result for each input.

        Raises:
            RetryableRewardError: the whole batch failed and may be tried again.
        """

    def close(self) -> None:
        """Free what `setup` loaded."""


def check_scores(results: Sequence[RewardResult], expected: int, scorer: str) -> list[RewardResult]:
    """Refuse a wrong number of scores, and turn a non-finite one into a failure.

    A score may come as any number (a tensor's or an array's element); it goes on as a float.

    Raises:
        ValueError: names the scorer, how many scores were expected and how many came.
        TypeError: what came are not results, or a score is no number; names the scorer.
    """
    if not isinstance(results, Sequence):
        msg = f"reward {scorer!r} returned {type(results).__name__}, not a list of RewardResult"
        raise TypeError(msg)
    if len(results) != expected:
        msg = f"reward {scorer!r} returned {len(results)} scores for {expected} samples"
        raise ValueError(msg)
    return [_checked(result, scorer) for result in results]


def _checked(result: RewardResult, scorer: str) -> RewardResult:
    if not isinstance(result, RewardResult):
        msg = f"reward {scorer!r} returned a {type(result).__name__}, not a RewardResult(value=...)"
        raise TypeError(msg)
    if not result.ok:
        return result
    try:
        value = float(result.value)
    except (TypeError, ValueError) as exc:
        msg = f"reward {scorer!r} returned the score {result.value!r}: {exc}"
        raise TypeError(msg) from exc
    if not math.isfinite(value):
        return RewardResult.failed(f"reward {scorer!r} returned {value}")
    return attrs.evolve(result, value=value)
