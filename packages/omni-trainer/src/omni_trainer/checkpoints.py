"""Checkpoints are whole or are not there: written aside, synced, marked, renamed; then old ones go.

checkpoints/step-000020/    tensors that the ranks wrote
                        state.json      everything else, plain data
                        COMPLETE        written last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import structlog

from omni_core.engine import CheckpointError

STATE = "state.json"
MARKER = "COMPLETE"
FORMAT = 1
_PREFIX = "step-"
_PARTIAL = ".partial-"

log = structlog.get_logger()


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A complete one."""

    step: int
    """Trained steps."""
    directory: Path

    def state(self) -> dict[str, Any]:
        """Read the plain data.

        Raises:
            CheckpointError: unreadable, or of another format.
        """
        path = self.directory / STATE
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            msg = f"{path}: {exc}"
            raise CheckpointError(msg) from exc
        if state.get("format") != FORMAT:
            msg = f"{path}: format {state.get('format')!r}, this version reads {FORMAT}"
            raise CheckpointError(msg)
        return state


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def complete(self) -> list[Checkpoint]:
        """List the complete ones, oldest first; what is partial does not count."""
        found = [
            Checkpoint(step=int(path.name.removeprefix(_PREFIX)), directory=path)
            for path in self.directory.glob(f"{_PREFIX}*")
            if path.name.removeprefix(_PREFIX).isdigit() and (path / MARKER).is_file()
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """Return the newest complete one."""
        found = self.complete()
        return found[-1] if found else None

    def at(self, step: int | None = None) -> Checkpoint:
        """Return the one of *step*, or the newest.

        Raises:
            CheckpointError: there is none; lists those that are there.
        """
        found = {checkpoint.step: checkpoint for checkpoint in self.complete()}
        wanted = max(found, default=None) if step is None else step
        if wanted is None or wanted not in found:
            have = ", ".join(str(known) for known in sorted(found)) or "none"
            which = "complete checkpoint" if step is None else f"checkpoint of step {step}"
            msg = f"{self.directory}: no {which}; complete ones: {have}"
            raise CheckpointError(msg)
        return found[wanted]

    def save(self, step: int, write: Callable[[Path], Mapping[str, Any]]) -> Checkpoint:
        """Make the checkpoint of *step*.

        Args:
            step: Trained steps.
            write: Lets the ranks write their tensors below a directory and returns the plain data.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        aside = self.directory / f"{_PARTIAL}{_PREFIX}{step:06d}"
        try:
            self._write(aside, step, write)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)  # a disk that is full is given it back
            raise
        target = self.place(step)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        _sync(self.directory)
        log.info("checkpoint.saved", step=step, directory=str(target))
        self._rotate()
        return Checkpoint(step=step, directory=target)

    def place(self, step: int) -> Path:
        """Say where the checkpoint of *step* is, or would be."""
        return self.directory / f"{_PREFIX}{step:06d}"

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """Replace some of the plain data of a complete checkpoint, whose tensors stay as they are."""
        held = self.at(step)
        path = held.directory / STATE
        aside = path.with_name(f"{_PARTIAL}{STATE}")
        _write_state(aside, {**held.state(), **values})
        _sync(aside)
        aside.replace(path)
        _sync(held.directory)

    def _write(self, aside: Path, step: int, write: Callable[[Path], Mapping[str, Any]]) -> None:
        aside.mkdir()
        state = {"format": FORMAT, **write(aside)}
        _write_state(aside / STATE, state)
        _sync_tree(aside)
        (aside / MARKER).write_text(f"{step}\n", encoding="utf-8")
        _sync(aside / MARKER)
        _sync(aside)

    def _sweep(self) -> None:
        """Remove what an interrupted save left."""
        for path in self._partial():
            log.info("checkpoint.partial_removed", directory=str(path))
            shutil.rmtree(path)

    def _partial(self) -> Iterator[Path]:
        yield from list(self.directory.glob(f"{_PARTIAL}*"))
        for path in list(self.directory.glob(f"{_PREFIX}*")):
            if not (path / MARKER).is_file():
                yield path

    def _rotate(self) -> None:
        for old in self.complete()[: -self.keep]:
            # Unmarked first: a removal that is interrupted leaves no half that looks whole.
            (old.directory / MARKER).unlink()
            shutil.rmtree(old.directory)


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def _sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
