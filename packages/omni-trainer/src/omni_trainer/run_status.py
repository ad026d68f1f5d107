"""How a run ended, in status.json of its directory. A process that is killed leaves `running` behind."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from omni_trainer.run_directory import write_json

STATUS = "status.json"
_LONGEST = 4000
"""Characters of an error that are kept."""


class RunState(enum.StrEnum):
    """Where a run is."""

    RUNNING = "running"
    """Or its process ended without a word."""
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """By Ctrl-C or SIGTERM."""


@attrs.frozen(kw_only=True)
class RunStatus:
    """What status.json holds."""

    state: RunState
    error: str = ""
    """Class of the error that ended it, such as `CanaryError`."""
    said: str = ""
    """The error's own words."""
    died: bool = False
    """A worker's process was gone."""
    disk_full: bool = False


@contextmanager
def recorded(directory: Path) -> Iterator[None]:
    """Keep status.json while a run trains inside; what ends it passes on."""
    _write(directory, RunStatus(state=RunState.RUNNING))
    try:
        yield
    except KeyboardInterrupt:
        _write(directory, RunStatus(state=RunState.INTERRUPTED))
        raise
    except Exception as exc:
        _write(directory, _failed(exc))
        raise
    _write(directory, RunStatus(state=RunState.FINISHED))


def _failed(error: Exception) -> RunStatus:
    return RunStatus(
        state=RunState.FAILED,
        error=type(error).__name__,
        said=str(error)[:_LONGEST],
        died=bool(getattr(error, "died", False)),
        disk_full=isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT),
    )


def _write(directory: Path, status: RunStatus) -> None:
    # A full disk must not hide the error that it caused.
    with contextlib.suppress(OSError):
        write_json(directory / STATUS, attrs.asdict(status))


def read_status(directory: Path) -> RunStatus | None:
    """Read status.json; None where there is none."""
    path = directory / STATUS
    if not path.is_file():
        return None
    held = json.loads(path.read_text(encoding="utf-8"))
    return RunStatus(**{**held, "state": RunState(held["state"])})
