"""Qwen-Image-Edit: Qwen-Image whose sequence goes on with the latents of the image that a prompt edits.

The image is seen twice: by Qwen2.5-VL together with the prompt, and as latents by the transformer, whose
velocity for them is dropped. Letters: G prompts, C H W latents. Source: arXiv 2508.02324.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from diffusers import QwenImageEditPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL import Image
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor

from omni_core.families.qwen_image_edit import QwenImageEditConditioning
from omni_core.model import Codec, Denoiser, EditConditioner, Guidance, Step, TextLayout
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.image_codec import IMAGE
from omni_engine_fsdp.families.qwen_image import (
    MAX_TEXT,
    TEXT_ENCODER,
    QwenImageCodec,
    QwenImageDenoiser,
    QwenImageFamily,
    masked,
)
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import check_scale, conditioning_of
from omni_engine_fsdp.families.video_codec import scaled


class QwenImageEditDenoiser(QwenImageDenoiser):
    """The transformer of Qwen-Image over patches of both pictures, the sampled one first."""

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity as the stock pipeline does; both branches are one batch.

        Returns:
            `image` -> [B, C, H, W], float32 (float64 where the transformer computes in it).

        Raises:
            ValueError: guidance is asked for and there is no negative prompt.
        """
        own = conditioning_of(conditioning, QwenImageEditConditioning)
        found = self._guided(latents[IMAGE], step, own, guidance, beside=own.image_latents)
        return {IMAGE: found}


class QwenImageEditCodec(QwenImageCodec):
    """Encodes too, as the stock pipeline does: the mean of what the autoencoder finds."""

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Encode uint8 [B, H, W, 3], one after the other, to [B, C, H', W']."""
        pixels = 2.0 * (images.permute(0, 3, 1, 2).float() / 255.0) - 1.0
        parts = [
            self.vae.encode(each.to(self.vae.device, self.vae.dtype)).latent_dist.mode()
            for each in pixels.unsqueeze(2)[:, None]
        ]
        return scaled(torch.cat(parts), self.vae)[:, :, 0]


class PicturesAndText(Qwen2VLProcessor):
    """The stock processor without videos, for which it would need torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)  # type: ignore[no-untyped-call]


class QwenImageEditConditioner(EditConditioner, StockConditioner):
    """`encode_prompt` of a QwenImageEditPipeline that holds its processor and frozen encoder alone."""

    layout = TextLayout.MASKED
    size: tuple[int, int]
    """Width and height, in pixels, that every input image is brought to."""

    @torch.no_grad()
    def encode_edits(
        self,
        prompts: Sequence[str],
        images: Sequence[Tensor],
        codec: Codec,
        *,
        negative_prompt: str,
        guidance: Guidance,
    ) -> QwenImageEditConditioning:
        """Encode G prompts with their images; the negative prompt sees each image, too.

        Raises:
            ValueError: a guidance scale below 1, which the stock pipeline takes for none.
        """
        check_scale(guidance, "QwenImageEditPipeline")
        pictures = [self._resized(image) for image in images]
        pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in pictures])
        text, mask = self._encoded(prompts, pictures)
        found = QwenImageEditConditioning(
            prompt_embeds=text,
            prompt_mask=mask,
            image_latents=codec.encode(pixels).to(self.device),
        )
        if guidance.branches == 1:
            return found
        text, mask = self._encoded([negative_prompt] * len(prompts), pictures)
        return attrs.evolve(found, negative_prompt_embeds=text, negative_prompt_mask=mask)

    def _encoded(
        self, prompts: Sequence[str], pictures: Sequence[Image.Image]
    ) -> tuple[Tensor, Tensor]:
        return masked(
            self.pipeline.encode_prompt(
                prompt=list(prompts),
                image=list(pictures),
                device=self.device,
                max_sequence_length=self.max_sequence_length,
            )
        )

    def _resized(self, image: Tensor) -> Image.Image:
        width, height = self.size
        resized: Image.Image = VaeImageProcessor().resize(
            Image.fromarray(image.cpu().numpy()), height, width
        )
        return resized


class QwenImageEditFamily(QwenImageFamily):
    """Loads the parts of a QwenImageEditPipeline folder."""

    name = "qwen_image_edit"
    pipeline_classes = ("QwenImageEditPipeline",)
    tasks = ("image-to-image",)
    inputs = ("text", "image")
    denoiser_class = QwenImageEditDenoiser

    def load_denoiser(self, dtype: torch.dtype) -> Denoiser:
        """Read the transformer; its weights are kept in *dtype* and it computes in `model.dtype`.

        Raises:
            ValueError: it is distilled, or conditions input images on a timestep of their own, as
                QwenImageEditPlusPipeline's newest does.
        """
        if self.transformer_config.get("zero_cond_t"):
            raise ValueError(
                f"{self.folder.root}: family {self.name!r} takes models without zero_cond_t"
            )
        return super().load_denoiser(dtype)

    def load_conditioner(self, dtype: torch.dtype) -> QwenImageEditConditioner:
        """Read processor and encoder.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline takes, or
                `input_image_area` leaves nothing of an image.
        """
        self.folder.require("text_encoder", TEXT_ENCODER)
        size = self.input_size()
        conditioner = self.conditioner_of(
            QwenImageEditConditioner,
            QwenImageEditPipeline,
            dtype,
            most=MAX_TEXT,
            processor=self.load_processor(),
        )
        conditioner.size = size
        return conditioner

    def load_processor(self) -> PicturesAndText:
        """Read the processor."""
        self.folder.require("processor", "Qwen2VLProcessor")
        stored: dict[str, Any] = {"subfolder": "processor", "local_files_only": True}
        return PicturesAndText(
            Qwen2VLImageProcessor.from_pretrained(self.folder.root, **stored),
            Qwen2Tokenizer.from_pretrained(self.folder.root, **stored),
        )

    def input_size(self) -> tuple[int, int]:
        """Width and height that input images are brought to, as the stock pipeline reckons them.

        Raises:
            ValueError: one is 0.
        """
        size = self.config.pipeline
        reckon: Any = calculate_dimensions
        width, height, _ = reckon(size.input_image_area, size.width / size.height)
        if 0 in (width, height):
            raise ValueError(
                f"model.pipeline.input_image_area {size.input_image_area}: an image of {size.width} to "
                f"{size.height} would be {width} x {height} pixels; take more"
            )
        return width, height

    def load_codec(self, dtype: torch.dtype) -> QwenImageEditCodec:
        """Read the autoencoder."""
        return self.codec_of(QwenImageEditCodec, dtype)

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count the prompt's own tokens: the stock pipeline cuts none of them off."""
        return self.count_tokens("tokenizer", prompts)
