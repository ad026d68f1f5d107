"""Stable Diffusion 3 and 3.5 in vLLM-Omni."""

from __future__ import annotations

from typing import Any

from omni_core.families.sd3 import SD3Conditioning
from omni_core.trajectory import SamplingSpec
from omni_rollout_vllm.families.family import IMAGE, Encoded, EngineFamily, Folder, check_sides


class SD3(EngineFamily):
    """Latents [B, C, H, W]; `encode_prompt` returns text and pooled text."""

    name = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    pipeline_module = "vllm_omni.diffusion.models.sd3.pipeline_sd3"
    float_timestep = True

    def guidance_fields(self, scale: float) -> dict[str, Any]:
        """It guides where the scale is above 1."""
        return {"guidance_scale": scale}

    def latent_shapes(self, folder: Folder, spec: SamplingSpec) -> dict[str, tuple[int, ...]]:
        """`image` -> (C, height / scale, width / scale)."""
        transformer, vae = folder.config("transformer"), folder.config("vae")
        scale = 2 ** (len(vae["block_out_channels"]) - 1)
        unit = scale * int(transformer["patch_size"])
        check_sides(spec, unit=unit, largest=unit * int(transformer["pos_embed_max_size"]))
        return {IMAGE: (int(transformer["in_channels"]), spec.height // scale, spec.width // scale)}

    def conditioning(self, positive: Encoded, negative: Encoded | None) -> SD3Conditioning:
        """(text, pooled) of each branch."""
        return SD3Conditioning(
            prompt_embeds=positive[0],
            pooled=positive[1],
            negative_prompt_embeds=None if negative is None else negative[0],
            negative_pooled=None if negative is None else negative[1],
        )
