"""A pipeline is made from a seed, and written in the standard folder layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging


def saved(
    make: Callable[[], Any], directory: Path, *, seed: int, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a pipeline.

    Args:
        make: Builds it; everything random about it follows from *seed*.
        directory: Made if missing.
        seed: Of the weights.
        dtype: What the weights are stored in.

    Returns:
        *directory*.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = make()
    if dtype is not torch.float32:
        pipeline.to(dtype)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        pipeline.save_pretrained(directory)
    finally:
        if shown:
            logging.enable_progress_bar()
    return directory
