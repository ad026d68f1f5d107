"""The trainer's own plugins. Imports no torch."""

from __future__ import annotations

from omni_core.plugins import Plugin
from omni_core.recipe import NoOptions
from omni_trainer.rewards.options import OCRRewardConfig

ocr = Plugin(
    api=1,
    options=OCRRewardConfig,
    target="omni_trainer.rewards.ocr:OCRReward",
    summary="whether a picture shows the text that its prompt puts in quotes (RapidOCR)",
)

jsonl = Plugin(
    api=1,
    options=NoOptions,
    target="omni_trainer.reporting.jsonl:JsonlTracker",
    summary="metrics.jsonl in the run directory: one line a step",
)
