"""What a rank is made from, and what it says of itself: plain data that travels between processes."""

from __future__ import annotations

from typing import Protocol

import attrs

from omni_core.engine import BaseEngine
from omni_core.losses import algorithm
from omni_core.options import DiffusionActorConfig, DiffusionRolloutConfig
from omni_core.rollout import BaseRollout
from omni_trainer.workers.training import TrainingWorkerConfig


@attrs.frozen(kw_only=True)
class ActorRolloutRefConfig:
    """What a rank is built from: plain data that travels to its process."""

    actor: DiffusionActorConfig
    backend: str
    """Engine backend, such as `fsdp2`."""
    rollout: str
    """Plugin of `omni.rollouts`."""
    rollout_options: DiffusionRolloutConfig
    device: str = "auto"
    input_images: bool = False
    """Whether requests come with an image that the prompt edits."""

    def training(self) -> TrainingWorkerConfig:
        """The part that the training worker needs."""
        return TrainingWorkerConfig(
            model=self.actor.model,
            engine=self.actor.engine,
            optimizer=self.actor.optimizer,
            checkpoint=self.actor.checkpoint,
            model_type=self.actor.loss.options.model_type,
            backend=self.backend,
            device=self.device,
            adapters=algorithm(self.actor.loss).adapters,
            teachers=tuple(algorithm(self.actor.loss).teachers.items()),
        )


@attrs.frozen(kw_only=True)
class RankFacts:
    """What a rank says of itself once it has its model."""

    device: str
    threads: int
    torch: str
    weight_version: int
    data_parallel_rank: int
    """Ranks of equal number hold the same rows and compute together."""
    has_outputs: bool
    """Whether it is the first of them, whose results are taken."""


class RolloutAccess(Protocol):
    """The way to a rollout that other processes hold for all ranks; plain data that travels to a rank."""

    def connect(self, *, engine: BaseEngine, rank: int) -> BaseRollout:
        """Make this rank's client."""
