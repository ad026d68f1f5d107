"""What runs beside the model, as plain classes: none of it knows how it is called from elsewhere."""

from __future__ import annotations

from omni_trainer.workers.actor_rollout_ref import ActorRolloutRefWorker
from omni_trainer.workers.rank import ActorRolloutRefConfig
from omni_trainer.workers.reward import RewardWorker
from omni_trainer.workers.server_adapter import ServerAdapter
from omni_trainer.workers.training import TrainingWorker, TrainingWorkerConfig

__all__ = [
    "ActorRolloutRefConfig",
    "ActorRolloutRefWorker",
    "RewardWorker",
    "ServerAdapter",
    "TrainingWorker",
    "TrainingWorkerConfig",
]
