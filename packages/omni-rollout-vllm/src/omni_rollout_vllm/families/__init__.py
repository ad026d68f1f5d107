"""The families that have a recording pipeline, by pipeline class."""

from __future__ import annotations

from collections.abc import Mapping

from omni_rollout_vllm.families.family import EngineFamily, Folder
from omni_rollout_vllm.families.qwen_image import QwenImage
from omni_rollout_vllm.families.sd3 import SD3

FAMILIES: Mapping[str, EngineFamily] = {
    family.pipeline_class: family for family in (SD3(), QwenImage())
}

__all__ = ["FAMILIES", "EngineFamily", "Folder", "family_of"]


def family_of(folder: Folder) -> EngineFamily:
    """Find the family that serves a pipeline folder.

    Raises:
        ValueError: none does; lists those that there are.
    """
    name = folder.pipeline_class()
    if name not in FAMILIES:
        known = ", ".join(f"{one.name} ({one.pipeline_class})" for one in FAMILIES.values())
        msg = f"{folder.root}: the rollout vllm_omni has no family for {name}; it has {known}"
        raise ValueError(msg)
    return FAMILIES[name]
