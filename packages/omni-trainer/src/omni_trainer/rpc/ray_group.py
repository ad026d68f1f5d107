"""A worker group on Ray: one actor for each rank, side by side in one placement group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import ray
import structlog
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from omni_trainer.group import Ref, Streamed, WorkerError, WorkerGroup, nbytes
from omni_trainer.rpc import cluster
from omni_trainer.rpc.failures import first_failure, worker_error
from omni_trainer.rpc.resources import Demand, ResourceError, table
from omni_trainer.rpc.shell import Factory, Shell
from omni_trainer.workers.process import Place, registered_plugins

CLOSING = 10.0
"""Seconds that workers have to close."""

log = structlog.get_logger()


class RayGroup(WorkerGroup):
    """See the module's docstring. Ray is connected already."""

    def __init__(
        self,
        factory: Factory,
        *,
        size: int,
        resources: Mapping[str, float],
        threads: int = 1,
        role: str = "actor",
        collective: bool = True,
        start_timeout: float = 120.0,
        shell: type[Shell] = Shell,
    ) -> None:
        """Describe the group; nothing starts.

        Args:
            factory: Makes a rank's worker in its actor; pickled.
            size: Ranks.
            resources: Ray resource -> amount of one rank.
            threads: CPU threads of one rank.
            role: Named in errors.
            collective: Whether the ranks run collectives, and so have to find each other.
            start_timeout: Seconds to wait for the ranks' places.
            shell: What runs in the actors.
        """
        self.role = role
        self.size = size
        self.demand = Demand(role=role, count=size, each=dict(resources))
        self._factory = factory
        self._threads = threads
        self._collective = collective
        self._start_timeout = start_timeout
        self._shell = shell
        self._bundles: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._failed = False

    def start(self) -> None:
        """Reserve the places, make the actors, let the ranks find each other, build the workers."""
        options = self._reserve()
        actor_class = ray.remote(self._shell)
        self._actors = [
            actor_class.options(
                runtime_env=cluster.worker_environment(self._threads),
                max_restarts=0,
                **options(rank),
            ).remote()
            for rank in range(self.size)
        ]
        nodes = self.nodes()
        address = None
        if self._collective and self.size > 1:
            alone = len(set(nodes)) == 1
            (address,) = self._gather({self._actors[0].host.remote(loopback=alone): 0})
        registered = registered_plugins()
        self._all(
            [
                actor.make.remote(self._factory, self._place(rank, nodes, registered), address)
                for rank, actor in enumerate(self._actors)
            ]
        )
        log.info("group.started", role=self.role, ranks=self.size)

    def _reserve(self) -> Any:
        """Reserve every rank's resources at once; returns rank -> options of its actor."""
        amounts = {name: amount for name, amount in self.demand.each.items() if amount > 0}
        if not amounts:
            return lambda rank: {"num_cpus": 0}
        self._bundles = placement_group([dict(amounts) for _ in range(self.size)], strategy="PACK")
        if not self._bundles.wait(self._start_timeout):
            free = cluster.available()
            raise ResourceError(table([self.demand], free, waited=self._start_timeout))
        bundles = self._bundles
        own = {name: amount for name, amount in amounts.items() if name not in ("CPU", "GPU")}
        return lambda rank: {
            "num_cpus": amounts.get("CPU", 0),
            "num_gpus": amounts.get("GPU", 0),
            "resources": own,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=bundles, placement_group_bundle_index=rank
            ),
        }

    def _place(self, rank: int, nodes: Sequence[str], registered: Mapping[Any, Any]) -> Place:
        return Place(
            role=self.role,
            rank=rank,
            world_size=self.size,
            # A rank with a device of its own sees no other one.
            local_rank=0 if set(self.demand.each) - {"CPU"} else nodes[:rank].count(nodes[rank]),
            threads=self._threads,
            registered=registered,
        )

    # -- calls -------------------------------------------------------------------------------------

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call *method* on all ranks."""
        return self._all([actor.call.remote(method, args) for actor in self._started()])

    def scatter(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        refs: Sequence[Sequence[Ref]] | None = None,
    ) -> list[Any]:
        """Call *method* on each rank with its own arguments; each fetches what its references name."""
        given = refs or [()] * self.size
        return self._all(
            [
                actor.call.remote(method, own, *objects)
                for actor, own, objects in zip(self._started(), args, given, strict=True)
            ]
        )

    def call(self, rank: int, method: str, *args: Any, refs: Sequence[Ref] = ()) -> Any:
        """Call *method* on one rank."""
        (found,) = self._gather({self.begin(rank, method, *args, refs=refs): rank})
        return found

    def begin(self, rank: int, method: str, *args: Any, refs: Sequence[Ref] = ()) -> Ref:
        """Call *method* on one rank without waiting; returns where the result will be."""
        return self._started()[rank].call.remote(method, args, *refs)

    def stream(self, method: str, args: Sequence[Sequence[Any]]) -> Iterator[Streamed]:
        """Run a generator on each rank; the driver reads the infos alone."""
        waiting: dict[Any, int] = {
            actor.stream.options(num_returns="streaming").remote(method, own): rank
            for rank, (actor, own) in enumerate(zip(self._started(), args, strict=True))
        }
        while waiting:
            made: Any = self._first(waiting, fetch_local=False)
            rank = waiting.pop(made)
            try:
                info = ray.get(next(made))
                found = next(made)
            except StopIteration:
                continue
            except Exception as exc:  # noqa: BLE001 -- whatever Ray raises is a worker's failure
                raise self._failure(rank, exc, waiting) from None
            waiting[made] = rank
            yield Streamed(rank=rank, info=info, ref=found)

    def get(self, ref: Ref) -> Any:
        """Bring an object to the driver."""
        try:
            found = ray.get(ref)
        except Exception as exc:  # noqa: BLE001 -- whatever Ray raises is a worker's failure
            raise worker_error(self.role, -1, exc) from None
        self.fetched_bytes += nbytes(found)
        return found

    def nodes(self) -> list[str]:
        """Name the machine of each rank."""
        return self._all([actor.node.remote() for actor in self._started()])

    @property
    def actors(self) -> tuple[Any, ...]:
        """Handles of the ranks' actors, which other workers may be given."""
        return tuple(self._started())

    def _started(self) -> list[Any]:
        if not self._actors:
            msg = f"{self.role}: the group was not started, or was shut down"
            raise RuntimeError(msg)
        return self._actors

    def _all(self, refs: Sequence[Any]) -> list[Any]:
        return self._gather({ref: rank for rank, ref in enumerate(refs)})

    def _gather(self, waiting: dict[Any, int]) -> list[Any]:
        """Wait for all; the first failure ends the wait."""
        found: dict[int, Any] = {}
        waiting = dict(waiting)
        while waiting:
            done = self._first(waiting)
            rank = waiting.pop(done)
            try:
                found[rank] = ray.get(done)
            except Exception as exc:  # noqa: BLE001 -- whatever Ray raises is a worker's failure
                raise self._failure(rank, exc, waiting) from None
        return [found[rank] for rank in sorted(found)]

    def _first(self, waiting: Mapping[Any, int], *, fetch_local: bool = True) -> Any:
        """Wait for the first that is ready."""
        try:
            done, _ = ray.wait(list(waiting), num_returns=1, fetch_local=fetch_local)
        except KeyboardInterrupt:
            self._failed = True  # the workers are in the middle of something, and cannot close
            raise
        return done[0]

    def _failure(self, rank: int, error: Exception, others: Mapping[Any, int]) -> WorkerError:
        self._failed = True
        return first_failure(self.role, rank, error, others)

    def shutdown(self) -> None:
        """Let the workers close (unless one failed: then others may wait for it), end their processes."""
        actors, self._actors = self._actors, []
        if not ray.is_initialized():
            return
        if actors and not self._failed:
            closing = [actor.close.remote() for actor in actors]
            ray.wait(closing, num_returns=len(closing), timeout=CLOSING)
        for actor in actors:
            ray.kill(actor)
        bundles, self._bundles = self._bundles, None
        if bundles is not None:
            remove_placement_group(bundles)


@attrs.frozen
class RankWorker:
    """Makes a rank's worker in its actor; pickles as what it is made of."""

    make: Any
    config: Any

    def __call__(self, place: Place, store: Any) -> Any:
        """Build the worker."""
        return self.make(self.config, place=place, store=store)
