"""Ctrl-C and SIGTERM end a command alike, wherever it is; a run that trains is saved first (`stopping`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from omni_trainer.stopping import StoppedError, end_at_the_next, handled


@contextmanager
def terminable() -> Iterator[None]:
    """Let both signals raise `StoppedError` inside; in another thread than the main one nothing changes."""
    with handled(_raise):
        yield


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    end_at_the_next()
    raise StoppedError(number)
