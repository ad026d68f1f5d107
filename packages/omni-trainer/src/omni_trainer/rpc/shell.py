"""What runs inside an actor: a thin shell around a plain worker, which does not know about it.

An exception of the worker comes back with its own traceback as text, so it needs no class that the
driver knows.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import ray

from omni_core import log as logs
from omni_trainer.group import LostWorkerError, describe
from omni_trainer.workers import process

Address = tuple[str, int]
Factory = Callable[[process.Place, Any], Any]
"""(place, store of the rendezvous) -> worker."""


class RemoteFailure(Exception):  # noqa: N818 -- it carries an error, and is never shown itself
    """What a worker raised: its description, and its traceback as text."""

    def __init__(self, error: str, details: str, lost: bool = False) -> None:
        super().__init__(error, details, lost)
        self.error = error
        self.details = details
        self.lost = lost
        """A process that the worker asked is gone."""


class Shell:
    """Made in the actor's process; `make` builds the worker there."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._rendezvous: process.Rendezvous | None = None

    def host(self, *, loopback: bool) -> Address:
        """Open the store through which the ranks find each other; rank 0 alone does."""
        own_address: Any = ray.util.get_node_ip_address
        host: str = process.LOOPBACK if loopback else own_address()
        self._rendezvous = process.Rendezvous(host=host, port=0, is_master=True)
        return host, self._rendezvous.port

    def node(self) -> str:
        """Name the machine that this actor is on."""
        return str(ray.get_runtime_context().get_node_id())

    def make(self, factory: Factory, place: process.Place, address: Address | None) -> None:
        """Build the worker, once all ranks do."""
        logs.configure(level="warning", json=True, role=place.role, rank=place.rank)
        with _told("start"):
            if address is not None and self._rendezvous is None:
                host, port = address
                self._rendezvous = process.Rendezvous(host=host, port=port, is_master=False)
            store = None if self._rendezvous is None else self._rendezvous.store
            self._worker = factory(place, store)

    def call(self, method: str, args: Sequence[Any], *objects: Any) -> Any:
        """Call a method of the worker; Ray has fetched what *objects* refer to."""
        with _told(method):
            return getattr(self._worker, method)(*args, *objects)

    def stream(self, method: str, args: Sequence[Any]) -> Iterator[Any]:
        """Run a generator of (info, object): one result for each, so that one can stay here."""
        with _told(method):
            for info, found in getattr(self._worker, method)(*args):
                yield info
                yield found

    def close(self) -> None:
        """Close the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


@attrs.frozen
class _told:  # noqa: N801 -- used like a function
    """Turn what is raised inside into a `RemoteFailure`."""

    method: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            details = "".join(traceback.format_exception(error)).rstrip()
            said = f"{describe(error)} (in {self.method})"
            raise RemoteFailure(said, details, isinstance(error, LostWorkerError)) from None
