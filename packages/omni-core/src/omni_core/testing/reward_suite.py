"""What every reward keeps: one score for each row, in order, whatever batch it was scored in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import pytest
import torch

from omni_core.reward import RewardFunction, RewardInput, RewardResult, check_scores
from omni_core.trajectory import Media


class RewardSuite:
    """Subclass as `class TestMyReward(RewardSuite)` and provide the fixtures `reward`, `media`, `inputs`.

    `failing` may return rows of which at least one cannot be scored; None skips that test.
    """

    tolerance = 1e-6
    """How far a score may move with the batch that it is computed in (0 for exact scorers)."""

    @pytest.fixture
    def reward(self) -> RewardFunction:
        """A reward, built but not set up."""
        raise NotImplementedError

    @pytest.fixture
    def media(self) -> Media:
        """At least 3 samples, not all of which score the same."""
        raise NotImplementedError

    @pytest.fixture
    def inputs(self) -> Sequence[RewardInput]:
        """One for each sample, all of which can be scored."""
        raise NotImplementedError

    @pytest.fixture
    def failing(self) -> tuple[Media, Sequence[RewardInput]] | None:
        """Rows of which some can be scored and some cannot."""
        return None

    @pytest.fixture
    def ready(self, reward: RewardFunction) -> RewardFunction:
        """The reward after `setup`."""
        reward.setup()
        return reward

    def scores(
        self, reward: RewardFunction, media: Media, inputs: Sequence[RewardInput]
    ) -> list[RewardResult]:
        """Score as a trainer does."""
        return check_scores(reward.score(media, inputs), len(inputs), reward.name)

    def test_every_row_gets_one_finite_score(
        self, ready: RewardFunction, media: Media, inputs: Sequence[RewardInput]
    ) -> None:
        """Every row gets one finite score."""
        results = self.scores(ready, media, inputs)
        assert [(r.ok, r.error) for r in results] == [(True, None)] * len(inputs)
        assert all(math.isfinite(result.value) for result in results)
        assert len({round(result.value, 9) for result in results}) > 1, "give rows that differ"
        for result in results:
            assert all(isinstance(value, int | float | str) for value in result.details.values())

    def test_scores_come_in_the_order_of_the_rows(
        self, ready: RewardFunction, media: Media, inputs: Sequence[RewardInput]
    ) -> None:
        """Scores come in the order of the rows."""
        straight = [result.value for result in self.scores(ready, media, inputs)]
        rows = list(reversed(range(len(inputs))))
        turned = self.scores(ready, media.select(torch.tensor(rows)), [inputs[r] for r in rows])
        assert [result.value for result in reversed(turned)] == pytest.approx(
            straight, abs=self.tolerance
        )

    def test_a_score_does_not_depend_on_the_rest_of_the_batch(
        self, ready: RewardFunction, media: Media, inputs: Sequence[RewardInput]
    ) -> None:
        """A score does not depend on the rest of the batch."""
        together = [result.value for result in self.scores(ready, media, inputs)]
        alone = [
            self.scores(ready, media.select(torch.tensor([row])), [inputs[row]])[0].value
            for row in range(len(inputs))
        ]
        assert alone == pytest.approx(together, abs=self.tolerance)

    def test_scoring_again_gives_the_same(
        self, ready: RewardFunction, media: Media, inputs: Sequence[RewardInput]
    ) -> None:
        """Scoring again gives the same, and leaves the media as they were."""
        before = media.owned()
        first = self.scores(ready, media, inputs)
        assert [r.value for r in self.scores(ready, media, inputs)] == [r.value for r in first]
        for field in attrs.fields(Media):
            was, now = getattr(before, field.name), getattr(media, field.name)
            assert torch.equal(was, now) if isinstance(was, torch.Tensor) else was == now

    def test_case_13_a_row_too_few_is_refused(
        self, ready: RewardFunction, media: Media, inputs: Sequence[RewardInput]
    ) -> None:
        """CASES 13: media and inputs that do not belong together never get scores."""
        with pytest.raises(ValueError, match=r"\d"):
            self.scores(ready, media, inputs[:-1])

    def test_a_target_is_a_text_or_a_reason(
        self, ready: RewardFunction, inputs: Sequence[RewardInput]
    ) -> None:
        """A prompt has a target, has none, or is refused with a sentence."""
        for prompt in [*(row.prompt for row in inputs), "", "nothing in particular"]:
            found = _target(ready, prompt)
            assert found is None or isinstance(found, str)

    def test_a_failure_is_no_zero_and_does_not_stop_the_others(
        self, ready: RewardFunction, failing: tuple[Media, Sequence[RewardInput]] | None
    ) -> None:
        """A row that cannot be scored says why; the others get their scores."""
        if failing is None:
            pytest.skip("this reward names no row that fails")
        results = self.scores(ready, *failing)
        bad = [result for result in results if not result.ok]
        assert bad
        assert len(bad) < len(results)
        assert all(result.error for result in bad)

    def test_closing_is_possible_at_any_time(self, reward: RewardFunction) -> None:
        """`close` frees what is there, also before `setup`."""
        reward.close()
        reward.setup()
        reward.close()


def _target(reward: RewardFunction, prompt: str) -> str | None:
    """The target, or the reason why there is none."""
    try:
        return reward.target(prompt)
    except ValueError as exc:
        return str(exc) or f"{prompt!r} was refused without a reason"
