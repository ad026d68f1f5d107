"""What codecs of videos share: which sizes fit, and decoded pixels as the stock pipelines round them.

Letters: B rows, C channels, F latent frames, H W latent sides.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from diffusers.video_processor import VideoProcessor
from torch import Tensor

from omni_core.model import Codec
from omni_core.options import DiffusionPipelineConfig
from omni_core.reverse_step import Latents
from omni_core.trajectory import Media
from omni_engine_fsdp.families.image_codec import side_mistake

VIDEO = "video"


class VideoCodec(Codec):
    """A frozen causal video autoencoder, decoding only. A family derives from it and writes `to_pixels`."""

    def __init__(
        self, vae: Any, *, channels: int, scale: int, frames: int, unit: int, frame_rate: float
    ) -> None:
        """
        Args:
            vae: Diffusers autoencoder.
            channels: C.
            scale: Pixels on a side of one latent.
            frames: Frames for one latent, after the first.
            unit: Sides of a frame are multiples of this, in pixels.
            frame_rate: Frames a second.
        """
        self.vae = vae.eval().requires_grad_(False)
        self.channels = channels
        self.scale = scale
        self.frames = frames
        self.unit = unit
        self.frame_rate = frame_rate
        self._processor = VideoProcessor(vae_scale_factor=scale)

    @abstractmethod
    def to_pixels(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, F, H, W], in the autoencoder's dtype and place, to [B, 3, frames, height, width]."""

    def latent_shapes(self, pipeline: DiffusionPipelineConfig) -> dict[str, tuple[int, ...]]:
        """`video` -> (C, F, height / scale, width / scale).

        Raises:
            ValueError: sides or a number of frames that the family cannot take; names the nearest.
        """
        mistakes = [
            said
            for name, pixels in (("height", pipeline.height), ("width", pipeline.width))
            if (said := side_mistake(name, pixels, unit=self.unit, largest=None))
        ]
        if (pipeline.num_frames - 1) % self.frames:
            below = (pipeline.num_frames - 1) // self.frames * self.frames + 1
            mistakes.append(
                f"num_frames {pipeline.num_frames} does not fit: one more than a multiple of "
                f"{self.frames} does; nearest: {below} or {below + self.frames}"
            )
        if mistakes:
            raise ValueError("; ".join(mistakes))
        sides = (pipeline.height // self.scale, pipeline.width // self.scale)
        return {VIDEO: (self.channels, (pipeline.num_frames - 1) // self.frames + 1, *sides)}

    @torch.no_grad()
    def decode(self, latents: Latents) -> Media:
        """Decode final latents [B, C, F, H, W] to the pixels of the stock pipeline's frames."""
        sample = latents[VIDEO].to(device=self.vae.device, dtype=self.vae.dtype)
        pixels = self._processor.postprocess_video(self.to_pixels(sample), output_type="pt").float()
        video = (pixels * 255.0).round().to(torch.uint8).permute(0, 1, 3, 4, 2)
        return Media(video=video.contiguous(), frame_rate=self.frame_rate)

    def to(self, device: torch.device | str) -> None:
        """Move the autoencoder."""
        self.vae.to(device)


def scaled(latents: Tensor, vae: Any) -> Tensor:
    """Scale channel-wise what such an autoencoder encoded, as the stock pipelines do.

    Args:
        latents: [B, C, F, H, W].
        vae: As for `unscaled`.
    """
    config = vae.config
    shape = (1, config.z_dim, 1, 1, 1)
    mean = torch.tensor(config.latents_mean).view(shape).to(latents)
    return (latents - mean) / torch.tensor(config.latents_std).view(shape).to(latents)


def unscaled(latents: Tensor, vae: Any) -> Tensor:
    """Undo the channel-wise scaling of autoencoders that name their latents' mean and deviation.

    Args:
        latents: [B, C, F, H, W].
        vae: Has `latents_mean`, `latents_std` and `z_dim` in its config (Wan, Qwen-Image).
    """
    config = vae.config
    shape = (1, config.z_dim, 1, 1, 1)
    mean = torch.tensor(config.latents_mean).view(shape).to(latents)
    # As the stock pipelines round it: divided by the inverse.
    inverse = 1.0 / torch.tensor(config.latents_std).view(shape).to(latents)
    return latents / inverse + mean
