"""The recipes that ship here. Imports neither torch nor YAML."""

from __future__ import annotations

from omni_core.plugins import Plugin
from omni_core.recipe import NoOptions


def _recipe(name: str, summary: str) -> Plugin:
    return Plugin(api=1, options=NoOptions, target=f"omni_configs.recipes:{name}", summary=summary)


quickstart = _recipe("quickstart", "FlowGRPO teaches a tiny pipeline to write numbers, in minutes")
spelling = _recipe("spelling", "FlowGRPO teaches a tiny pipeline that misspells numbers to spell")
smoke = _recipe("smoke", "two steps of the quickstart in this process: does it run here?")
qwen_image_ocr_flow_grpo = _recipe(
    "qwen_image_ocr_flow_grpo", "VeRL-Omni's published OCR settings for Qwen-Image"
)
tiny_flow_grpo_full = _recipe(
    "tiny_flow_grpo_full", "FlowGRPO on every weight of the tiny pipeline, with a KL and an average"
)
sd3_ocr_flow_grpo = _recipe("sd3_ocr_flow_grpo", "Flow-GRPO's published OCR settings for SD3.5-M")
sd3_ocr_verl_omni = _recipe("sd3_ocr_verl_omni", "VeRL-Omni's OCR settings for SD3.5-M")
sd3_pickscore_flow_grpo = _recipe(
    "sd3_pickscore_flow_grpo", "Flow-GRPO's published PickScore settings for SD3.5-M"
)

flux_pickscore_flow_grpo = _recipe(
    "flux_pickscore_flow_grpo", "Flow-GRPO's published PickScore settings for FLUX.1-dev"
)

qwen_image_edit_pickscore_flow_grpo = _recipe(
    "qwen_image_edit_pickscore_flow_grpo",
    "VeRL-Omni's PickScore settings for Qwen-Image-Edit-2511, on Qwen-Image-Edit",
)
wan22_dance_grpo = _recipe("wan22_dance_grpo", "DanceGRPO on both experts of Wan2.2 text-to-video")
ltx2_flow_grpo = _recipe(
    "ltx2_flow_grpo", "VeRL-Omni's published settings for LTX-2.3, on LTX-2's video with sound"
)


def _by_algorithm(name: str, summary: str) -> Plugin:
    target = f"omni_configs.recipes.by_algorithm:{name}"
    return Plugin(api=1, options=NoOptions, target=target, summary=summary)


tiny_awm = _by_algorithm("tiny_awm", "AWM on the tiny pipeline")
tiny_dance_grpo = _by_algorithm("tiny_dance_grpo", "DanceGRPO on the tiny pipeline")
tiny_distillation = _by_algorithm(
    "tiny_distillation", "online distillation on the tiny pipeline, from a teacher of one's own"
)
tiny_dgpo = _by_algorithm("tiny_dgpo", "DGPO on the tiny pipeline")
tiny_diffusion_dpo = _by_algorithm(
    "tiny_diffusion_dpo", "online Diffusion-DPO on the tiny pipeline"
)
tiny_diffusion_nft = _by_algorithm("tiny_diffusion_nft", "DiffusionNFT on the tiny pipeline")
tiny_elbo = _by_algorithm("tiny_elbo", "PEPG on the tiny pipeline")
tiny_flow_dppo = _by_algorithm("tiny_flow_dppo", "Flow-DPPO on the tiny pipeline")
tiny_grpo_guard = _by_algorithm("tiny_grpo_guard", "GRPO-Guard on the tiny pipeline")
tiny_mix_grpo = _by_algorithm("tiny_mix_grpo", "MixGRPO on the tiny pipeline")
tiny_ram = _by_algorithm("tiny_ram", "RAM on the tiny pipeline")
sd3_ocr_awm = _by_algorithm("sd3_ocr_awm", "AWM with published settings for SD3.5-M")
sd3_ocr_dance_grpo = _by_algorithm(
    "sd3_ocr_dance_grpo", "DanceGRPO with published settings for SD3.5-M"
)
sd3_ocr_distillation = _by_algorithm(
    "sd3_ocr_distillation", "online distillation with published settings for SD3.5-M"
)
sd3_ocr_dgpo = _by_algorithm("sd3_ocr_dgpo", "DGPO with published settings for SD3.5-M")
sd3_ocr_diffusion_dpo = _by_algorithm(
    "sd3_ocr_diffusion_dpo", "online Diffusion-DPO with published settings for SD3.5-M"
)
sd3_ocr_diffusion_nft = _by_algorithm(
    "sd3_ocr_diffusion_nft", "DiffusionNFT with published settings for SD3.5-M"
)
sd3_ocr_elbo = _by_algorithm("sd3_ocr_elbo", "PEPG with published settings for SD3.5-M")
sd3_ocr_flow_dppo = _by_algorithm(
    "sd3_ocr_flow_dppo", "Flow-DPPO with published settings for SD3.5-M"
)
sd3_ocr_grpo_guard = _by_algorithm(
    "sd3_ocr_grpo_guard", "GRPO-Guard with published settings for SD3.5-M"
)
sd3_ocr_mix_grpo = _by_algorithm("sd3_ocr_mix_grpo", "MixGRPO with published settings for SD3.5-M")
sd3_ocr_ram = _by_algorithm("sd3_ocr_ram", "RAM with published settings for SD3.5-M")
