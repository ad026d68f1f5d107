"""The smallest honest implementation of every contract: plain torch, one process, no files.

`register_toys()` offers it under the names engine `diffusion.toy` and `diffusion_forward.toy`, rollout `toy`, model `toy` and reward
`toy`. A run of the toys names `model: {path: toy, family: toy}` and a size that is a multiple of 4. The
model `toy_clips` makes videos with sound: two modalities, sampled, scored and trained as one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from omni_core.testing.toys.plugins import register_toys, unregister_toys

_HOMES = {
    "ToyClipCodec": "clips",
    "ToyClipFamily": "clips",
    "ToyCodec": "family",
    "ToyConditioner": "family",
    "ToyConditioning": "family",
    "ToyDenoiser": "family",
    "ToyEngine": "engine",
    "ToyEngineConfig": "options",
    "ToyFamily": "family",
    "ToyForwardEngine": "forward",
    "ToyReward": "reward",
    "ToyRewardConfig": "options",
    "ToyRollout": "rollout",
    "ToyRolloutConfig": "options",
}

__all__ = [*_HOMES, "register_toys", "unregister_toys"]  # noqa: PLE0604 -- built from the table


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
