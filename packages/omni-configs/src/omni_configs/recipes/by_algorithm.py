"""Recipes of the other algorithms: the tiny pipeline with each, and its published settings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import attrs

from omni_core.recipe import NoOptions, Recipe, Standing


@attrs.frozen
class _Entry:
    title: str
    source: str
    """Of the settings for SD3.5-M."""
    batch: str = "48 prompts x 24"
    """Of the same."""
    learns: bool = False
    """Whether the tiny recipe's held-out reward rose on every seed of `bench:algorithms`."""


_ENTRIES: Mapping[str, _Entry] = {
    "awm": _Entry(
        "AWM",
        "AWM, arXiv 2509.25050, and its official code: clip 1, moving average 0.3, reference "
        "weight 0.003. The batch is that of Flow-GRPO's OCR experiment, sampled by 10 ode "
        "steps without guidance.",
        learns=True,
    ),
    "dance_grpo": _Entry(
        "DanceGRPO",
        "Not published for this model: the `general_ocr_sd3` configuration of Flow-GRPO's "
        "official code (arXiv 2505.05470), with the steps of DanceGRPO (eta 0.3) and its "
        "advantages within groups (arXiv 2505.07818).",
    ),
    "dgpo": _Entry(
        "DGPO",
        "DGPO, arXiv 2510.08425, and its official code: beta 100, one noise for a group. The "
        "batch is that of Flow-GRPO's OCR experiment, sampled by 10 ode steps without "
        "guidance.",
    ),
    "diffusion_dpo": _Entry(
        "online Diffusion-DPO",
        "Diffusion-DPO, arXiv 2311.12908, on the best and the worst sample of each prompt: "
        "not published as an online method for this model. The batch is that of Flow-GRPO's "
        "OCR experiment, sampled by 10 ode steps without guidance.",
    ),
    "diffusion_nft": _Entry(
        "DiffusionNFT",
        "DiffusionNFT, arXiv 2509.16117, and its official code for OCR (24 prompts of 48, 10 ode "
        "steps without guidance, learning rate 3e-4, beta 0.1, reference weight 1e-4). Differences: "
        "text is found and read by RapidOCR, not PaddleOCR; bfloat16, not float16.",
        "24 prompts x 48",
        learns=True,
    ),
    "distillation": _Entry(
        "online distillation",
        "Flow-OPD, arXiv 2605.08063, and the `general_ocr_sd3_8gpu_opd` configuration of its official "
        "code (16 prompts of 16, 10 steps at guidance 4.5, two updates, learning rate 3e-4; the teacher "
        "is Flow-GRPO's OCR adapter). Differences: the exact KL is minimised, where that code takes it "
        "as a reward of each step; no KL to the base and no moving average of the weights; text is "
        "found and read by RapidOCR, not PaddleOCR; bfloat16, not float16.",
        "16 prompts x 16",
    ),
    "elbo": _Entry(
        "PEPG",
        "PEPG of arXiv 2602.04663: advantages 0.1 (R - mean of the group). The batch is that "
        "of Flow-GRPO's OCR experiment, sampled by 10 ode steps without guidance.",
        learns=True,
    ),
    "flow_dppo": _Entry(
        "Flow-DPPO",
        "Not the configuration of Flow-DPPO's own code: `general_ocr_sd3` of Flow-GRPO's "
        "official code (arXiv 2505.05470), without its KL, with the bound of Flow-DPPO (arXiv "
        "2606.11025: delta 1e-5, advantages not clipped).",
    ),
    "grpo_guard": _Entry(
        "GRPO-Guard",
        "Not the configuration of GRPO-Guard's own code: `general_ocr_sd3` of Flow-GRPO's "
        "official code (arXiv 2505.05470), with the ratio of GRPO-Guard (arXiv 2510.22319).",
    ),
    "mix_grpo": _Entry(
        "MixGRPO",
        "Not published for this model: the `general_ocr_sd3` configuration of Flow-GRPO's "
        "official code (arXiv 2505.05470), without its KL, with the window of MixGRPO (arXiv "
        "2507.21802: 4 steps, moved by 1 every 25 iterations).",
        learns=True,
    ),
    "ram": _Entry(
        "RAM",
        "RAM, arXiv 2605.10759, without the path-cost correction, as its experiments. The "
        "batch is that of Flow-GRPO's OCR experiment, sampled by 10 ode steps without "
        "guidance.",
    ),
}


def _tiny(name: str) -> Recipe:
    entry = _ENTRIES[name]
    risen = ": the held-out OCR reward rises" if entry.learns else ""
    return Recipe(
        yaml=_yaml(f"tiny_{name}"),
        summary=f"{entry.title} on the tiny signs pipeline, in this process{risen}",
        standing=Standing.VALIDATED if entry.learns else Standing.SMOKE,
        hardware="1 CPU core",
        global_batch="8 prompts x 12",
    )


def _sd3(name: str) -> Recipe:
    return Recipe(
        yaml=_yaml(f"sd3_ocr_{name}"),
        summary=f"SD3.5-M learns to write the quoted text of its prompts by {_ENTRIES[name].title}",
        standing=Standing.NOT_RUN,
        hardware="8 GPUs",
        global_batch=_ENTRIES[name].batch,
        source=_ENTRIES[name].source,
    )


def _yaml(name: str) -> str:
    return resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def tiny_awm(options: NoOptions) -> Recipe:
    """AWM on the tiny pipeline."""
    del options
    return _tiny("awm")


def sd3_ocr_awm(options: NoOptions) -> Recipe:
    """AWM on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("awm")


def tiny_dance_grpo(options: NoOptions) -> Recipe:
    """DanceGRPO on the tiny pipeline."""
    del options
    return _tiny("dance_grpo")


def sd3_ocr_dance_grpo(options: NoOptions) -> Recipe:
    """DanceGRPO on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("dance_grpo")


def tiny_dgpo(options: NoOptions) -> Recipe:
    """DGPO on the tiny pipeline."""
    del options
    return _tiny("dgpo")


def sd3_ocr_dgpo(options: NoOptions) -> Recipe:
    """DGPO on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("dgpo")


def tiny_diffusion_dpo(options: NoOptions) -> Recipe:
    """online Diffusion-DPO on the tiny pipeline."""
    del options
    return _tiny("diffusion_dpo")


def sd3_ocr_diffusion_dpo(options: NoOptions) -> Recipe:
    """online Diffusion-DPO on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("diffusion_dpo")


def tiny_diffusion_nft(options: NoOptions) -> Recipe:
    """DiffusionNFT on the tiny pipeline."""
    del options
    return _tiny("diffusion_nft")


def sd3_ocr_diffusion_nft(options: NoOptions) -> Recipe:
    """DiffusionNFT on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("diffusion_nft")


def tiny_distillation(options: NoOptions) -> Recipe:
    """Online distillation on the tiny pipeline."""
    del options
    return _tiny("distillation")


def sd3_ocr_distillation(options: NoOptions) -> Recipe:
    """Online distillation on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("distillation")


def tiny_elbo(options: NoOptions) -> Recipe:
    """PEPG on the tiny pipeline."""
    del options
    return _tiny("elbo")


def sd3_ocr_elbo(options: NoOptions) -> Recipe:
    """PEPG on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("elbo")


def tiny_flow_dppo(options: NoOptions) -> Recipe:
    """Flow-DPPO on the tiny pipeline."""
    del options
    return _tiny("flow_dppo")


def sd3_ocr_flow_dppo(options: NoOptions) -> Recipe:
    """Flow-DPPO on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("flow_dppo")


def tiny_grpo_guard(options: NoOptions) -> Recipe:
    """GRPO-Guard on the tiny pipeline."""
    del options
    return _tiny("grpo_guard")


def sd3_ocr_grpo_guard(options: NoOptions) -> Recipe:
    """GRPO-Guard on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("grpo_guard")


def tiny_mix_grpo(options: NoOptions) -> Recipe:
    """MixGRPO on the tiny pipeline."""
    del options
    return _tiny("mix_grpo")


def sd3_ocr_mix_grpo(options: NoOptions) -> Recipe:
    """MixGRPO on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("mix_grpo")


def tiny_ram(options: NoOptions) -> Recipe:
    """RAM on the tiny pipeline."""
    del options
    return _tiny("ram")


def sd3_ocr_ram(options: NoOptions) -> Recipe:
    """RAM on Stable Diffusion 3.5 Medium."""
    del options
    return _sd3("ram")
