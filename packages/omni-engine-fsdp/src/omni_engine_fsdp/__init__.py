"""FSDP2 engines for diffusers models: LoRA, checkpoints, model families, engine-side rollout.

The names below are the public API; each is loaded from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from omni_engine_fsdp._version import __version__

_HOMES = {
    "omni_engine_fsdp.engine": ("DiffusersFSDPEngine",),
    "omni_engine_fsdp.families.sd3": ("SD3Family",),
    "omni_engine_fsdp.forward": ("ForwardDiffusersFSDPEngine",),
    "omni_engine_fsdp.lora": ("LoRAAdapterMixin",),
    "omni_engine_fsdp.options": (
        "EngineRolloutConfig",
        "FSDPDiffusionActorConfig",
        "FSDPEngineConfig",
        "RolloutPlacement",
        "ShardBase",
        "ShardTrained",
    ),
    "omni_engine_fsdp.ppo": ("PPODiffusersFSDPEngine",),
    "omni_engine_fsdp.rollout": ("EngineRollout",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # noqa: PLE0604 -- built from the table


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        msg = f"module 'omni_engine_fsdp' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
