"""What each launched process holds: its worker, its scorer, and the objects that they made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from omni_core.plugins import Plugin
from omni_core.reward import RewardInput, RewardResult
from omni_trainer.group import failure
from omni_trainer.launched.link import Link
from omni_trainer.reward_pool import ROLE as SCORER
from omni_trainer.workers.process import Place
from omni_trainer.workers.reward import RewardWorker

Key = tuple[int, int]
"""(rank, number) of an object."""
WORKER, SCORES, ITSELF = "actor", SCORER, "host"


@attrs.frozen(kw_only=True)
class Making:
    """The first request: what a rank is made of."""

    worker: Any
    """Class, built as `worker(config, place=...)`."""
    config: Any
    threads: int
    registered: Mapping[tuple[str, str], Plugin]
    reward: tuple[str, Any] | None
    """Name and options of the scorer; None where nothing is scored."""


@attrs.frozen(kw_only=True)
class Request:
    """A call that every rank takes part in, some with nothing to do but to hand objects over."""

    target: str
    """`actor`, `reward` or `host`."""
    method: str
    args: Sequence[Sequence[Any]]
    """Of each rank."""
    refs: Sequence[Sequence[Key]]
    """Objects that each rank's call takes after its arguments."""
    ranks: frozenset[int]
    """Who calls."""
    streams: bool = False
    """The method is a generator of (info, object): objects stay, infos and keys are returned."""
    released: tuple[Key, ...] = ()
    """Objects that nobody asks for any more."""

    def moves(self) -> list[tuple[Key, int]]:
        """(object, rank that has to be sent it), in an order that all ranks see alike."""
        wanted = [
            (key, rank) for rank in sorted(self.ranks) for key in dict.fromkeys(self.refs[rank])
        ]
        return [(key, rank) for key, rank in wanted if key[0] != rank]


class Scores:
    """A rank's scorer: scores what lies there."""

    def __init__(self, name: str, options: Any) -> None:
        self.worker = RewardWorker(name, options)
        self.worker.setup()

    def score(
        self, inputs: Sequence[Sequence[RewardInput]], *trajectories: Any
    ) -> list[list[RewardResult]]:
        """Score every row of each trajectory."""
        return [self.worker.score(own, t) for own, t in zip(inputs, trajectories, strict=True)]

    def counts(self) -> Any:
        """Say what was scored so far."""
        return self.worker.counts()


class Host:
    """Does what is asked of a rank."""

    def __init__(self, link: Link, making: Making) -> None:
        self.link = link
        self._objects: dict[Key, Any] = {}
        self._made = 0
        place = Place(
            role=WORKER,
            rank=link.rank,
            world_size=link.size,
            local_rank=link.local_rank,
            threads=making.threads,
            registered=making.registered,
        )
        self._targets: dict[str, Any] = {ITSELF: self}
        self._make(WORKER, "start", lambda: making.worker(making.config, place=place))
        if making.reward is not None:
            name, options = making.reward
            self._make(SCORES, "setup", lambda: Scores(name, options))

    def _make(self, target: str, what: str, build: Any) -> None:
        try:
            self._targets[target] = build()
        except Exception as exc:
            raise failure(target, self.link.rank, exc, what) from exc

    def do(self, request: Request) -> Any:
        """Take part in a request.

        Raises:
            WorkerError: what was called failed here.
        """
        for key in request.released:
            self._objects.pop(key, None)
        borrowed = self._exchange(request)
        rank = self.link.rank
        if rank not in request.ranks:
            return None
        given = [
            borrowed[key] if key in borrowed else self._objects[key] for key in request.refs[rank]
        ]
        try:
            method = getattr(self._targets[request.target], request.method)
            found = method(*request.args[rank], *given)
            return self._keep(found) if request.streams else found
        except Exception as exc:
            raise failure(request.target, rank, exc, request.method) from exc

    def _exchange(self, request: Request) -> dict[Key, Any]:
        borrowed = {}
        for key, rank in request.moves():
            if key[0] == self.link.rank:
                self.link.send(self._objects[key], rank)
            elif rank == self.link.rank:
                borrowed[key] = self.link.receive(key[0])
        return borrowed

    def _keep(self, made: Any) -> list[tuple[Any, Key]]:
        kept = []
        for info, found in made:
            key = (self.link.rank, self._made)
            self._made += 1
            self._objects[key] = found
            kept.append((info, key))
        return kept

    def hand_over(self, found: Any) -> Any:
        """Return an object itself."""
        return found

    def close(self) -> None:
        """Free everything."""
        self._objects.clear()
        scores, worker = self._targets.pop(SCORES, None), self._targets.pop(WORKER, None)
        if scores is not None:
            scores.worker.close()
        if worker is not None:
            worker.close()
