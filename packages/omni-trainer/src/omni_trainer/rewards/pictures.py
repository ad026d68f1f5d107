"""The pictures that a reward is given, checked: one for each input."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from omni_core.input_image import InputImage
from omni_core.reward import RewardInput
from omni_core.trajectory import Media

Shown = Image.Image | list[Image.Image]
"""A picture, or the frames of a video."""


def images_of(media: Media, inputs: Sequence[RewardInput], reward: str) -> Tensor:
    """Return `media.image`: uint8 [B, H, W, 3], RGB.

    Args:
        media: Finished samples.
        inputs: One for each sample.
        reward: Name of who asks, for the error.

    Raises:
        ValueError: there are no images, or not one for each input.
    """
    if media.image is None:
        msg = f"reward {reward!r} scores images, and the media hold none"
        raise ValueError(msg)
    if len(media.image) != len(inputs):
        msg = f"reward {reward!r} got {len(media.image)} images for {len(inputs)} inputs"
        raise ValueError(msg)
    return media.image


def shown_of(media: Media, inputs: Sequence[RewardInput], reward: str) -> list[Shown]:
    """Return what is seen of each sample: a picture, or a video's frames.

    Raises:
        ValueError: as `images_of`, of videos alike.
    """
    if media.image is not None or media.video is None:
        return list(pillow_images(images_of(media, inputs, reward)))
    if len(media.video) != len(inputs):
        msg = f"reward {reward!r} got {len(media.video)} videos for {len(inputs)} inputs"
        raise ValueError(msg)
    return [pillow_images(frames) for frames in media.video]


def input_images(inputs: Sequence[RewardInput]) -> list[Image.Image | None]:
    """Decode what each sample is an edit of, each image once; None where it is none."""
    decoded: dict[InputImage, Image.Image] = {}
    for row in inputs:
        if row.image is not None and row.image not in decoded:
            decoded[row.image] = Image.fromarray(row.image.pixels().numpy())
    return [None if row.image is None else decoded[row.image] for row in inputs]


def pillow_images(images: Tensor) -> list[Image.Image]:
    """Turn uint8 [B, H, W, 3] into B pictures of mode RGB."""
    return [Image.fromarray(picture) for picture in images.cpu().numpy()]
