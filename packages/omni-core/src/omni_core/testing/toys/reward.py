"""Brightness of a picture or video as a reward: known in closed form, and learned in a few steps."""

from __future__ import annotations

from collections.abc import Sequence

from omni_core.reward import RewardFunction, RewardInput, RewardResult
from omni_core.testing.toys.options import ToyRewardConfig
from omni_core.trajectory import Media


class ToyReward(RewardFunction):
    """Mean pixel value in [0, 1]; one minus it where the prompt asks for a dark picture."""

    name = "toy"

    def __init__(self, options: ToyRewardConfig) -> None:
        self.options = options

    def target(self, prompt: str) -> str:
        """`dark` or `bright`.

        Raises:
            ValueError: the prompt is blank.
        """
        if not prompt.strip():
            msg = "a blank prompt asks for nothing"
            raise ValueError(msg)
        return "dark" if self.options.dark_word in prompt.lower().split() else "bright"

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score each sample; a row whose prompt has no target is a failure, not a zero.

        Beside the score: `brightness`, and of samples with sound `loudness`, the mean of its magnitude.
        """
        shown = media.video if media.image is None else media.image
        if shown is None or len(shown) != len(inputs):
            have = None if shown is None else len(shown)
            msg = f"reward {self.name!r} scores what is seen: got {have} for {len(inputs)} inputs"
            raise ValueError(msg)
        measured = {"brightness": shown.double().flatten(1).mean(1) / 255.0}
        if media.audio is not None:
            measured["loudness"] = media.audio.double().abs().flatten(1).mean(1)
        rows = zip(*(value.tolist() for value in measured.values()), strict=True)
        details = [dict(zip(measured, row, strict=True)) for row in rows]
        return [self._score(*pair) for pair in zip(details, inputs, strict=True)]

    def _score(self, details: dict[str, float], row: RewardInput) -> RewardResult:
        try:
            target = row.target or self.target(row.prompt)
        except ValueError as exc:
            return RewardResult.failed(str(exc))
        brightness = details["brightness"]
        value = 1.0 - brightness if target == "dark" else brightness
        return RewardResult(value=value, details=details)
