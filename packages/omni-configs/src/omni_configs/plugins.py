"""The recipes that ship here. Imports neither torch nor YAML."""

from __future__ import annotations

from omni_core.plugins import Plugin
from omni_core.recipe import NoOptions


def _recipe(name: str, summary: str) -> Plugin:
    return Plugin(api=1, options=NoOptions, target=f"omni_configs.recipes:{name}", summary=summary)


quickstart = _recipe("quickstart", "FlowGRPO teaches a tiny pipeline to write numbers, in minutes")
smoke = _recipe("smoke", "two steps of the quickstart in this process: does it run here?")
sd3_ocr_flow_grpo = _recipe("sd3_ocr_flow_grpo", "Flow-GRPO's published OCR settings for SD3.5-M")
