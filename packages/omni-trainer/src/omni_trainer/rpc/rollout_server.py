"""Rollout servers on Ray: actors that hold a rollout for all ranks, and the links by which ranks reach them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import ray

from omni_core.engine import BaseEngine
from omni_core.options import DiffusionRolloutConfig
from omni_core.rollout import BaseRollout
from omni_core.weight_buckets import PackedBucket
from omni_trainer.group import LostWorkerError
from omni_trainer.rpc.failures import DEATHS
from omni_trainer.rpc.ray_group import RayGroup
from omni_trainer.rpc.shell import Shell
from omni_trainer.workers.rollout_server import ROLE, RolloutServerConfig
from omni_trainer.workers.shared_rollout import Pending, ServerLink, ServerLinks, SharedRollout


class ServerShell(Shell):
    """An actor with an event loop: calls are answered one at a time, but for those that wait.

    What the server raises comes as it is: a rank handles a rollout's own errors.
    """

    async def ask(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the server; the one that waits is a coroutine."""
        found = getattr(self._worker, method)(*args, **kwargs)
        return await found if hasattr(found, "__await__") else found

    async def take(self, header: Any, bucket: Any) -> None:
        """Take a bucket, which Ray has fetched if it came as an object."""
        self._worker.take_bucket(header, bucket)


@attrs.frozen(eq=False)
class ActorLink(ServerLink):
    """One actor."""

    number: int
    actor: Any

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method of the server without waiting."""
        if method == "take_bucket":
            return self.actor.take.remote(*args)
        return self.actor.ask.remote(method, args, kwargs)

    def result(self, pending: Pending) -> Any:
        """Wait for it; what the server raised is raised here."""
        try:
            return ray.get(pending)
        except DEATHS as exc:
            said = " ".join(str(exc).split())
            msg = f"{ROLE} server {self.number}: its process died: {said}"
            raise LostWorkerError(msg) from exc
        except ray.exceptions.RayTaskError as exc:
            raise exc.cause from exc


class ActorLinks(ServerLinks):
    """All servers of a run, as one rank sees them."""

    def __init__(self, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        self.links = [ActorLink(number, actor) for number, actor in enumerate(actors)]
        here = str(ray.get_runtime_context().get_node_id())
        self.one_machine = set(nodes) == {here}

    def finished(self, pending: Sequence[Pending], *, timeout: float) -> list[Pending]:
        """Return those that are finished."""
        if not pending:
            return []
        done, rest = ray.wait(list(pending), num_returns=1, timeout=timeout)
        if rest and done:
            more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
            done = [*done, *more]
        return list(done)

    def shared(self, value: Any) -> Any:
        """Put what is large into the object store, once for all servers."""
        return ray.put(value) if isinstance(value, PackedBucket) else value


@attrs.frozen(kw_only=True, eq=False)
class Servers:
    """What a rank is given to reach the servers: handles, which travel."""

    actors: tuple[Any, ...]
    nodes: tuple[str, ...]
    options: DiffusionRolloutConfig

    def connect(self, *, engine: BaseEngine, rank: int) -> BaseRollout:
        """Make a rank's client."""
        family = getattr(engine, "family", None)
        return SharedRollout(
            ActorLinks(self.actors, self.nodes),
            options=self.options,
            rank=rank,
            schedule=None if family is None else family.schedule,
        )


class RolloutServers:
    """The servers of a run. `start` first, `close` last, also after an error."""

    def __init__(
        self,
        config: RolloutServerConfig,
        *,
        resources: Mapping[str, float],
        threads: int = 1,
        start_timeout: float = 120.0,
    ) -> None:
        self._options = config.options
        self.group = RayGroup(
            config,
            size=config.options.servers,
            resources=resources,
            threads=threads,
            role=ROLE,
            collective=False,
            start_timeout=start_timeout,
            shell=ServerShell,
        )

    def start(self) -> Servers:
        """Make the actors and their rollouts.

        Raises:
            ResourceError, WorkerError: as `RayGroup.start`.
        """
        self.group.start()
        return Servers(
            actors=self.group.actors,
            nodes=tuple(self.group.nodes()),
            options=self._options,
        )

    def close(self) -> None:
        """End the actors."""
        self.group.shutdown()
