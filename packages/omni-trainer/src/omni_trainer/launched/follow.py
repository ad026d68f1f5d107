"""What a launched process does that does not drive: it joins each session, and does what is asked."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import structlog

from omni_core import log as logs
from omni_trainer.group import WorkerError
from omni_trainer.launched import is_follower, launched_ranks
from omni_trainer.launched.host import WORKER, Host
from omni_trainer.launched.link import SESSIONS, Link
from omni_trainer.stopping import ONE_SIGNAL, end_at_the_next, handled

OK, FAILED = 0, 1

log = structlog.get_logger()


def follow() -> int:
    """Take part in every session of rank 0; returns the process's exit code.

    A failure is told to rank 0, which reports it, and is written here too where it came first: a launcher
    may end rank 0 before that.
    """
    while (session := SESSIONS.next()) is not None:
        number, device = session
        link = Link(number, device)
        logs.configure(level="warning", json=True, role=WORKER, rank=link.rank)
        try:
            with _signals_told(link):
                serve(link)
        except WorkerError as exc:
            first, _, details = str(exc).partition("\n")
            if link.tell_failure(exc.role, first.partition(": ")[2], details):
                sys.stderr.write(f"error: {exc}\n")
            link.close()
            link.wait_until_heard()
            return FAILED
        except RuntimeError as exc:
            log.debug("launched.rank_0_gone", error=str(exc))
            return FAILED
        link.close()
    return OK


def serve(link: Link) -> None:
    """Make this rank's worker, and answer until the session ends.

    Raises:
        WorkerError: what was called failed here.
        RuntimeError: another rank is gone.
    """
    host = Host(link, link.hear())
    link.collect(None)
    try:
        while (request := link.hear()) is not None:
            link.collect(host.do(request))
    finally:
        host.close()


@contextmanager
def _signals_told(link: Link) -> Iterator[None]:
    """Tell rank 0 of a signal, and go on: it says where all stop. A second signal ends this process."""
    told: list[float] = []

    def tell(number: int, frame: FrameType | None) -> None:
        del frame
        if told and time.monotonic() - told[0] >= ONE_SIGNAL:
            end_at_the_next()
            os.kill(os.getpid(), number)
        told.append(time.monotonic())
        with suppress(RuntimeError):  # rank 0 is gone, which the next collective shows
            link.tell_stop(number)

    with handled(tell):
        yield


@contextmanager
def driving() -> Iterator[None]:
    """Drive: at the end, also after an error, the others are let go."""
    try:
        yield
    finally:
        if launched_ranks() > 1 and not is_follower():
            SESSIONS.end()
