"""Processes of one machine find each other on loopback; gloo would listen where the host's name leads.

A gloo group opens a port even for a process alone, and on many machines the host's name is an address
of the network.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Interface that gloo listens on; one that the user has set stays."""


def interface() -> str | None:
    """Name this machine's loopback interface; None if it has no known one."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def stay() -> None:
    """Keep every gloo group that this process makes from now on to this machine."""
    name = interface()
    if name is not None:
        os.environ.setdefault(VARIABLE, name)


@contextmanager
def only() -> Iterator[None]:
    """Keep the groups that are made inside to this machine; later ones are as they were."""
    before = os.environ.get(VARIABLE)
    stay()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
