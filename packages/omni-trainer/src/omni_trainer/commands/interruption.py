"""Ctrl-C and SIGTERM end a command alike: workers are closed, and what to do next is said.

Exit codes are a shell's: 128 and the signal's number.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM: raised where the process is, as Ctrl-C is."""


def told(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return what is said of *error*, and the exit code."""
    if isinstance(error, Terminated):
        return "terminated", TERMINATED
    return "interrupted", INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` inside; in another thread than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    # A second one, while workers are being closed, ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated
