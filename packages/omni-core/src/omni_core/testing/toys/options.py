"""What a recipe may say about the toys. Imports no torch."""

from __future__ import annotations

import enum

import attrs

from omni_core.options import DiffusionRolloutConfig, EngineConfig, RewardConfig


@attrs.frozen(kw_only=True)
class ToyEngineConfig(EngineConfig):
    """Nothing beyond what every engine is told."""


class ToyPlacement(enum.StrEnum):
    """Whose weights the toy rollout samples with."""

    SHARED = "shared"
    """The engine's own module: there is nothing to push."""
    REPLICA = "replica"
    """A copy of its own, stale until the first push."""


@attrs.frozen(kw_only=True)
class ToyRolloutConfig(DiffusionRolloutConfig):
    """Sampling in the engine's process."""

    placement: ToyPlacement = ToyPlacement.SHARED


@attrs.frozen(kw_only=True)
class ToyRewardConfig(RewardConfig):
    """Brightness of a picture, between 0 and 1."""

    dark_word: str = "dark"
    """A prompt with this word asks for a dark picture; every other one for a bright one."""
