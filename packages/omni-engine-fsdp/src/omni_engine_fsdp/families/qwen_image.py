"""Qwen-Image: one transformer, Qwen2.5-VL as text encoder, texts of their own length under a mask.

Guidance brings every token of the combined branches back to the conditional branch's norm. Letters:
G prompts, B rows, C H W latents, P = H/2 * W/2 patches, L tokens, D text width. Source: arXiv 2508.02324.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor, nn

from omni_core.families.masked_text import MaskedTextConditioning
from omni_core.families.qwen_image import QwenImageConditioning
from omni_core.model import (
    Conditioner,
    Denoiser,
    Guidance,
    PositionFactors,
    SequencePlan,
    Step,
    TextLayout,
)
from omni_core.options import DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.folder_family import FolderFamily, shift_keywords, sigmas_of
from omni_engine_fsdp.families.image_codec import IMAGE, ImageCodec
from omni_engine_fsdp.families.packing import PATCH, pack, unpack
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import (
    JOINT_ATTENTION,
    TEXT,
    TransformerDenoiser,
    check_scale,
    conditioning_of,
    float32_inputs,
    negative_of,
    twice,
)
from omni_engine_fsdp.families.video_codec import unscaled

TEXT_ENCODER = "Qwen2_5_VLForConditionalGeneration"
MAX_TEXT = 1024
"""Tokens that the stock pipeline takes at most."""


class QwenImageDenoiser(TransformerDenoiser):
    """The MMDiT transformer over patches of 2 x 2 latents, with classifier-free guidance.

    LoRA adapts the attention projections of both streams.
    """

    targets = tuple(f"attn.{name}" for name in JOINT_ATTENTION)
    branches_as_batch = True

    def sequence_plan(self, expert: nn.Module) -> SequencePlan | None:
        """Text and image meet in every block's attention, under a mask; None with `zero_cond_t`.

        Its positions have one of two times each. Blocks cut, for the transformer compares the lengths
        of the text and of its mask.
        """
        module: Any = expert
        if module.config.zero_cond_t:
            return None
        blocks = [f"transformer_blocks.{i}" for i in range(len(module.transformer_blocks))]
        inputs = {block: {"encoder_hidden_states_mask": TEXT} for block in blocks}
        inputs[blocks[0]] |= {"hidden_states": IMAGE, "encoder_hidden_states": TEXT}
        return SequencePlan(
            cut={},
            join={"proj_out": IMAGE},
            attention={"attn": (TEXT, IMAGE)},
            heads=module.config.num_attention_heads,
            inputs=inputs,
            factors={"pos_embed": PositionFactors(dim=0)},
        )

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity as the stock pipeline does; both branches are one batch.

        Returns:
            `image` -> [B, C, H, W], float32 (float64 where the transformer computes in it); branches
            are combined in that precision.

        Raises:
            ValueError: guidance is asked for and there is no negative prompt.
        """
        own = conditioning_of(conditioning, QwenImageConditioning)
        return {IMAGE: self._guided(latents[IMAGE], step, own, guidance)}

    def _guided(
        self,
        sample: Tensor,
        step: Step,
        own: MaskedTextConditioning,
        guidance: Guidance,
        beside: Tensor | None = None,
    ) -> Tensor:
        """Predict for latents [B, C, H, W], looking also at those *beside* them, [B, C, H', W']."""
        sigma = step.timestep / 1000.0
        shown = [sample] if beside is None else [sample, beside.to(sample)]
        if self.branches(guidance) == 1:
            found = self._predict(shown, sigma, own.prompt_embeds, own.prompt_mask)
        else:
            text, mask = both_branches(own)
            both = self._predict([twice(each) for each in shown], twice(sigma), text, mask)
            found = guided_at_norm(both, guidance)
        return unpack(found, sample)

    def _predict(
        self, shown: Sequence[Tensor], sigma: Tensor, text: Tensor, mask: Tensor
    ) -> Tensor:
        """Predict for the first of pictures [B, C, H, W] that are one sequence: patches [B, P, 4 C]."""
        transformer: Any = self.transformer
        parts = [pack(picture) for picture in shown]
        sides = [(1, each.shape[-2] // PATCH, each.shape[-1] // PATCH) for each in shown]
        with float32_inputs(transformer, transformer.time_text_embed.time_proj, timestep=1.0):
            predicted: Tensor = transformer(
                hidden_states=torch.cat(parts, dim=1).to(self.dtype),
                timestep=sigma,
                encoder_hidden_states=text.to(self.dtype),
                encoder_hidden_states_mask=mask.bool(),
                img_shapes=[sides] * len(text),
                return_dict=False,
            )[0]
        return self.widened(predicted[:, : parts[0].shape[1]])


def both_branches(own: MaskedTextConditioning) -> tuple[Tensor, Tensor]:
    """Text [2B, L, D] and mask [2B, L] of both branches, the negative one first.

    Raises:
        ValueError: there is no negative prompt.
    """
    text, mask = negative_of(own.negative_prompt_embeds, own.negative_prompt_mask)
    negative = QwenImageConditioning(prompt_embeds=text, prompt_mask=mask)
    positive = QwenImageConditioning(prompt_embeds=own.prompt_embeds, prompt_mask=own.prompt_mask)
    joined = QwenImageConditioning.concat([negative, positive])
    return joined.prompt_embeds, joined.prompt_mask


def guided_at_norm(both: Tensor, guidance: Guidance) -> Tensor:
    """Combine branches, and scale each token to the norm that it has in the conditional one.

    Args:
        both: [2B, P, 4 C], the negative branch first.
        guidance: Its scale.
    """
    negative, positive = both.chunk(2)
    combined = negative + guidance.scale * (positive - negative)
    norms = [torch.linalg.vector_norm(v, dim=-1, keepdim=True) for v in (positive, combined)]
    scaled: Tensor = combined * (norms[0] / norms[1])
    return scaled


class QwenImageConditioner(StockConditioner):
    """`encode_prompt` of a QwenImagePipeline that holds its tokenizer and frozen encoder alone."""

    layout = TextLayout.MASKED

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> QwenImageConditioning:
        """Encode G prompts, and the negative prompt once where there is guidance.

        Raises:
            ValueError: a guidance scale below 1, which the stock pipeline takes for none.
        """
        check_scale(guidance, "QwenImagePipeline")
        text, mask = self._encoded(prompts)
        if guidance.branches == 1:
            return QwenImageConditioning(prompt_embeds=text, prompt_mask=mask)
        negative = [
            value.expand(len(text), *value.shape[1:]).clone()
            for value in self._encoded([negative_prompt])
        ]
        return QwenImageConditioning(
            prompt_embeds=text,
            prompt_mask=mask,
            negative_prompt_embeds=negative[0],
            negative_prompt_mask=negative[1],
        )

    def _encoded(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        return masked(
            self.pipeline.encode_prompt(
                prompt=list(prompts),
                device=self.device,
                max_sequence_length=self.max_sequence_length,
            )
        )


def masked(encoded: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return text and mask int64 as `encode_prompt` gives them, which leaves out a mask of ones."""
    text, mask = encoded
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.int64, device=text.device)
    return text, mask.to(torch.int64)


class QwenImageCodec(ImageCodec):
    """The pipeline's AutoencoderKLQwenImage, decoding only: a picture is a video of one frame to it."""

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Undo the channel-wise scaling, and decode."""
        sample = unscaled(latents.unsqueeze(2), self.vae)
        pixels: Tensor = self.vae.decode(sample, return_dict=False)[0]
        return pixels[:, :, 0]


Q = TypeVar("Q", bound=QwenImageCodec)


class QwenImageFamily(FolderFamily):
    """Loads the parts of a QwenImagePipeline folder."""

    name = "qwen_image"
    pipeline_classes = ("QwenImagePipeline",)
    transformer_class = QwenImageTransformer2DModel
    text_layout = TextLayout.MASKED
    lora_targets = QwenImageDenoiser.targets
    denoiser_class = QwenImageDenoiser

    def load_denoiser(self, dtype: torch.dtype) -> Denoiser:
        """Read the transformer; its weights are kept in *dtype* and it computes in `model.dtype`.

        Raises:
            ValueError: it is distilled: its guidance is an input, which no published model has.
        """
        if self.transformer_config["guidance_embeds"]:
            raise ValueError(
                f"{self.folder.root}: family {self.name!r} takes models without guidance_embeds"
            )
        return super().load_denoiser(dtype)

    def load_conditioner(self, dtype: torch.dtype) -> Conditioner:
        """Read tokenizer and encoder.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline takes.
        """
        self.folder.require("text_encoder", TEXT_ENCODER)
        return self.conditioner_of(QwenImageConditioner, QwenImagePipeline, dtype, most=MAX_TEXT)

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count as the mask does: a prompt's tokens and the end of the stock template after them."""
        stock: Any = QwenImagePipeline
        empty = stock(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
        length = self.config.pipeline.max_sequence_length
        texts = [empty.prompt_template_encode.format(prompt) for prompt in prompts]
        dropped = empty.prompt_template_encode_start_idx
        return [
            PromptLength(tokens=found.tokens - dropped, limit=length)
            for found in self.count_tokens("tokenizer", texts, limit=length)
        ]

    def load_codec(self, dtype: torch.dtype) -> QwenImageCodec:
        """Read the autoencoder."""
        return self.codec_of(QwenImageCodec, dtype)

    def codec_of(self, kind: type[Q], dtype: torch.dtype) -> Q:
        """Read the autoencoder, for a codec of a kind."""
        vae = self.folder.load("vae", AutoencoderKLQwenImage, dtype=dtype)
        scale = self._scale()
        channels = int(self.transformer_config["in_channels"]) // PATCH**2
        return kind(vae, channels=channels, scale=scale, unit=PATCH * scale)

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Name the scale as the stock pipeline does, which reads a negative prompt above 1 alone."""
        call = super().stock_call(sampling)
        scale = call.pop("guidance_scale")
        if scale == 1.0:
            call.pop("negative_prompt")
        return {**call, "true_cfg_scale": scale}

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Ask the pipeline's own scheduler, with even sigmas and the configured size's shift, as it does."""
        steps = sampling.num_inference_steps
        scheduler = self.scheduler()
        unit = PATCH * self._scale()
        size = self.config.pipeline
        tokens = (size.height // unit) * (size.width // unit)
        return sigmas_of(
            scheduler,
            sigmas=np.linspace(1.0, 1.0 / steps, steps),
            **shift_keywords(scheduler.config, calculate_shift, tokens, 1.15),
        )

    def _scale(self) -> int:
        """Pixels on a side of one latent."""
        vae = self.folder.skeleton("vae", AutoencoderKLQwenImage)
        scale: int = 2 ** len(vae.temperal_downsample)
        return scale
