"""A family of two modalities: the toy's parts over the latents of a video and of its sound.

Axes: B rows, C=3 channels, F frames, H W latent height and width (a quarter of the video's), L sound
latents, S sound samples.
"""

from __future__ import annotations

import attrs
import torch

from omni_core.model import Codec
from omni_core.options import DiffusionPipelineConfig
from omni_core.reverse_step import Latents
from omni_core.testing.toys.family import CHANNELS, ToyCodec, ToyFamily
from omni_core.trajectory import Media

VIDEO, AUDIO = "video", "audio"
SOUND_LATENTS = 2
"""For each frame; a latent is one sound sample for each of its channels."""


class ToyClipCodec(Codec):
    """A frame is a picture of the toy; sound is squashed and read off channel by channel."""

    def __init__(self, frame_rate: float) -> None:
        self.frame_rate = frame_rate
        self.pictures = ToyCodec()

    def latent_shapes(self, pipeline: DiffusionPipelineConfig) -> dict[str, tuple[int, ...]]:
        """`video` -> (C, F, H, W), `audio` -> (C, L)."""
        picture = self.pictures.latent_shapes(attrs.evolve(pipeline, num_frames=1))["image"]
        frames = pipeline.num_frames
        return {VIDEO: (CHANNELS, frames, *picture[1:]), AUDIO: (CHANNELS, SOUND_LATENTS * frames)}

    def decode(self, latents: Latents) -> Media:
        """[B, C, F, H, W] and [B, C, L] -> uint8 [B, F, 4H, 4W, 3] and float32 [B, 1, S]."""
        rows = len(latents[VIDEO])
        frames = latents[VIDEO].transpose(1, 2).flatten(0, 1)
        image = self.pictures.decode({"image": frames}).image
        assert image is not None
        sound = torch.tanh(latents[AUDIO].float()).transpose(1, 2).reshape(rows, 1, -1)
        return Media(
            video=image.reshape(rows, -1, *image.shape[1:]),
            frame_rate=self.frame_rate,
            audio=sound,
            audio_rate=round(self.frame_rate * SOUND_LATENTS * CHANNELS),
        )

    def to(self, device: torch.device | str) -> None:
        """Nothing to move."""


class ToyClipFamily(ToyFamily):
    """`ToyFamily` with another codec: its denoiser takes whatever modalities there are."""

    pipeline_classes = ("ToyClipPipeline",)

    def load_codec(self, dtype: torch.dtype) -> ToyClipCodec:
        """Make the codec (float32 whatever *dtype* is)."""
        del dtype
        return ToyClipCodec(self.config.pipeline.frame_rate)
