"""Stable Diffusion 3 and 3.5: one transformer, two CLIP encoders and T5, fixed text length.

Everything that conditions the model comes from the stock pipeline's own code, so that what is
trained is what stock diffusers runs. Letters: G prompts, B rows, L = CLIP tokens + T5 tokens, D and P
text widths, C H W latents. Source: Esser et al., arXiv 2403.03206.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from torch import Tensor, nn

from omni_core.families.sd3 import SD3Conditioning
from omni_core.model import (
    Codec,
    Conditioner,
    Denoiser,
    Guidance,
    ModelFamily,
    Step,
    TextLayout,
)
from omni_core.options import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.reverse_step import Latents
from omni_core.schedule import NUM_TRAIN_TIMESTEPS, FlowMatchSchedule
from omni_core.trajectory import Conditioning, Media
from omni_engine_fsdp.families.folder import PipelineFolder, quiet_loading

EXPERT = "transformer"
IMAGE = "image"
MAX_TEXT = 512
"""T5 tokens that the stock pipeline takes at most."""


class SD3Denoiser(Denoiser):
    """The MMDiT transformer with classifier-free guidance."""

    def __init__(self, transformer: nn.Module, dtype: torch.dtype) -> None:
        self.transformer = transformer
        self.dtype = dtype
        """What latents and conditioning are cast to: the transformer's computation."""

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        """One: `transformer`."""
        return {EXPERT: self.transformer}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The attention projections of both streams, as Flow-GRPO adapts them (arXiv 2505.05470)."""
        names = "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out"
        return tuple(f"attn.{name}" for name in names.split())

    def shard_units(self, expert: nn.Module) -> Sequence[nn.Module]:
        """Return the transformer blocks."""
        blocks: Any = expert.transformer_blocks
        return list(blocks)

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        """Predict the velocity as the stock pipeline does: both branches as one batch.

        The timestep stays float32 up to the transformer, which computes its sinusoids in float32
        and casts those: in bf16 it would be conditioned on 976 instead of 978.26. A wrapper around
        the transformer must therefore not cast its inputs (FSDP2: `cast_forward_inputs=False`).

        Returns:
            `image` -> [B, C, H, W], float32 (float64 where the transformer computes in it); branches
            are combined in that precision.

        Raises:
            ValueError: guidance is asked for and there is no negative prompt.
        """
        if not isinstance(conditioning, SD3Conditioning):
            raise TypeError(f"expected SD3Conditioning, got {type(conditioning).__name__}")
        sample = latents[IMAGE].to(self.dtype)
        timestep = step.timestep
        text, pooled = conditioning.prompt_embeds, conditioning.pooled
        guided = guidance.branches == 2
        if guided:
            negative, negative_pooled = _negative(conditioning)
            sample = torch.cat([sample, sample])
            timestep = torch.cat([timestep, timestep])
            text = torch.cat([negative, text])
            pooled = torch.cat([negative_pooled, pooled])
        predicted: Tensor = self.transformer(
            hidden_states=sample,
            timestep=timestep,
            encoder_hidden_states=text.to(self.dtype),
            pooled_projections=pooled.to(self.dtype),
            return_dict=False,
        )[0]
        predicted = predicted.to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        if guided:
            unconditional, conditional = predicted.chunk(2)
            predicted = unconditional + guidance.scale * (conditional - unconditional)
        return {IMAGE: predicted}


def _negative(conditioning: SD3Conditioning) -> tuple[Tensor, Tensor]:
    if conditioning.negative_prompt_embeds is None or conditioning.negative_pooled is None:
        raise ValueError(
            "guidance needs a negative prompt, and this conditioning was encoded without guidance"
        )
    return conditioning.negative_prompt_embeds, conditioning.negative_pooled


class SD3Conditioner(Conditioner):
    """`encode_prompt` of a StableDiffusion3Pipeline that holds tokenizers and frozen encoders alone."""

    layout = TextLayout.FIXED

    def __init__(self, pipeline: Any, *, max_sequence_length: int) -> None:
        self.max_sequence_length = max_sequence_length
        self._pipeline = pipeline
        self._device = torch.device("cpu")
        for encoder in self._encoders():
            encoder.eval().requires_grad_(False)

    def _encoders(self) -> list[nn.Module]:
        parts = [self._pipeline.text_encoder, self._pipeline.text_encoder_2]
        return [*parts, *filter(None, [self._pipeline.text_encoder_3])]

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> SD3Conditioning:
        """Encode G prompts, and the negative prompt G times where there is guidance.

        Raises:
            ValueError: a guidance scale below 1, which the stock pipeline takes for none.
        """
        if guidance.scale < 1.0:
            raise ValueError(
                f"guidance_scale {guidance.scale}: StableDiffusion3Pipeline guides above 1 only; "
                "take 1.0 for no guidance"
            )
        text, negative, pooled, negative_pooled = self._pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            device=self._device,
            do_classifier_free_guidance=guidance.branches == 2,
            negative_prompt=negative_prompt,
            max_sequence_length=self.max_sequence_length,
        )
        return SD3Conditioning(
            prompt_embeds=text,
            pooled=pooled,
            negative_prompt_embeds=negative,
            negative_pooled=negative_pooled,
        )

    def to(self, device: torch.device | str) -> None:
        """Move the encoders."""
        self._device = torch.device(device)
        for encoder in self._encoders():
            encoder.to(self._device)


class SD3Codec(Codec):
    """The pipeline's AutoencoderKL, decoding only."""

    def __init__(self, vae: Any, transformer_config: Mapping[str, Any]) -> None:
        self.vae = vae.eval().requires_grad_(False)
        self.scale = _vae_scale(vae)
        self.channels: int = transformer_config["in_channels"]
        self.unit = self.scale * int(transformer_config["patch_size"])
        """Sides of a picture are multiples of this, in pixels."""
        self.largest = self.unit * int(transformer_config["pos_embed_max_size"])
        """The longest side, in pixels."""
        self._processor = VaeImageProcessor(vae_scale_factor=self.scale)

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
            if (said := self._side_mistake(name, pixels))
        ]
        if mistakes:
            raise ValueError("; ".join(mistakes))
        sides = (pipeline.height // self.scale, pipeline.width // self.scale)
        return {IMAGE: (self.channels, *sides)}

    def _side_mistake(self, name: str, pixels: int) -> str | None:
        if pixels % self.unit == 0 and 0 < pixels <= self.largest:
            return None
        below = min(max(pixels // self.unit * self.unit, self.unit), self.largest)
        above = min(-(-pixels // self.unit) * self.unit, self.largest)
        fits = " or ".join(str(side) for side in sorted({below, above}))
        return (
            f"{name} {pixels} does not fit: a multiple of {self.unit} up to {self.largest} does; "
            f"nearest: {fits}"
        )

    @torch.no_grad()
    def decode(self, latents: Latents) -> Media:
        """Decode final latents [B, C, H, W] to the pixels of the stock pipeline's PIL images."""
        config = self.vae.config
        sample = latents[IMAGE].to(device=self.vae.device, dtype=self.vae.dtype)
        pixels = self.vae.decode(
            sample / config.scaling_factor + config.shift_factor, return_dict=False
        )[0]
        pixels = self._processor.postprocess(pixels, output_type="pt").float()
        return Media(image=(pixels * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1))

    def to(self, device: torch.device | str) -> None:
        """Move the autoencoder."""
        self.vae.to(device)


def _vae_scale(vae: Any) -> int:
    scale: int = 2 ** (len(vae.config.block_out_channels) - 1)
    return scale


class SD3Family(ModelFamily):
    """Loads the parts of a StableDiffusion3Pipeline folder."""

    pipeline_classes = ("StableDiffusion3Pipeline",)

    def __init__(self, config: DiffusionModelConfig) -> None:
        super().__init__(config)

    @cached_property
    def folder(self) -> PipelineFolder:
        """The folder at `model.path`, checked to be of this family."""
        folder = PipelineFolder.open(self.config.path)
        folder.expect("sd3", self.pipeline_classes)
        return folder

    @cached_property
    def _transformer(self) -> Any:
        return self.folder.skeleton("transformer", SD3Transformer2DModel)

    def load_denoiser(self, dtype: torch.dtype) -> SD3Denoiser:
        """Read the transformer; its weights are kept in *dtype* and it computes in `model.dtype`."""
        transformer = self.folder.load("transformer", SD3Transformer2DModel, dtype=dtype)
        return SD3Denoiser(transformer, getattr(torch, self.config.dtype.value))

    def load_conditioner(self, dtype: torch.dtype) -> SD3Conditioner:
        """Read tokenizers and encoders; without a third encoder, T5's part is zeros as in stock.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline takes.
        """
        length = self.config.pipeline.max_sequence_length
        if length > MAX_TEXT:
            raise ValueError(
                f"model.pipeline.max_sequence_length {length}: StableDiffusion3Pipeline takes at "
                f"most {MAX_TEXT}"
            )
        for name in ("text_encoder", "text_encoder_2"):
            self.folder.require(name, "CLIPTextModelWithProjection")
        absent: dict[str, Any] = {"transformer": None}
        if "text_encoder_3" in self.folder.components:
            self.folder.require("text_encoder_3", "T5EncoderModel")
        else:
            # T5's width is read off the transformer then, which needs no weights for that.
            absent = {"transformer": self._transformer, "text_encoder_3": None, "tokenizer_3": None}
        stock: Any = StableDiffusion3Pipeline
        with quiet_loading():
            pipeline = stock.from_pretrained(
                self.folder.root,
                **absent,
                vae=None,
                image_encoder=None,
                feature_extractor=None,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
            )
        return SD3Conditioner(pipeline, max_sequence_length=length)

    def load_codec(self, dtype: torch.dtype) -> SD3Codec:
        """Read the autoencoder."""
        vae = self.folder.load("vae", AutoencoderKL, dtype=dtype)
        return SD3Codec(vae, self._transformer.config)

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Ask the pipeline's own scheduler, with the resolution's shift where it is dynamic.

        Since diffusers 0.40 the scheduler's default path applies its shift twice; what stock does is
        what the model is used with, so it is taken as it is.
        """
        self.folder.require("scheduler", "FlowMatchEulerDiscreteScheduler")
        stock: Any = FlowMatchEulerDiscreteScheduler
        scheduler = stock.from_pretrained(
            self.folder.root, subfolder="scheduler", local_files_only=True
        )
        if scheduler.config.num_train_timesteps != NUM_TRAIN_TIMESTEPS:
            raise ValueError(
                f"{self.folder.root / 'scheduler'}: num_train_timesteps must be "
                f"{NUM_TRAIN_TIMESTEPS}, got {scheduler.config.num_train_timesteps}"
            )
        keywords = {}
        if scheduler.config.use_dynamic_shifting:
            keywords["mu"] = self._dynamic_shift(scheduler.config)
        scheduler.set_timesteps(sampling.num_inference_steps, **keywords)
        return FlowMatchSchedule(scheduler.sigmas)

    def _dynamic_shift(self, config: Mapping[str, Any]) -> float:
        """`mu` of the configured size, as the stock pipeline computes it."""
        unit = _vae_scale(self.folder.skeleton("vae", AutoencoderKL))
        unit *= self._transformer.config.patch_size
        pipeline = self.config.pipeline
        tokens = (pipeline.height // unit) * (pipeline.width // unit)
        shift: float = calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
        return shift
