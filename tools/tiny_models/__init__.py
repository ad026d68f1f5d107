"""Pipelines of random weights in the standard diffusers folder layout: what tests and smoke runs need.

Every part is real (classes, tokenizers, files); only the sizes are small: under 1 MB, made in about a
second after the imports. `python tools/build_tiny_model.py FAMILY DIRECTORY` writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

BUILDERS: Mapping[str, str] = {
    "flux": "tiny_models.flux:build_tiny_flux",
    "flux2": "tiny_models.flux2:build_tiny_flux2",
    "ltx2": "tiny_models.ltx2:build_tiny_ltx2",
    "qwen_image": "tiny_models.qwen_image:build_tiny_qwen_image",
    "qwen_image_edit": "tiny_models.qwen_image_edit:build_tiny_qwen_image_edit",
    "sana": "tiny_models.sana:build_tiny_sana",
    "sd3": "tiny_models.sd3:build_tiny_sd3",
    "wan": "tiny_models.wan:build_tiny_wan",
    "z_image": "tiny_models.z_image:build_tiny_z_image",
}
"""Model family -> its builder, `build(directory, *, seed=0, dtype=torch.float32)`."""

SIZES: Mapping[str, Mapping[str, int]] = {
    "flux": {"height": 16, "width": 16, "max_sequence_length": 16},
    "flux2": {"height": 16, "width": 16, "max_sequence_length": 48},
    "ltx2": {"height": 32, "width": 32, "max_sequence_length": 16, "num_frames": 3},
    "qwen_image": {"height": 16, "width": 16, "max_sequence_length": 256},
    "qwen_image_edit": {
        "height": 16,
        "width": 16,
        "max_sequence_length": 512,
        "input_image_area": 32 * 32,
    },
    "sana": {"height": 32, "width": 32, "max_sequence_length": 16},
    "sd3": {"height": 16, "width": 16, "max_sequence_length": 8},
    "wan": {"height": 16, "width": 16, "max_sequence_length": 8, "num_frames": 3},
    "z_image": {"height": 16, "width": 16, "max_sequence_length": 64},
}
"""Model family -> the smallest `model.pipeline` that its tiny pipeline is run with, in which prompts differ."""


def build_tiny(family: str, directory: Path, **options: Any) -> Path:
    """Write the tiny pipeline of a family, and return *directory*.

    Args:
        family: One of `BUILDERS`.
        directory: Made if missing.
        options: Of the family's builder: seed, dtype, and what is its own.
    """
    module, _, name = BUILDERS[family].partition(":")
    built: Path = getattr(import_module(module), name)(directory, **options)
    return built
