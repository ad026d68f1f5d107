"""What a run may say about the engine, the reward and the algorithm. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from omni_core import (
    AlgorithmConfig,
    DiffusionRolloutAlgoConfig,
    EngineConfig,
    RewardConfig,
    RunFacts,
    StepKind,
)


@attrs.frozen(kw_only=True)
class DDPOptions(EngineConfig):
    """Nothing beyond what every engine is told."""


@attrs.frozen(kw_only=True)
class RednessOptions(RewardConfig):
    """How red a picture is."""

    weight: float = 1.0
    """The score is multiplied by this; below 0 it asks for less red."""


@attrs.frozen(kw_only=True)
class ReinforceOptions(AlgorithmConfig):
    """REINFORCE with the group's mean as baseline."""

    noise_level: float = attrs.field(default=0.7, validator=attrs.validators.gt(0))
    """eta of the `sde` reverse step."""

    def rollout_algo(self) -> DiffusionRolloutAlgoConfig:
        """Every step but the last is stochastic."""
        return DiffusionRolloutAlgoConfig(
            kind=StepKind.SDE,
            noise_level=self.noise_level,
            window_size=None,
            window_range=None,
        )

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """On-policy, and relative to a group."""
        found = {}
        if self.updates_per_rollout != 1:
            found["updates_per_rollout"] = (
                f"fork_reinforce is on-policy: expected 1, got {self.updates_per_rollout}"
            )
        if facts.samples_per_prompt < 2:
            found["name"] = (
                "fork_reinforce compares the samples of a group: rollout.samples_per_prompt is "
                f"{facts.samples_per_prompt}, and must be at least 2"
            )
        if facts.num_inference_steps < 2:
            found["noise_level"] = (
                "one sampling step leaves none to train (the last step is never stochastic): "
                "rollout.sampling.num_inference_steps must be at least 2"
            )
        return found
