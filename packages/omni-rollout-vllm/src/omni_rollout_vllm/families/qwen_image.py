"""Qwen-Image in vLLM-Omni: latents are packed into 2 x 2 patches, texts have their own lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from omni_core.families.qwen_image import QwenImageConditioning
from omni_core.reverse_step import Latents
from omni_core.trajectory import SamplingSpec
from omni_rollout_vllm.families.family import IMAGE, Encoded, EngineFamily, Folder, check_sides


class QwenImage(EngineFamily):
    """Latents [B, C, H, W] are [B, H/2 * W/2, 4 C] in the pipeline; text comes with a mask."""

    name = "qwen_image"
    pipeline_class = "QwenImagePipeline"
    pipeline_module = "vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image"

    def guidance_fields(self, scale: float) -> dict[str, Any]:
        """Its true CFG; the distilled guidance stays off."""
        return {"true_cfg_scale": scale, "guidance_scale": 1.0}

    def latent_shapes(self, folder: Folder, spec: SamplingSpec) -> dict[str, tuple[int, ...]]:
        """`image` -> (C, height / scale, width / scale)."""
        vae, transformer = folder.config("vae"), folder.config("transformer")
        scale = 2 ** len(vae["temperal_downsample"])
        check_sides(spec, unit=2 * scale)
        channels = int(transformer["in_channels"]) // 4
        return {IMAGE: (channels, spec.height // scale, spec.width // scale)}

    def to_engine(self, latents: Latents) -> Tensor:
        """Pack 2 x 2 patches."""
        value = latents[IMAGE]
        rows, channels, height, width = value.shape
        patches = value.reshape(rows, channels, height // 2, 2, width // 2, 2)
        return patches.permute(0, 2, 4, 1, 3, 5).reshape(
            rows, (height // 2) * (width // 2), channels * 4
        )

    def from_engine(
        self, value: Tensor, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Undo it."""
        channels, height, width = shapes[IMAGE]
        patches = value.reshape(len(value), height // 2, width // 2, channels, 2, 2)
        return {
            IMAGE: patches.permute(0, 3, 1, 4, 2, 5).reshape(len(value), channels, height, width)
        }

    def join(self, rows: Sequence[Encoded]) -> Encoded:
        """Pad texts to the longest, masked."""
        longest = max(text.shape[1] for text, _ in rows)
        texts = [pad(text, (0, 0, 0, longest - text.shape[1])) for text, _ in rows]
        masks = [pad(mask, (0, longest - mask.shape[1])) for _, mask in rows]
        return torch.cat(texts), torch.cat(masks)

    def conditioning(self, positive: Encoded, negative: Encoded | None) -> QwenImageConditioning:
        """(text, mask) of each branch."""
        return QwenImageConditioning(
            prompt_embeds=positive[0],
            prompt_mask=positive[1],
            negative_prompt_embeds=None if negative is None else negative[0],
            negative_prompt_mask=None if negative is None else negative[1],
        )
