"""How small (or large) a picture is as a JPEG file: a reward without a model.

    reward = -bytes / 1000        with `prefer: small` (compressibility), the positive with `large`

Source: the compressibility tasks of DDPO, arXiv 2305.13301; quality 95 as there.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image

from omni_core.reward import RewardFunction, RewardInput, RewardResult
from omni_core.trajectory import Media
from omni_trainer.rewards.options import JPEGRewardConfig, Prefer
from omni_trainer.rewards.pictures import images_of, pillow_images

BYTES = 1000.0
"""Of one kilobyte."""


class JPEGReward(RewardFunction):
    """Needs neither a target nor a model."""

    name = "jpeg_compressibility"

    def __init__(self, options: JPEGRewardConfig) -> None:
        self.options = options
        self._sign = -1.0 if options.prefer is Prefer.SMALL else 1.0

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score `media.image`, uint8 [B, H, W, 3], in kilobytes.

        Raises:
            ValueError: there are no images, or not one for each input.
        """
        pictures = pillow_images(images_of(media, inputs, self.name))
        return [RewardResult(value=self._sign * self._size(picture)) for picture in pictures]

    def _size(self, picture: Image.Image) -> float:
        file = io.BytesIO()
        picture.save(file, format="JPEG", quality=self.options.quality)
        return file.tell() / BYTES
