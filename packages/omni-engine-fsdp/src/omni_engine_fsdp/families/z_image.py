"""Z-Image: one stream of image and Qwen3 text, each row as long as its own prompt, padding masked.

The guidance scale counts as everywhere else: 1.0 is none. ZImagePipeline counts from 0: its
`guidance_scale` is ours minus 1. Letters: G prompts, B rows, L text tokens, D text width, C H W latents.
Source: arXiv 2511.22699 and the ZImagePipeline of diffusers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, ZImagePipeline, ZImageTransformer2DModel
from diffusers.pipelines.z_image.pipeline_z_image import (
    calculate_shift,
    get_default_z_image_sigmas,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from omni_core.families.z_image import ZImageConditioning
from omni_core.model import Guidance, Step, TextLayout
from omni_core.options import DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.folder_family import FolderFamily, shift_keywords, sigmas_of
from omni_engine_fsdp.families.image_codec import IMAGE, KLCodec
from omni_engine_fsdp.families.packing import PATCH
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import (
    ATTENTION,
    TransformerDenoiser,
    check_scale,
    conditioning_of,
    negative_of,
    twice,
)

MAX_TEXT = 512
"""Tokens that the stock pipeline is made for."""


class ZImageDenoiser(TransformerDenoiser):
    """The single-stream transformer with classifier-free guidance; it predicts the negative velocity."""

    targets = tuple(f"attention.{name}" for name in ATTENTION)
    blocks = ("noise_refiner", "context_refiner", "layers")
    branches_as_batch = True

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity as the stock pipeline does: both branches as one batch.

        Returns:
            `image` -> [B, C, H, W], float32 (float64 where the transformer computes in it).

        Raises:
            ValueError: guidance is asked for and there is no negative prompt.
        """
        own = conditioning_of(conditioning, ZImageConditioning)
        sample, timestep = latents[IMAGE], step.timestep
        texts = _rows_of(own.prompt_embeds, own.prompt_mask)
        if self.branches(guidance) == 1:
            return {IMAGE: -self._predict(sample, timestep, texts)}
        negative = _rows_of(*negative_of(own.negative_prompt_embeds, own.negative_prompt_mask))
        both = self._predict(twice(sample), twice(timestep), texts + negative)
        positive, unconditional = both.chunk(2)
        return {IMAGE: -(positive + (guidance.scale - 1.0) * (positive - unconditional))}

    def _predict(self, sample: Tensor, timestep: Tensor, texts: Sequence[Tensor]) -> Tensor:
        predicted: list[Tensor] = self.transformer(
            list(sample.to(self.dtype).unsqueeze(2).unbind(0)),
            (1000 - timestep) / 1000,  # the module counts from noise to data
            [text.to(self.dtype) for text in texts],
            return_dict=False,
        )[0]
        return self.widened(torch.stack(predicted)).squeeze(2)


def _rows_of(embeds: Tensor, mask: Tensor) -> list[Tensor]:
    """Cut padding off: [L_i, D] of each row."""
    lengths = mask.sum(1).tolist()
    return [row[:length] for row, length in zip(embeds, lengths, strict=True)]


class ZImageConditioner(StockConditioner):
    """`encode_prompt` of a ZImagePipeline that holds the tokenizer and the frozen encoder alone."""

    layout = TextLayout.MASKED

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> ZImageConditioning:
        """Encode G prompts, and the negative prompt G times where there is guidance.

        Raises:
            ValueError: a guidance scale below 1.
        """
        check_scale(guidance, "this family")
        text, mask = self._encode(list(prompts))
        if guidance.branches == 1:
            return ZImageConditioning(prompt_embeds=text, prompt_mask=mask)
        negative, negative_mask = self._encode([negative_prompt])
        rows = len(prompts)
        return ZImageConditioning(
            prompt_embeds=text,
            prompt_mask=mask,
            negative_prompt_embeds=negative.repeat(rows, 1, 1),
            negative_prompt_mask=negative_mask.repeat(rows, 1),
        )

    def _encode(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        texts, _ = self.pipeline.encode_prompt(
            prompt=prompts,  # changed in place by the pipeline
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        ones = [torch.ones(len(text), dtype=torch.int64, device=text.device) for text in texts]
        return pad_sequence(texts, batch_first=True), pad_sequence(ones, batch_first=True)


class ZImageFamily(FolderFamily):
    """Loads the parts of a ZImagePipeline folder."""

    name = "z_image"
    pipeline_classes = ("ZImagePipeline",)
    transformer_class = ZImageTransformer2DModel
    denoiser_class = ZImageDenoiser
    text_layout = TextLayout.MASKED
    lora_targets = ZImageDenoiser.targets

    def load_conditioner(self, dtype: torch.dtype) -> ZImageConditioner:
        """Read the tokenizer and the encoder.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline is made for.
        """
        return self.conditioner_of(ZImageConditioner, ZImagePipeline, dtype, most=MAX_TEXT)

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count with the chat template around a prompt, whose end is cut first."""
        length = self.config.pipeline.max_sequence_length
        texts = self.chat_texts(prompts, enable_thinking=True)
        return self.count_tokens("tokenizer", texts, limit=length)

    def load_codec(self, dtype: torch.dtype) -> KLCodec:
        """Read the autoencoder."""
        scale = self.autoencoder_scale(AutoencoderKL)
        return KLCodec(
            self.folder.load("vae", AutoencoderKL, dtype=dtype),
            channels=self.transformer_config["in_channels"],
            scale=scale,
            unit=scale * PATCH,
        )

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Count guidance from 0, as the stock pipeline does."""
        return {**super().stock_call(sampling), "guidance_scale": sampling.guidance_scale - 1.0}

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Evenly spaced sigmas, shifted by the scheduler's constant or by the size of the picture."""
        scheduler, steps = self.scheduler(), sampling.num_inference_steps
        unit = self.autoencoder_scale(AutoencoderKL) * PATCH
        size = self.config.pipeline
        tokens = (size.height // unit) * (size.width // unit)
        shift = shift_keywords(scheduler.config, calculate_shift, tokens, most=1.15)
        return sigmas_of(scheduler, sigmas=get_default_z_image_sigmas(steps), **shift)
