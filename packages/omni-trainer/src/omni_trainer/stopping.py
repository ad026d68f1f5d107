"""A run at Ctrl-C or SIGTERM: it stops where its state is whole and is saved; a second signal ends it at once.

Exit codes are a shell's: 128 and the signal's number.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
_WORDS: Mapping[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_STDERR = 2
ONE_SIGNAL = 2.0
"""Seconds in which a second signal is the first one once more: a scheduler and a launcher may both send it."""


class StoppedError(KeyboardInterrupt):
    """A signal ended what was going on, as a bare KeyboardInterrupt does.

    Attributes:
        number: Of the signal.
        lost: What of the work was not saved, in words; empty where all was, or where nothing is known of it.
    """

    def __init__(self, number: int = signal.SIGINT, *, lost: str = "") -> None:
        super().__init__(told_by(number))
        self.number = number
        self.lost = lost


class StopAskedError(BaseException):
    """Raised where a run stops, and caught by its trainer, which then saves."""


class NotSavedError(RuntimeError):
    """A run was stopped by a signal, and its checkpoint could not be written."""


def told_by(number: int) -> str:
    """Say which signal it was."""
    return _WORDS.get(number, f"stopped by signal {number}")


def told(error: KeyboardInterrupt) -> tuple[str, int]:
    """Return what is said of *error*, and the exit code."""
    number = error.number if isinstance(error, StoppedError) else int(signal.SIGINT)
    said = told_by(number)
    if isinstance(error, StoppedError) and error.lost:
        said += f", and {error.lost}"
    return said, 128 + number


def what_is_lost(*, step: int, saved: int | None, under_way: bool) -> str:
    """Say what of a run that ends now is not saved.

    Args:
        step: Trained steps.
        saved: Step of the newest checkpoint.
        under_way: Whether another step was begun.
    """
    done = step - (saved or 0)
    parts = [f"{done} step{'s' * (done != 1)}"] if done else []
    parts += ["the step under way"] if under_way else []
    last = "there is no checkpoint" if saved is None else f"the last checkpoint is of step {saved}"
    return f"what is lost: {' and '.join(parts) or 'nothing'} ({last})"


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let *handler* have Ctrl-C and SIGTERM inside; in another thread than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A job in the background of a script is started with SIGINT ignored, and stays so.
    minded = [number for number in _WORDS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in minded}
    try:
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)


def end_at_the_next() -> None:
    """Let the next signal end the process, whatever it is about."""
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def say(line: str) -> None:
    """Write a line from a signal's handler, where print may be in the middle of another one."""
    os.write(_STDERR, f"\n{line}\n".encode())


class StopRequest:
    """Whether a run has been asked to stop.

    A signal ends at once what is not deferred; inside `deferred` it is remembered, and `look` raises
    where the run can stop. A second one always ends it at once.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        """Number of the signal."""
        self.elsewhere: Callable[[], int | None] = lambda: None
        """Asks whether another process of the run had a signal: its number."""
        self._asked_at = 0.0
        self._deferred = False
        self._at_once = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals of this process."""
        with handled(self._handle):
            yield

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.asked is not None and time.monotonic() - self._asked_at < ONE_SIGNAL:
            return
        if not self._deferred or self.asked is not None:
            end_at_the_next()
            raise StoppedError(number)
        self.asked, self._asked_at = number, time.monotonic()
        say(
            f"{told_by(number)}: the run stops where its state is whole, and is saved; a second signal ends "
            "it at once, unsaved"
        )
        if self._at_once:
            raise StopAskedError

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Remember the first signal instead of ending at it."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Stop wherever the run is inside: nothing there has to be whole.

        Raises:
            StopAskedError: the run was asked to stop, before or now.
        """
        self._at_once = True
        try:
            self.look()
            yield
        finally:
            self._at_once = False

    def look(self) -> None:
        """Stop here if that was asked.

        Raises:
            StopAskedError: it was.
        """
        if self.asked is None:
            self.asked = self.elsewhere()
        if self.asked is not None:
            raise StopAskedError

    def error(self, *, lost: str = "") -> StoppedError:
        """Make the error with which the run ends."""
        return StoppedError(signal.SIGINT if self.asked is None else self.asked, lost=lost)
