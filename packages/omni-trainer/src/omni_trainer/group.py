"""All ranks of a role as one: a method for all of them, or each with arguments of its own.

What is large stays where it was made: `stream` hands out references, and ranks are given references
back. The driver reads small results alone (`fetched_bytes` counts what it does read).
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from omni_core.records import TensorRecord

Ref = Any
"""Where a large object is: the object itself in one process, a reference on Ray."""


STARTING, SETTING_UP = "start", "init_model"
_REFUSALS = ("ValueError: ", "FileNotFoundError: ", "OSError: ")
_NO_DEVICE = "DeviceError: "


class WorkerError(RuntimeError):
    """A worker failed. The first line names role, rank and error; its own traceback follows.

    Attributes:
        role: Of the worker.
        rank: Of the worker.
        died: Its process is gone, in contrast to an exception of its code.
        mistake: The first line alone, where that says all: the model or the config does not fit, by
            which an engine and its rollout refuse to be made (`BaseEngine.initialize`), or the device is
            not there. Else None.
    """

    def __init__(
        self, role: str, rank: int, error: str, *, details: str = "", died: bool = False
    ) -> None:
        super().__init__(
            "\n".join([f"{role} rank {rank}: {error}", *([details] if details else [])])
        )
        self.role = role
        self.rank = rank
        self.died = died
        refused = error.startswith(_REFUSALS) and error.endswith(f"(in {SETTING_UP})")
        refused = refused or (error.startswith(_NO_DEVICE) and error.endswith(f"(in {STARTING})"))
        self.mistake = f"{role} rank {rank}: {error}" if refused else None


class LostWorkerError(RuntimeError):
    """A process that a worker asks for something is gone: raised in the worker, which is not at fault."""


@attrs.frozen(kw_only=True)
class Streamed:
    """One large object that a rank has made."""

    rank: int
    info: Any
    """What the driver is told of it."""
    ref: Ref


class WorkerGroup(ABC):
    """Workers of one role. `start` first, `shutdown` last, also after an error.

    An object that was streamed lives as long as somebody holds its reference.
    """

    role: str
    size: int
    in_driver: bool = False
    """Whether the workers live in the driver's own process."""
    fetched_bytes: int = 0
    """Tensor bytes that came to the driver by `get`."""

    @abstractmethod
    def start(self) -> None:
        """Make every worker.

        Raises:
            ResourceError: the devices are not there.
            WorkerError: a worker could not be made.
        """

    @abstractmethod
    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call *method* on all ranks; results in rank order."""

    @abstractmethod
    def scatter(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        refs: Sequence[Sequence[Ref]] | None = None,
    ) -> list[Any]:
        """Call *method* on each rank with its own arguments, and then what its own *refs* refer to."""

    @property
    def ranks(self) -> int:
        """Every rank; more than `size` where some hold the same rows (`row_group`)."""
        return self.size

    def each(self, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        """Call *method* on every one of `ranks` with its own arguments."""
        return self.scatter(method, args)

    @abstractmethod
    def call(self, rank: int, method: str, *args: Any, refs: Sequence[Ref] = ()) -> Any:
        """Call *method* on one rank: not for collectives."""

    @abstractmethod
    def stream(self, method: str, args: Sequence[Sequence[Any]]) -> Iterator[Streamed]:
        """Run a generator of (info, object) on each rank; yields in the order of finishing."""

    @abstractmethod
    def get(self, ref: Ref) -> Any:
        """Bring an object to the driver."""

    def stop_asked(self) -> int | None:
        """Look whether a process of the group had a signal that the driver had not: its number."""
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """End every worker; may be called twice."""


class LocalGroup(WorkerGroup):
    """One worker in the driver's own process."""

    in_driver = True

    def __init__(self, factory: Callable[[], Any], *, role: str = "actor") -> None:
        self.role = role
        self.size = 1
        self._factory = factory
        self._worker: Any = None

    def start(self) -> None:
        """Make the worker."""
        self._worker = self._run(STARTING, self._factory)

    def _run(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except WorkerError:
            raise
        except Exception as exc:
            raise failure(self.role, 0, exc, what) from exc

    def _method(self, name: str) -> Callable[..., Any]:
        if self._worker is None:
            msg = f"{self.role}: the group was not started, or was shut down"
            raise RuntimeError(msg)
        found: Callable[..., Any] = getattr(self._worker, name)
        return found

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call the one worker."""
        return [self._run(method, lambda: self._method(method)(*args))]

    def scatter(
        self,
        method: str,
        args: Sequence[Sequence[Any]],
        refs: Sequence[Sequence[Ref]] | None = None,
    ) -> list[Any]:
        """Call the one worker with the one set of arguments."""
        (own,) = args
        return self.broadcast(method, *own, *(refs[0] if refs else ()))

    def call(self, rank: int, method: str, *args: Any, refs: Sequence[Ref] = ()) -> Any:
        """Call the one worker."""
        if rank != 0:
            msg = f"{self.role}: rank {rank} of a group of 1"
            raise IndexError(msg)
        return self.broadcast(method, *args, *refs)[0]

    def stream(self, method: str, args: Sequence[Sequence[Any]]) -> Iterator[Streamed]:
        """Run the one worker's generator."""
        (own,) = args
        made = self._run(method, lambda: iter(self._method(method)(*own)))
        while True:
            item = self._run(method, lambda: next(made, None))
            if item is None:
                return
            info, found = item
            yield Streamed(rank=0, info=info, ref=found)

    def get(self, ref: Ref) -> Any:
        """Return the object, which is here."""
        self.fetched_bytes += nbytes(ref)
        return ref

    def shutdown(self) -> None:
        """Close the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def nbytes(found: Any) -> int:
    """Bytes of a record's tensors; 0 of anything else."""
    return found.nbytes() if isinstance(found, TensorRecord) else 0


def failure(role: str, rank: int, error: BaseException, method: str) -> WorkerError:
    """Turn what a worker's code raised into the error that the driver raises."""
    details = "".join(traceback.format_exception(error)).rstrip()
    return WorkerError(role, rank, f"{describe(error)} (in {method})", details=details)


def describe(error: BaseException) -> str:
    """`ValueError: x`."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
