"""One function for each recipe: its YAML file here, and how far it was tried."""

from __future__ import annotations

from importlib import resources

from omni_core.recipe import NoOptions, Recipe, Standing


def quickstart(options: NoOptions) -> Recipe:
    """Train the tiny signs pipeline that this package carries."""
    del options
    return Recipe(
        yaml=_yaml("quickstart"),
        summary="FlowGRPO with LoRA on the tiny signs pipeline: the held-out OCR reward rises",
        standing=Standing.VALIDATED,
        hardware="2 CPU cores",
        global_batch="8 prompts x 12",
    )


def spelling(options: NoOptions) -> Recipe:
    """Train the tiny pipeline whose errors are wrong digits, with the settings of the quickstart."""
    del options
    return Recipe(
        yaml=_yaml("spelling"),
        summary="FlowGRPO with LoRA on a tiny pipeline that misspells: its held-out spelling rises",
        standing=Standing.VALIDATED,
        hardware="1 CPU core",
        global_batch="8 prompts x 12",
    )


def smoke(options: NoOptions) -> Recipe:
    """Run the quickstart's parts for two steps, in one process."""
    del options
    return Recipe(
        yaml=_yaml("smoke"),
        summary="two steps on the tiny signs pipeline, in this process",
        standing=Standing.SMOKE,
        hardware="1 CPU core",
        global_batch="2 prompts x 4",
    )


def tiny_flow_grpo_full(options: NoOptions) -> Recipe:
    """Train every weight of the tiny signs pipeline, held to its start."""
    del options
    return Recipe(
        yaml=_yaml("tiny_flow_grpo_full"),
        summary="FlowGRPO on every weight of the tiny signs pipeline, with a KL and a moving average",
        standing=Standing.SMOKE,
        hardware="1 CPU core",
        global_batch="8 prompts x 12",
    )


def sd3_ocr_flow_grpo(options: NoOptions) -> Recipe:
    """Flow-GRPO's OCR experiment on Stable Diffusion 3.5 Medium."""
    del options
    return Recipe(
        yaml=_yaml("sd3_ocr_flow_grpo"),
        summary="SD3.5-M learns to write the quoted text of its prompts (published settings)",
        standing=Standing.NOT_RUN,
        hardware="as published: 32 GPUs",
        global_batch="48 prompts x 24",
        source=(
            "Flow-GRPO, arXiv 2505.05470, and the `general_ocr_sd3` configuration of its official code. "
            "Differences: no moving average of the weights; text is found and read by RapidOCR, not "
            "PaddleOCR; bfloat16, not float16; the standard deviation of rewards has ddof 1, not 0."
        ),
    )


def sd3_pickscore_flow_grpo(options: NoOptions) -> Recipe:
    """Flow-GRPO's experiment on human preference, on Stable Diffusion 3.5 Medium."""
    del options
    return Recipe(
        yaml=_yaml("sd3_pickscore_flow_grpo"),
        summary="SD3.5-M learns what people prefer by PickScore (published settings)",
        standing=Standing.NOT_RUN,
        hardware="as published: 32 GPUs",
        global_batch="48 prompts x 24",
        source=(
            "Flow-GRPO, arXiv 2505.05470, and the `pickscore_sd3` configuration of its official code: KL "
            "weight 0.01, scores divided by 26. Differences: no moving average of the weights; bfloat16, not "
            "float16; the standard deviation of rewards has ddof 1, not 0."
        ),
    )


def sd3_ocr_verl_omni(options: NoOptions) -> Recipe:
    """VeRL-Omni's short OCR experiment on Stable Diffusion 3.5 Medium."""
    del options
    return Recipe(
        yaml=_yaml("sd3_ocr_verl_omni"),
        summary="SD3.5-M learns to write the quoted text of its prompts (VeRL-Omni's settings)",
        standing=Standing.NOT_RUN,
        hardware="as published: 3 GPUs, one of them for the reward",
        global_batch="8 prompts x 8",
        source=(
            "VeRL-Omni's SD3.5-M OCR example: 384 px, cps with eta 0.8, 3 stochastic steps within the first 5, "
            "no guidance, no KL, learning rate 1e-4. Differences: text is found and read by RapidOCR, not by "
            "a vision-language model; its epochs end after the 100 steps that it takes by default."
        ),
    )


def flux_pickscore_flow_grpo(options: NoOptions) -> Recipe:
    """Flow-GRPO's experiment on human preference, on FLUX.1-dev."""
    del options
    return Recipe(
        yaml=_yaml("flux_pickscore_flow_grpo"),
        summary="FLUX.1-dev learns what people prefer by PickScore (published settings)",
        standing=Standing.NOT_RUN,
        hardware="as published: 32 GPUs",
        global_batch="48 prompts x 24",
        source=(
            "Flow-GRPO, arXiv 2505.05470, and the `pickscore_flux` configuration of its official code: 6 steps "
            "at guidance 3.5, eta 0.9, no KL, LoRA of rank 64 on attention and feed-forward, 128 text tokens. "
            "Differences: no moving average of the weights; the standard deviation of rewards has ddof 1, "
            "not 0; timesteps and the guidance scale condition the model in float32, not in bfloat16."
        ),
    )


def qwen_image_ocr_flow_grpo(options: NoOptions) -> Recipe:
    """VeRL-Omni's OCR experiment on Qwen-Image."""
    del options
    return Recipe(
        yaml=_yaml("qwen_image_ocr_flow_grpo"),
        summary="Qwen-Image learns to write the quoted text of its prompts (published settings)",
        standing=Standing.NOT_RUN,
        hardware="not run here",
        global_batch="32 prompts x 16",
        source=(
            "The FlowGRPO example of VeRL-Omni for Qwen-Image. Differences: text is found and read by "
            "RapidOCR, not by a language model; the engine samples, not vLLM-Omni (take rollout.name: "
            "vllm_omni for that); the size of pictures and the number of steps are ours."
        ),
    )


def qwen_image_edit_pickscore_flow_grpo(options: NoOptions) -> Recipe:
    """VeRL-Omni's experiment on human preference, on Qwen-Image-Edit."""
    del options
    return Recipe(
        yaml=_yaml("qwen_image_edit_pickscore_flow_grpo"),
        summary="Qwen-Image-Edit learns what people prefer by PickScore (settings of its successor)",
        standing=Standing.NOT_RUN,
        hardware="as published: 8 GPUs",
        global_batch="32 prompts x 16",
        source=(
            "The FlowGRPO example of VeRL-Omni for Qwen-Image-Edit-2511: 512 px, 12 steps, eta 0.7, 3 stochastic "
            "steps within the first 6, advantages within groups. Differences: the first Qwen-Image-Edit, whose "
            "pipeline is built here; input images are brought to 512 x 512 pixels and not put on a white square; "
            "the engine samples, not vLLM-Omni; the negative prompt is ours."
        ),
    )


def wan22_dance_grpo(options: NoOptions) -> Recipe:
    """DanceGRPO on both experts of Wan2.2, with a reward of one's own."""
    del options
    return Recipe(
        yaml=_yaml("wan22_dance_grpo"),
        summary="Wan2.2 text-to-video, both experts, by a reward of your own on frames",
        standing=Standing.NOT_RUN,
        hardware="not run here",
        global_batch="64 prompts x 8",
        source=(
            "Not published for this model. Of VeRL-Omni's DanceGRPO example for Wan2.2-TI2V-5B: batch, 10 steps, eta 1.2, "
            "2 stochastic steps, 4 updates, learning rate 1e-5. Ours: LoRA (all weights there), the guidance scales, size "
            "and number of frames, clip 1e-3, 40 steps in evaluation, the reward (HPSv3 there), and stochastic steps "
            "anywhere (the first 5 there), so that both experts are trained."
        ),
    )


def ltx2_flow_grpo(options: NoOptions) -> Recipe:
    """VeRL-Omni's experiment on video with sound, on LTX-2, with a reward of one's own."""
    del options
    return Recipe(
        yaml=_yaml("ltx2_flow_grpo"),
        summary="LTX-2 video with sound, by a reward of your own (published settings)",
        standing=Standing.NOT_RUN,
        hardware="as published: 8 GPUs",
        global_batch="32 prompts x 8",
        source=(
            "The FlowGRPO example of VeRL-Omni for LTX-2.3: 256 x 384, 81 frames, 24 steps, cps with eta 0.8, 3 stochastic "
            "steps of the first 10. Differences: LTX-2; the reward is a file of yours (CLAP and ImageBind there); the "
            "3 steps follow each other, there they are drawn one by one; the engine samples, not vLLM-Omni."
        ),
    )


def _yaml(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
