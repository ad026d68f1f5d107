"""The redness of a picture: the mean of red minus the mean of green and blue, from -1 to 1."""

from __future__ import annotations

from collections.abc import Sequence

from omni_core import Media, RewardFunction, RewardInput, RewardResult
from omni_fork_example.options import RednessOptions


class Redness(RewardFunction):
    """It needs no target and no model."""

    name = "fork_redness"

    def __init__(self, options: RednessOptions) -> None:
        self.options = options

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score every picture; one result for each input."""
        if media.image is None:
            return [RewardResult.failed("fork_redness scores images alone") for _ in inputs]
        red, green, blue = (media.image.double() / 255).mean(dim=(1, 2)).unbind(1)
        scores = red - (green + blue) / 2
        return [RewardResult(value=self.options.weight * float(score)) for score in scores]
