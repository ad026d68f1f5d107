"""Brightness of a picture as a reward: known in closed form, and learned in a few steps."""

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
        """Score each picture; a row whose prompt has no target is a failure, not a zero."""
        if media.image is None or len(media.image) != len(inputs):
            have = None if media.image is None else len(media.image)
            msg = f"reward {self.name!r} scores pictures: got {have} for {len(inputs)} inputs"
            raise ValueError(msg)
        brightness = media.image.double().mean(dim=(1, 2, 3)) / 255.0
        pairs = zip(brightness.tolist(), inputs, strict=True)
        return [self._score(value, row) for value, row in pairs]

    def _score(self, brightness: float, row: RewardInput) -> RewardResult:
        try:
            target = row.target or self.target(row.prompt)
        except ValueError as exc:
            return RewardResult.failed(str(exc))
        value = 1.0 - brightness if target == "dark" else brightness
        return RewardResult(value=value, details={"brightness": brightness})
