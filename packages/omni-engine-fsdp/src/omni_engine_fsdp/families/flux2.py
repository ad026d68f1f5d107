"""FLUX.2 [klein]: Qwen3 text of a fixed length, latents of 2 x 2 patches, classifier-free guidance.

Base models are guided against the negative prompt; distilled ones (`is_distilled` in model_index.json)
take no guidance. Letters: G prompts, B rows, L text tokens, C H W latents (patches).
Source: the Flux2KleinPipeline of diffusers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle

from omni_core.families.flux2 import Flux2Conditioning
from omni_core.model import Guidance, PositionFactors, SequencePlan, Step, TextLayout
from omni_core.options import DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.folder_family import FolderFamily, sigmas_of
from omni_engine_fsdp.families.image_codec import IMAGE, ImageCodec
from omni_engine_fsdp.families.packing import PATCH, grid_ids
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import (
    JOINT_ATTENTION,
    TEXT,
    TransformerDenoiser,
    check_scale,
    conditioning_of,
    float32_inputs,
    guided,
    negative_of,
    twice,
)

MAX_TEXT = 512
"""Tokens that the stock pipeline's tokenizer is cut at."""
AXES = 4
"""Of a token's place: time, row, column, place in the text."""


class Flux2Denoiser(TransformerDenoiser):
    """The transformer over patches, with classifier-free guidance."""

    targets = (*(f"attn.{name}" for name in JOINT_ATTENTION), "attn.to_qkv_mlp_proj")
    blocks = ("transformer_blocks", "single_transformer_blocks")
    branches_as_batch = True
    rowless_inputs = ("txt_ids", "img_ids")

    def sequence_plan(self, expert: nn.Module) -> SequencePlan:
        """Text and image meet in every block's attention, and the text is dropped behind the last block."""
        module: Any = expert
        last = len(module.single_transformer_blocks) - 1
        return SequencePlan(
            cut={"x_embedder": IMAGE, "context_embedder": TEXT},
            join={"proj_out": IMAGE},
            attention={"attn": (TEXT, IMAGE)},
            heads=module.config.num_attention_heads,
            factors={"pos_embed": PositionFactors(dim=0)},
            left_out={f"single_transformer_blocks.{last}": TEXT},
        )

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity; both branches are one batch, which the stock pipeline runs one by one.

        Returns:
            `image` -> [B, C, H, W], float32 (float64 where the transformer computes in it).

        Raises:
            ValueError: guidance is asked for and there is no negative prompt.
        """
        own = conditioning_of(conditioning, Flux2Conditioning)
        sample, timestep, text = latents[IMAGE], step.timestep, own.prompt_embeds
        if self.branches(guidance) == 1:
            return {IMAGE: self._predict(sample, timestep, text)}
        (negative,) = negative_of(own.negative_prompt_embeds)
        both = self._predict(twice(sample), twice(timestep), torch.cat([negative, text]))
        return {IMAGE: guided(both, guidance)}

    def _predict(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        transformer: Any = self.transformer
        sigma = timestep / 1000  # as the stock pipeline rounds it
        height, width = sample.shape[-2:]
        tokens = sample.flatten(2).transpose(1, 2).contiguous()
        sinusoids = transformer.time_guidance_embed.time_proj
        with float32_inputs(transformer, sinusoids, timestep=1000.0):
            predicted: Tensor = transformer(
                hidden_states=tokens.to(self.dtype),
                timestep=sigma,
                guidance=None,
                encoder_hidden_states=text.to(self.dtype),
                txt_ids=_text_ids(text.shape[1], sample.device),
                img_ids=grid_ids(height, width, AXES, sample.device),
                return_dict=False,
            )[0]
        return self.widened(predicted).transpose(1, 2).reshape(sample.shape)


def _text_ids(length: int, device: torch.device) -> Tensor:
    ids = torch.zeros(length, AXES, device=device)
    ids[:, -1] = torch.arange(length, device=device)
    return ids


class Flux2Conditioner(StockConditioner):
    """`encode_prompt` of a Flux2KleinPipeline that holds the tokenizer and the frozen encoder alone."""

    layout = TextLayout.FIXED
    distilled = False
    """Whether the model takes no guidance."""

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> Flux2Conditioning:
        """Encode G prompts, and the negative prompt G times where there is guidance.

        The stock pipeline's negative prompt is always empty; another one is encoded the same way.

        Raises:
            ValueError: a guidance scale that the stock pipeline takes for none, or that a distilled model
                ignores.
        """
        check_scale(guidance, "Flux2KleinPipeline")
        if self.distilled and guidance.branches == 2:
            raise ValueError(
                f"guidance_scale {guidance.scale}: this FLUX.2 is distilled (is_distilled in its "
                "model_index.json), and its stock pipeline ignores guidance; take 1.0"
            )
        text = self._encode(list(prompts))
        if guidance.branches == 1:
            return Flux2Conditioning(prompt_embeds=text)
        negative = self._encode([negative_prompt])
        return Flux2Conditioning(
            prompt_embeds=text,
            negative_prompt_embeds=negative.expand(text.shape).clone(),
        )

    def _encode(self, prompts: list[str]) -> Tensor:
        found: Tensor = self.pipeline.encode_prompt(
            prompt=prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )[0]
        return found


class Flux2Codec(ImageCodec):
    """The autoencoder: latents are normalised over patches, by statistics that come with its weights."""

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Undo the normalisation, unfold the patches, and decode."""
        norm: nn.BatchNorm2d = self.vae.bn
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        deviation = torch.sqrt(variance.view(1, -1, 1, 1) + self.vae.config.batch_norm_eps)
        whole = latents * deviation.to(latents) + mean.view(1, -1, 1, 1).to(latents)
        pixels: Tensor = self.vae.decode(pixel_shuffle(whole, PATCH), return_dict=False)[0]
        return pixels


class Flux2Family(FolderFamily):
    """Loads the parts of a Flux2KleinPipeline folder."""

    name = "flux2"
    pipeline_classes = ("Flux2KleinPipeline",)
    transformer_class = Flux2Transformer2DModel
    denoiser_class = Flux2Denoiser
    lora_targets = Flux2Denoiser.targets

    def load_conditioner(self, dtype: torch.dtype) -> Flux2Conditioner:
        """Read the tokenizer and the encoder.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline takes.
        """
        conditioner = self.conditioner_of(
            Flux2Conditioner, Flux2KleinPipeline, dtype, most=MAX_TEXT
        )
        conditioner.distilled = bool(self.folder.settings.get("is_distilled", False))
        return conditioner

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count with the chat template around a prompt, whose end is cut first."""
        length = self.config.pipeline.max_sequence_length
        texts = self.chat_texts(prompts, enable_thinking=False)
        return self.count_tokens("tokenizer", texts, limit=length)

    def load_codec(self, dtype: torch.dtype) -> Flux2Codec:
        """Read the autoencoder."""
        unit = self.autoencoder_scale(AutoencoderKLFlux2) * PATCH
        return Flux2Codec(
            self.folder.load("vae", AutoencoderKLFlux2, dtype=dtype),
            channels=self.transformer_config["in_channels"],
            scale=unit,
            unit=unit,
        )

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Leave the negative prompt out: the stock pipeline takes its embeddings alone."""
        return {k: v for k, v in super().stock_call(sampling).items() if k != "negative_prompt"}

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Evenly spaced sigmas, shifted by the size of the picture and the number of steps."""
        scheduler, steps = self.scheduler(), sampling.num_inference_steps
        unit = self.autoencoder_scale(AutoencoderKLFlux2) * PATCH
        size = self.config.pipeline
        tokens = (size.height // unit) * (size.width // unit)
        mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
        return sigmas_of(scheduler, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
