"""LTX-2: video and sound denoised together by one transformer, texts of a fixed length.

Of the stock pipeline's guidance, classifier-free guidance is kept, with a scale of its own for the
sound; spatio-temporal guidance, modality guidance and rescaling are off (stock: `stg_scale=0`,
`modality_scale=1`, `guidance_rescale=0`). Letters: G prompts, B rows, C F H W video latents, A channels,
N frames and M mel bins of sound latents, L tokens. Source: arXiv 2601.03233.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from torch import Tensor, nn

from omni_core.families.ltx2 import LTX2Conditioning
from omni_core.model import Guidance, Step, TextLayout
from omni_core.options import DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning, Media
from omni_engine_fsdp.families.folder_family import FolderFamily, shift_keywords, sigmas_of
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import (
    ATTENTION,
    TransformerDenoiser,
    check_scale,
    conditioning_of,
    guided,
    negative_of,
    own_output,
    twice,
)
from omni_engine_fsdp.families.video_codec import VIDEO, VideoCodec

AUDIO = "audio"
MAX_TEXT = 1024
"""Tokens that the stock pipeline pads to."""
STOCK_UNIT = 32
"""Sides that the stock pipeline takes are multiples of this, in pixels."""
ATTENTIONS = (
    "attn1",
    "attn2",
    "audio_attn1",
    "audio_attn2",
    "audio_to_video_attn",
    "video_to_audio_attn",
)


class LTX2Denoiser(TransformerDenoiser):
    """The transformer of two streams, with classifier-free guidance.

    LoRA adapts every attention: of each stream to itself, to the text and to the other stream.
    """

    targets = tuple(f"{layer}.{name}" for layer in ATTENTIONS for name in ATTENTION)
    branches_as_batch = True

    def __init__(self, transformer: nn.Module, dtype: torch.dtype, *, frame_rate: float) -> None:
        """
        Args:
            transformer: LTX2VideoTransformer3DModel.
            dtype: That it computes in.
            frame_rate: Frames a second, which places of frames are counted in.
        """
        super().__init__(transformer, dtype)
        self.frame_rate = frame_rate
        own_output(transformer)

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict both velocities; both branches are one batch.

        Returns:
            `video` -> [B, C, F, H, W] and `audio` -> [B, A, N, M], float32 (float64 where the
            transformer computes in it).

        Raises:
            ValueError: guidance is asked for and there is no negative prompt.
        """
        own = conditioning_of(conditioning, LTX2Conditioning)
        video, audio = latents[VIDEO], latents[AUDIO]
        if self.branches(guidance) == 1:
            found = self._predict(
                video, audio, step.timestep, own.video_embeds, own.audio_embeds, own.mask
            )
            return dict(zip((VIDEO, AUDIO), found, strict=True))
        negative = negative_of(
            own.negative_video_embeds, own.negative_audio_embeds, own.negative_mask
        )
        positive = (own.video_embeds, own.audio_embeds, own.mask)
        both = self._predict(
            twice(video),
            twice(audio),
            twice(step.timestep),
            *(torch.cat(pair) for pair in zip(negative, positive, strict=True)),
        )
        heard = Guidance(scale=guidance.second)
        return {VIDEO: guided(both[0], guidance), AUDIO: guided(both[1], heard)}

    def _predict(
        self,
        video: Tensor,
        audio: Tensor,
        timestep: Tensor,
        video_text: Tensor,
        audio_text: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Predict with the conditioning of one batch."""
        _, _, frames, height, width = video.shape
        seen, heard = self.transformer(
            hidden_states=video.flatten(2).transpose(1, 2).to(self.dtype),
            audio_hidden_states=pack_sound(audio).to(self.dtype),
            encoder_hidden_states=video_text.to(self.dtype),
            audio_encoder_hidden_states=audio_text.to(self.dtype),
            timestep=timestep,
            sigma=timestep,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.frame_rate,
            audio_num_frames=audio.shape[2],
            use_cross_timestep=True,
            return_dict=False,
        )
        return (
            self.widened(seen).transpose(1, 2).reshape(video.shape),
            unpack_sound(self.widened(heard), bins=audio.shape[-1]),
        )


def pack_sound(latents: Tensor) -> Tensor:
    """[B, A, N, M] -> a token for each frame, [B, N, A M]."""
    return latents.transpose(1, 2).flatten(2)


def unpack_sound(tokens: Tensor, *, bins: int) -> Tensor:
    """Undo `pack_sound`; *bins* are M."""
    rows, frames, _ = tokens.shape
    return tokens.reshape(rows, frames, -1, bins).transpose(1, 2)


class LTX2Conditioner(StockConditioner):
    """`encode_prompt` and the text connectors of an LTX2Pipeline that holds nothing else."""

    layout = TextLayout.FIXED
    encoders = ("text_encoder", "connectors")

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> LTX2Conditioning:
        """Encode G prompts, and the negative prompt G times where there is guidance.

        Raises:
            ValueError: a guidance scale below 1, which the stock pipeline takes for none.
        """
        check_scale(guidance, "LTX2Pipeline")
        check_scale(Guidance(scale=guidance.second), "LTX2Pipeline")
        text, mask, negative, negative_mask = self.pipeline.encode_prompt(
            prompt=list(prompts),
            negative_prompt=negative_prompt,
            do_classifier_free_guidance=guidance.branches == 2,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        video, audio, attended = self._connected(text, mask)
        found = LTX2Conditioning(video_embeds=video, audio_embeds=audio, mask=attended)
        if guidance.branches == 1:
            return found
        video, audio, attended = self._connected(negative, negative_mask)
        return attrs.evolve(
            found,
            negative_video_embeds=video,
            negative_audio_embeds=audio,
            negative_mask=attended,
        )

    def _connected(self, text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        side = getattr(self.pipeline.tokenizer, "padding_side", "left")
        video, audio, attended = self.pipeline.connectors(text, mask, padding_side=side)
        return video, audio, attended


class LTX2Codec(VideoCodec):
    """The pipeline's autoencoders of video and sound, and its vocoder, decoding only."""

    def __init__(self, vae: Any, audio_vae: Any, vocoder: Any, **video: Any) -> None:
        """
        Args:
            vae: Of the video.
            audio_vae: Of the sound's mel spectrogram.
            vocoder: From that to the sound.
            video: As `VideoCodec`.
        """
        super().__init__(vae, **video)
        self.audio_vae = audio_vae.eval().requires_grad_(False)
        self.vocoder = vocoder.eval().requires_grad_(False)

    def latent_shapes(self, pipeline: DiffusionPipelineConfig) -> dict[str, tuple[int, ...]]:
        """`video` -> (C, F, H, W), `audio` -> (A, N, M): as many sound latents as the frames last.

        Raises:
            ValueError: as `VideoCodec`.
        """
        config = self.audio_vae.config
        rate = (
            config.sample_rate / config.mel_hop_length / self.audio_vae.temporal_compression_ratio
        )
        frames = round(pipeline.num_frames / pipeline.frame_rate * rate)
        bins = config.mel_bins // self.audio_vae.mel_compression_ratio
        return {
            **super().latent_shapes(pipeline),
            AUDIO: (int(config.latent_channels), frames, bins),
        }

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Undo the channel-wise scaling, and decode."""
        mean, std = (
            value.view(1, -1, 1, 1, 1).to(latents)
            for value in (self.vae.latents_mean, self.vae.latents_std)
        )
        sample = latents * std / self.vae.config.scaling_factor + mean
        pixels: Tensor = self.vae.decode(sample, None, return_dict=False)[0]
        return pixels

    @torch.no_grad()
    def decode(self, latents: Latents) -> Media:
        """Decode both, to what the stock pipeline returns."""
        media = super().decode(latents)
        sound = latents[AUDIO].to(device=self.audio_vae.device, dtype=self.audio_vae.dtype)
        tokens = pack_sound(sound) * self.audio_vae.latents_std + self.audio_vae.latents_mean
        sound = unpack_sound(tokens, bins=sound.shape[-1])
        mel = self.audio_vae.decode(sound, return_dict=False)[0]
        heard = self.vocoder(mel).float().clamp(-1.0, 1.0)
        rate = int(self.vocoder.config.output_sampling_rate)
        return attrs.evolve(media, audio=heard, audio_rate=rate)

    def to(self, device: torch.device | str) -> None:
        """Move the autoencoders and the vocoder."""
        for part in (self.vae, self.audio_vae, self.vocoder):
            part.to(device)


class LTX2Family(FolderFamily):
    """Loads the parts of an LTX2Pipeline folder."""

    name = "ltx2"
    pipeline_classes = ("LTX2Pipeline",)
    transformer_class = LTX2VideoTransformer3DModel
    tasks = ("text-to-video-and-audio",)
    modalities = (VIDEO, AUDIO)
    lora_targets = LTX2Denoiser.targets
    second_guidance = "the sound"

    def load_denoiser(self, dtype: torch.dtype) -> LTX2Denoiser:
        """Read the transformer; its weights are kept in *dtype* and it computes in `model.dtype`.

        Raises:
            ValueError: it takes patches of several latents, which no published model does.
        """
        config = self.transformer_config
        sizes = {name: config[name] for name in ("patch_size", "patch_size_t")}
        if set(sizes.values()) != {1}:
            raise ValueError(
                f"{self.folder.root}: family {self.name!r} takes patches of 1, got {sizes}"
            )
        return LTX2Denoiser(
            self.load_transformer(dtype),
            self.compute_dtype,
            frame_rate=self.config.pipeline.frame_rate,
        )

    def load_conditioner(self, dtype: torch.dtype) -> LTX2Conditioner:
        """Read tokenizer, encoder and connectors.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline takes.
        """
        return self.conditioner_of(
            LTX2Conditioner, LTX2Pipeline, dtype, most=MAX_TEXT, audio_vae=None, vocoder=None
        )

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count with Gemma's tokenizer."""
        length = self.config.pipeline.max_sequence_length
        texts = [prompt.strip() for prompt in prompts]
        return self.count_tokens("tokenizer", texts, limit=length)

    def load_codec(self, dtype: torch.dtype) -> LTX2Codec:
        """Read the autoencoders and the vocoder.

        Raises:
            ValueError: the video's autoencoder draws noise as it decodes.
        """
        vae = self.folder.load("vae", AutoencoderKLLTX2Video, dtype=dtype)
        if vae.config.timestep_conditioning:
            raise ValueError(f"{self.folder.root / 'vae'}: timestep_conditioning is not supported")
        return LTX2Codec(
            vae,
            self.folder.load("audio_vae", AutoencoderKLLTX2Audio, dtype=dtype),
            self.folder.load("vocoder", LTX2Vocoder, dtype=dtype),
            channels=int(self.transformer_config["in_channels"]),
            scale=int(vae.spatial_compression_ratio),
            frames=int(vae.temporal_compression_ratio),
            unit=math.lcm(STOCK_UNIT, int(vae.spatial_compression_ratio)),
            frame_rate=self.config.pipeline.frame_rate,
        )

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Say frames, their rate and the sound's scale, too, and switch off what is left out here."""
        guidance = Guidance(scale=sampling.guidance_scale, second_scale=sampling.guidance_scale_2)
        off = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
        return {
            **super().stock_call(sampling),
            "num_frames": self.config.pipeline.num_frames,
            "frame_rate": self.config.pipeline.frame_rate,
            "audio_guidance_scale": guidance.second,
            **off,
            **{f"audio_{name}": value for name, value in off.items()},
        }

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Ask the pipeline's own scheduler, with even sigmas and the configured size's shift, as it does."""
        steps = sampling.num_inference_steps
        scheduler = self.scheduler()
        return sigmas_of(
            scheduler,
            sigmas=np.linspace(1.0, 1.0 / steps, steps),
            **shift_keywords(scheduler.config, calculate_shift, self._tokens(), 2.05),
        )

    def _tokens(self) -> int:
        """Video latents of the configured size."""
        vae: Any = self.folder.skeleton("vae", AutoencoderKLLTX2Video)
        size = self.config.pipeline
        frames = (size.num_frames - 1) // vae.temporal_compression_ratio + 1
        side = vae.spatial_compression_ratio
        return int(frames * (size.height // side) * (size.width // side))
