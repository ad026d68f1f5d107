"""The toys as plugins, registered for this process alone. Imports no torch."""

from __future__ import annotations

from omni_core.plugins import ENGINES, MODELS, REWARDS, ROLLOUTS, Plugin, registry
from omni_core.recipe import NoOptions
from omni_core.testing.toys.options import ToyEngineConfig, ToyRewardConfig, ToyRolloutConfig

_HERE = "omni_core.testing.toys"

TOYS: dict[tuple[str, str], Plugin] = {
    (ENGINES, "diffusion.toy"): Plugin(
        api=1,
        options=ToyEngineConfig,
        target=f"{_HERE}.engine:ToyEngine",
        devices=("cpu",),
        summary="single-process engine over the toy family",
    ),
    (ENGINES, "diffusion_forward.toy"): Plugin(
        api=1,
        options=ToyEngineConfig,
        target=f"{_HERE}.forward:ToyForwardEngine",
        devices=("cpu",),
        summary="the same for losses of the forward process",
    ),
    (ROLLOUTS, "toy"): Plugin(
        api=1,
        options=ToyRolloutConfig,
        target=f"{_HERE}.rollout:ToyRollout",
        summary="samples in the toy engine's process, or as a replica in another",
        standalone=True,
    ),
    (MODELS, "toy"): Plugin(
        api=1,
        options=NoOptions,
        target=f"{_HERE}.family:ToyFamily",
        summary="a per-pixel MLP over 4 times smaller latents, made from its path",
    ),
    (MODELS, "toy_clips"): Plugin(
        api=1,
        options=NoOptions,
        target=f"{_HERE}.clips:ToyClipFamily",
        summary="the same over the values of a video and of its sound",
    ),
    (REWARDS, "toy"): Plugin(
        api=1,
        options=ToyRewardConfig,
        target=f"{_HERE}.reward:ToyReward",
        summary="brightness of the picture or video",
    ),
}
"""(group, name) -> plugin."""


def register_toys() -> None:
    """Offer the toys in this process; a second call changes nothing.

    Raises:
        PluginError: another plugin has one of the names.
    """
    for (group, name), plugin in TOYS.items():
        found = registry(group)
        if name not in found.names() or found.get(name) is not plugin:
            found.register(name, plugin)


def unregister_toys() -> None:
    """Take back what `register_toys` offered."""
    for group, name in TOYS:
        if name in registry(group).names():
            registry(group).unregister(name)
