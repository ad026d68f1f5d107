"""One scorer in a process or thread of its own: trajectories in, results out, media go no further."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from omni_core.options import RewardConfig
from omni_core.resident import resident_bytes
from omni_core.reward import RewardInput, RewardResult
from omni_core.seeds import derive_seed
from omni_core.trajectory import Trajectory
from omni_trainer.rewards.build import build_reward
from omni_trainer.rewards.scoring import ScoreCounts, Scorer


class RewardWorker:
    """Holds one reward's models and scores with them."""

    def __init__(self, name: str, options: RewardConfig) -> None:
        self.scorer = Scorer(build_reward(name, options), retries=options.retries)

    def setup(self, seed: int | None = None) -> None:
        """Load the models.

        Args:
            seed: Of the generators of this process, where the scorer has it for itself.
        """
        if seed is not None:
            import torch

            random.seed(derive_seed("reward", seed))
            torch.manual_seed(derive_seed("reward", seed))
        self.scorer.setup()

    def score(self, inputs: Sequence[RewardInput], trajectory: Trajectory) -> list[RewardResult]:
        """Score every row, in order.

        Raises:
            ValueError: the trajectory was sampled without decoding.
        """
        if trajectory.media is None:
            msg = f"group {trajectory.records[0].group_id!r} has no media to score"
            raise ValueError(msg)
        return self.scorer.score(trajectory.media, inputs)

    def counts(self) -> ScoreCounts:
        """Say what was scored, retried and failed so far."""
        return attrs.evolve(self.scorer.counts, resident=resident_bytes())

    def close(self) -> None:
        """Free the models."""
        self.scorer.close()
