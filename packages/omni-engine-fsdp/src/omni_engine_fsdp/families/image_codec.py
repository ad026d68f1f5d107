"""What codecs of images share: which sides fit, and decoded pixels as the stock pipeline rounds them.

Letters: B rows, C H W latents.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from omni_core.model import Codec
from omni_core.options import DiffusionPipelineConfig
from omni_core.reverse_step import Latents
from omni_core.trajectory import Media

IMAGE = "image"


class ImageCodec(Codec):
    """A frozen autoencoder, decoding only. A family derives from it and writes `to_pixels`."""

    def __init__(
        self, vae: Any, *, channels: int, scale: int, unit: int, largest: int | None = None
    ) -> None:
        """
        Args:
            vae: Diffusers autoencoder.
            channels: C.
            scale: Pixels on a side of one latent.
            unit: Sides of a picture are multiples of this, in pixels.
            largest: The longest side, in pixels; None for no limit.
        """
        self.vae = vae.eval().requires_grad_(False)
        self.channels = channels
        self.scale = scale
        self.unit = unit
        self.largest = largest
        self._processor = VaeImageProcessor(vae_scale_factor=scale)

    @abstractmethod
    def to_pixels(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, H, W], in the autoencoder's dtype and place, to [B, 3, height, width]."""

    def latent_shapes(self, pipeline: DiffusionPipelineConfig) -> dict[str, tuple[int, ...]]:
        """`image` -> (C, height / scale, width / scale).

        Raises:
            ValueError: a side that the family cannot take (names the nearest that it can), or more
                than one frame.
        """
        if pipeline.num_frames != 1:
            raise ValueError(f"num_frames {pipeline.num_frames}: this family makes images; take 1")
        mistakes = [
            said
            for name, pixels in (("height", pipeline.height), ("width", pipeline.width))
            if (said := side_mistake(name, pixels, unit=self.unit, largest=self.largest))
        ]
        if mistakes:
            raise ValueError("; ".join(mistakes))
        sides = (pipeline.height // self.scale, pipeline.width // self.scale)
        return {IMAGE: (self.channels, *sides)}

    @torch.no_grad()
    def decode(self, latents: Latents) -> Media:
        """Decode final latents [B, C, H, W] to the pixels of the stock pipeline's PIL images."""
        sample = latents[IMAGE].to(device=self.vae.device, dtype=self.vae.dtype)
        pixels = self._processor.postprocess(self.to_pixels(sample), output_type="pt").float()
        return Media(image=(pixels * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1))

    def to(self, device: torch.device | str) -> None:
        """Move the autoencoder."""
        self.vae.to(device)


class KLCodec(ImageCodec):
    """The autoencoder of most image families: latents are scaled and shifted."""

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Undo scale and shift, and decode."""
        config = self.vae.config
        sample = latents / config.scaling_factor + config.shift_factor
        pixels: Tensor = self.vae.decode(sample, return_dict=False)[0]
        return pixels


def side_mistake(name: str, pixels: int, *, unit: int, largest: int | None) -> str | None:
    """Say why a side of *pixels* does not fit, with the nearest that do; None if it does."""
    if pixels > 0 and pixels % unit == 0 and (largest is None or pixels <= largest):
        return None
    most = largest if largest is not None else pixels + unit
    below = min(max(pixels // unit * unit, unit), most)
    above = min(-(-pixels // unit) * unit, most)
    fits = " or ".join(str(side) for side in sorted({below, above}))
    bound = "" if largest is None else f" up to {largest}"
    return f"{name} {pixels} does not fit: a multiple of {unit}{bound} does; nearest: {fits}"


def autoencoder_scale(vae: Any) -> int:
    """Pixels on a side of one latent of an AutoencoderKL: every block but the first halves."""
    scale: int = 2 ** (len(vae.config.block_out_channels) - 1)
    return scale
