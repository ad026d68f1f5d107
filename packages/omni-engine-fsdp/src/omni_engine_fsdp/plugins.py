"""What this package offers by name. Imports no torch: listing plugins or checking a config is cheap."""

from __future__ import annotations

from omni_core.plugins import Plugin
from omni_core.recipe import NoOptions
from omni_engine_fsdp.options import EngineRolloutConfig, FSDPEngineConfig

diffusion_fsdp2 = Plugin(
    api=1,
    options=FSDPEngineConfig,
    target="omni_engine_fsdp.ppo:PPODiffusersFSDPEngine",
    summary="reverse-process policy gradient on diffusers models, sharded by FSDP2, with LoRA",
)

diffusion_forward_fsdp2 = Plugin(
    api=1,
    options=FSDPEngineConfig,
    target="omni_engine_fsdp.forward:ForwardDiffusersFSDPEngine",
    summary="losses on noised final samples of diffusers models, sharded by FSDP2, with LoRA",
)

engine_rollout = Plugin(
    api=1,
    options=EngineRolloutConfig,
    target="omni_engine_fsdp.rollout:EngineRollout",
    summary="samples with the trained module itself",
)

sd3 = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.sd3:SD3Family",
    summary="Stable Diffusion 3 and 3.5",
)

flux = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.flux:FluxFamily",
    summary="FLUX.1: dev (guidance scale as an input) and schnell",
)

flux2 = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.flux2:Flux2Family",
    summary="FLUX.2 [klein], base and distilled",
)

z_image = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.z_image:ZImageFamily",
    summary="Z-Image and Z-Image-Turbo",
)

sana = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.sana:SanaFamily",
    summary="SANA and SANA 1.5",
)

qwen_image = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.qwen_image:QwenImageFamily",
    summary="Qwen-Image",
)

qwen_image_edit = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.qwen_image_edit:QwenImageEditFamily",
    summary="Qwen-Image-Edit: image to image",
)

wan = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.wan:WanFamily",
    summary="Wan text-to-video, of one transformer (2.1) or two experts (2.2)",
)

ltx2 = Plugin(
    api=1,
    options=NoOptions,
    target="omni_engine_fsdp.families.ltx2:LTX2Family",
    summary="LTX-2: video with sound",
)
