"""SANA: linear attention over deeply compressed latents, Gemma text of one length, padding masked.

Prompts follow the instruction that is the stock pipeline's default. Folders come with DPM-Solver++,
whose timesteps are whole numbers and whose steps look back at the one before; here its sigmas are taken,
and stepped through one at a time at their exact timesteps. Letters: G prompts, B rows, L text tokens,
C H W latents. Source: arXiv 2410.10629 and the SanaPipeline of diffusers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderDC, SanaPipeline, SanaTransformer2DModel
from torch import Tensor

from omni_core.families.sana import SanaConditioning
from omni_core.model import Guidance, Step, TextLayout
from omni_core.options import DiffusionSamplingConfig
from omni_core.prompt_length import PromptLength
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.folder_family import EULER, FolderFamily, sigmas_of
from omni_engine_fsdp.families.image_codec import IMAGE, ImageCodec
from omni_engine_fsdp.families.text_encoders import StockConditioner
from omni_engine_fsdp.families.transformer import (
    ATTENTION,
    TransformerDenoiser,
    check_scale,
    conditioning_of,
    guided,
    negative_of,
    twice,
)

MAX_TEXT = 300
"""Tokens that the stock pipeline is made for."""
SIDE = 32
"""Sides of a picture are multiples of this: the stock pipeline checks it."""
SOLVER = "DPMSolverMultistepScheduler"


class SanaDenoiser(TransformerDenoiser):
    """The linear transformer with classifier-free guidance."""

    targets = ATTENTION
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
        own = conditioning_of(conditioning, SanaConditioning)
        sample, timestep = latents[IMAGE], step.timestep
        text, mask = own.prompt_embeds, own.prompt_mask
        if self.branches(guidance) == 1:
            return {IMAGE: self._predict(sample, timestep, text, mask)}
        negative, negative_mask = negative_of(own.negative_prompt_embeds, own.negative_prompt_mask)
        both = self._predict(
            twice(sample),
            twice(timestep),
            torch.cat([negative, text]),
            torch.cat([negative_mask, mask]),
        )
        return {IMAGE: guided(both, guidance)}

    def _predict(self, sample: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        transformer: Any = self.transformer
        predicted: Tensor = transformer(
            sample.to(self.dtype),
            encoder_hidden_states=text.to(self.dtype),
            encoder_attention_mask=mask,
            timestep=timestep * transformer.config.timestep_scale,
            return_dict=False,
        )[0]
        # Some are trained to predict a variance too, which is not used.
        return self.widened(predicted[:, : sample.shape[1]])


class SanaConditioner(StockConditioner):
    """`encode_prompt` of a SanaPipeline that holds the tokenizer and the frozen encoder alone."""

    layout = TextLayout.MASKED

    @torch.no_grad()
    def encode(
        self, prompts: Sequence[str], *, negative_prompt: str, guidance: Guidance
    ) -> SanaConditioning:
        """Encode G prompts, and the negative prompt G times where there is guidance.

        Raises:
            ValueError: a guidance scale below 1, which the stock pipeline takes for none.
        """
        check_scale(guidance, "SanaPipeline")
        text, mask, negative, negative_mask = self.pipeline.encode_prompt(
            list(prompts),
            guidance.branches == 2,
            negative_prompt=negative_prompt,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=stock_instruction(),
        )
        return SanaConditioning(
            prompt_embeds=text,
            prompt_mask=mask,
            negative_prompt_embeds=negative,
            negative_prompt_mask=negative_mask,
        )


def stock_instruction() -> list[str]:
    """Return what the stock pipeline puts before a prompt by default."""
    parameters = inspect.signature(SanaPipeline.__call__).parameters
    found: list[str] = parameters["complex_human_instruction"].default
    return found


class SanaCodec(ImageCodec):
    """The deep-compression autoencoder."""

    def to_pixels(self, latents: Tensor) -> Tensor:
        """Undo the scale, and decode."""
        pixels: Tensor = self.vae.decode(
            latents / self.vae.config.scaling_factor, return_dict=False
        )[0]
        return pixels


class SanaFamily(FolderFamily):
    """Loads the parts of a SanaPipeline folder."""

    name = "sana"
    pipeline_classes = ("SanaPipeline",)
    transformer_class = SanaTransformer2DModel
    denoiser_class = SanaDenoiser
    text_layout = TextLayout.MASKED
    lora_targets = SanaDenoiser.targets

    def load_conditioner(self, dtype: torch.dtype) -> SanaConditioner:
        """Read the tokenizer and the encoder.

        Raises:
            ValueError: `model.pipeline.max_sequence_length` is more than the stock pipeline is made for.
        """
        return self.conditioner_of(SanaConditioner, SanaPipeline, dtype, most=MAX_TEXT)

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count a prompt's own tokens, and two of the instruction before it."""
        length = self.config.pipeline.max_sequence_length
        instruction = "\n".join(stock_instruction())
        (before,) = self.count_tokens("tokenizer", [instruction], limit=length)
        found = self.count_tokens(
            "tokenizer", [instruction + each for each in prompts], limit=length
        )
        # Of the instruction its first and its last token are read along with the prompt.
        return [
            PromptLength(tokens=each.tokens - before.tokens + 2, limit=length) for each in found
        ]

    def load_codec(self, dtype: torch.dtype) -> SanaCodec:
        """Read the autoencoder."""
        vae = self.folder.load("vae", AutoencoderDC, dtype=dtype)
        return SanaCodec(
            vae,
            channels=self.transformer_config["in_channels"],
            scale=2 ** (len(vae.config.encoder_block_out_channels) - 1),
            unit=SIDE,
        )

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Draw the asked size itself, not one of the stock pipeline's bins."""
        return {**super().stock_call(sampling), "use_resolution_binning": False}

    def stock_schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Ask the pipeline's own scheduler.

        Raises:
            ValueError: the solver is not set up for flow matching.
        """
        scheduler = self.scheduler(EULER, SOLVER)
        if type(scheduler).__name__ == SOLVER and not scheduler.config.use_flow_sigmas:
            raise ValueError(
                f"{self.folder.root / 'scheduler'}: {SOLVER} with use_flow_sigmas false is not a "
                "flow-matching schedule"
            )
        return sigmas_of(scheduler, num_inference_steps=sampling.num_inference_steps)
