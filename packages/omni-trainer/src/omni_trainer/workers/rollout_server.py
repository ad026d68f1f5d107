"""A process that holds a rollout for all ranks: what runs in it, whatever starts it."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs

from omni_core.options import DiffusionModelConfig, DiffusionRolloutConfig
from omni_core.plugins import ROLLOUTS, registry
from omni_core.resident import resident_bytes
from omni_core.rollout import BaseRollout, PolicyCard, RolloutHandle, UpdateReport
from omni_core.trajectory import Trajectory
from omni_core.weight_buckets import AnyBucket
from omni_trainer.workers import process
from omni_trainer.workers.server_adapter import serve
from omni_trainer.workers.weight_transport import PushHeader, WeightInbox

ROLE = "rollout"
INTERVAL = 0.005
"""Seconds between two looks at a rollout that has nothing yet."""
RSS = "server_rss"
"""GiB that the process holds, beside the numbers of its rollout."""


@attrs.frozen(kw_only=True)
class RolloutServerConfig:
    """What a server is built from: plain data that travels to its process."""

    rollout: str
    """Plugin of `omni.rollouts`."""
    options: DiffusionRolloutConfig
    model: DiffusionModelConfig

    def __call__(self, place: process.Place, store: Any) -> RolloutServer:
        """Build the server of one process."""
        del store
        process.prepare(place)
        card = PolicyCard(model_config=self.model, number=place.rank)
        rollout: BaseRollout = registry(ROLLOUTS).get(self.rollout).build(self.options, engine=card)
        rollout.setup()
        return RolloutServer(rollout, bucket_mib=self.options.bucket_mib)


class RolloutServer:
    """Answers one call at a time; only `collect` lets others in while it waits."""

    def __init__(self, rollout: BaseRollout, *, bucket_mib: int) -> None:
        self.rollout = rollout
        self._inbox = WeightInbox(rollout, bucket_mib=bucket_mib)

    def answer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Answer one call of a `ServerAdapter`; to what the rollout measured, add what this process holds."""
        found = serve(self.rollout, method, *args, **kwargs)
        return {**found, RSS: resident_bytes() / 2**30} if method == "metrics" else found

    async def collect(self, handle: RolloutHandle) -> list[Trajectory]:
        """Wait for everything of a handle, in the order in which it was finished.

        Raises:
            KeyError: it is unknown, cancelled or drained.
        """
        found: list[Trajectory] = []
        while True:
            finished = self.rollout.poll(handle)
            found += finished
            if self.rollout.done(handle):
                return found
            await asyncio.sleep(0.0 if finished else INTERVAL)

    # -- weights -----------------------------------------------------------------------------------

    def begin_push(self, header: PushHeader) -> None:
        """Expect the buckets of an update."""
        self._inbox.begin(header)

    def take_bucket(self, header: PushHeader, bucket: AnyBucket) -> None:
        """Take one."""
        self._inbox.take(header, bucket)

    def finish_push(self, header: PushHeader) -> UpdateReport:
        """Bind them."""
        return self._inbox.finish(header)

    def close(self) -> None:
        """Free the rollout."""
        self.rollout.close()
        self._inbox.close()
