"""Everything that a run starts beside its driver."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import attrs

from omni_trainer.group import WorkerGroup
from omni_trainer.reward_pool import RewardPool
from omni_trainer.workers.rank import RolloutAccess


class RolloutServers(Protocol):
    """Processes that hold the rollout for all ranks. `start` first, `close` last, also after an error."""

    def start(self) -> RolloutAccess:
        """Make them; returns what ranks reach them by."""

    def close(self) -> None:
        """End them."""


@attrs.frozen(kw_only=True)
class RunWorkers:
    """Described, not started."""

    session: AbstractContextManager[None]
    """What they live in."""
    group: WorkerGroup
    """The ranks."""
    pool: RewardPool
    """The scorers."""
    servers: RolloutServers | None = None
    """None where each rank has a rollout of its own."""
