"""A group of ranks as the loop deals rows to it: ranks that hold the same rows are one.

What is dealt goes to all ranks of such a place, since they compute together; what comes back is taken
from its first one (`BaseEngine.is_mp_src_rank_with_outputs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from omni_trainer.group import Ref, Streamed, WorkerGroup
from omni_trainer.workers.rank import RankFacts


def by_rows(group: WorkerGroup, facts: Sequence[RankFacts]) -> WorkerGroup:
    """Return *group* itself where every rank has rows of its own.

    Args:
        group: Started, its model made.
        facts: What each rank said of itself.
    """
    places = [fact.data_parallel_rank for fact in facts]
    return group if places == list(range(group.size)) else RowGroup(group, facts)


class RowGroup(WorkerGroup):
    """`size` counts places of rows; `broadcast` and `each` still reach every rank."""

    def __init__(self, group: WorkerGroup, facts: Sequence[RankFacts]) -> None:
        self.role = group.role
        self.group = group
        self._places = [fact.data_parallel_rank for fact in facts]
        self._first: dict[int, int] = {}
        for rank, fact in enumerate(facts):
            if fact.has_outputs:
                self._first.setdefault(fact.data_parallel_rank, rank)
        self.size = len(self._first)

    @property
    def ranks(self) -> int:
        """Every rank, whatever it holds."""
        return self.group.ranks

    def start(self) -> None:
        """Refuse: the ranks are started, and have said what they hold."""
        msg = f"{self.role}: the ranks of a row group are started already"
        raise RuntimeError(msg)

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call *method* on every rank."""
        return self.group.broadcast(method, *args)

    def each(self, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        """Call *method* on every rank with its own arguments."""
        return self.group.each(method, args)

    def scatter(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        refs: Sequence[Sequence[Ref]] | None = None,
    ) -> list[Any]:
        """Call *method* with the arguments of each place; one result for each."""
        found = self.group.scatter(
            method,
            [args[place] for place in self._places],
            None if refs is None else [refs[place] for place in self._places],
        )
        return [found[self._first[place]] for place in range(self.size)]

    def call(self, rank: int, method: str, *args: Any, refs: Sequence[Ref] = ()) -> Any:
        """Call *method* on the first rank of a place."""
        return self.group.call(self._first[rank], method, *args, refs=refs)

    def stream(self, method: str, args: Sequence[Sequence[Any]]) -> Iterator[Streamed]:
        """Run a generator on every rank; what the others of a place made is let go."""
        firsts = set(self._first.values())
        for item in self.group.stream(method, [args[place] for place in self._places]):
            if item.rank in firsts:
                yield attrs.evolve(item, rank=self._places[item.rank])

    def get(self, ref: Ref) -> Any:
        """Bring an object to the driver."""
        return self.group.get(ref)

    def stop_asked(self) -> int | None:
        """Ask the group."""
        return self.group.stop_asked()

    def shutdown(self) -> None:
        """End every rank."""
        self.group.shutdown()
