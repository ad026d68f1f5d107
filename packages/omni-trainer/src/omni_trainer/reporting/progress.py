"""Where a run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

NARROW = 70
"""Columns of a terminal below which bar, speed and remaining time are left out."""


class Progress:
    """Shows the steps of one run; used as a context manager.

    Call `step` after each step and `note` for what happens between them.
    """

    def __init__(self, total: int, *, done: int = 0, console: Console | None = None) -> None:
        self._total = total
        self._done = done
        self._console = console or Console()
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._last = time.perf_counter()

    def __enter__(self) -> Self:
        self._last = time.perf_counter()
        if self._console.is_terminal:
            self._bar = Bar(*self._columns(), console=self._console)
            self._task = self._bar.add_task(
                "training", total=self._total, completed=self._done, state=""
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(
        self,
        done: int,
        *,
        reward: float | None = None,
        samples: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Show that *done* steps are trained.

        Args:
            done: Steps trained so far.
            reward: Mean of the step's samples, where they have one.
            samples: How many there were, for the speed; 0 leaves it out.
            seconds: What the step took; None is the time since the last call.
        """
        now = time.perf_counter()
        if seconds is None:
            seconds = now - self._last
        self._last = now
        self._done = done
        parts = [] if reward is None else [f"reward {reward:.3f}"]
        parts.append(f"{seconds:.1f} s/step")
        if samples and seconds > 0:
            parts.append(f"{samples / seconds:.0f} samples/s")
        if self._bar is not None and self._task is not None:
            shown = parts[:1] if self._console.width < NARROW else parts
            self._bar.update(self._task, completed=done, state=", ".join(shown))
        else:
            self._line(f"step {done}/{self._total}  {'  '.join(parts)}")

    def note(self, text: str) -> None:
        """Write a line of its own."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _columns(self) -> list[ProgressColumn]:
        state = TextColumn("{task.fields[state]}", markup=False)
        if self._console.width < NARROW:
            return [MofNCompleteColumn(), state]
        description = TextColumn("{task.description}")
        return [description, BarColumn(), MofNCompleteColumn(), state, TimeRemainingColumn()]
