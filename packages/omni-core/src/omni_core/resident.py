"""Memory that processes hold now, as the system counts it; 0 where it does not say."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PROC = Path("/proc")


def resident_bytes(process: int | None = None) -> int:
    """Bytes that a process holds.

    Args:
        process: Its id; None is this one.
    """
    try:
        held = (_PROC / str(process or "self") / "statm").read_text(encoding="ascii")
    except OSError:  # no such file system, or no such process any more
        return 0
    return int(held.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def session_bytes(session: int) -> int:
    """Bytes that all processes of a session hold together.

    Args:
        session: Id of the process that began it.
    """
    found = 0
    for entry in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == session:
                found += resident_bytes(int(entry.name))
    return found
