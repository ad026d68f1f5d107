"""Prompts: files of several kinds, rows with targets, and the order that they are dealt in."""

from __future__ import annotations

from omni_trainer.data.order import PromptBatch, PromptSampler, Tail
from omni_trainer.data.prompts import TARGET_COLUMN, Columns, load_prompts
from omni_trainer.data.rows import BadRowPolicy, PromptFile, PromptFileError, PromptRow

__all__ = [
    "TARGET_COLUMN",
    "BadRowPolicy",
    "Columns",
    "PromptBatch",
    "PromptFile",
    "PromptFileError",
    "PromptRow",
    "PromptSampler",
    "Tail",
    "load_prompts",
]
