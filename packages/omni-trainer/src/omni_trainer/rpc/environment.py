"""What Ray reads from the environment when it is imported: set here first, and never over a user's own."""

from __future__ import annotations

import os
import sys

ADDRESS = "RAY_ADDRESS"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
}
"""Nothing is reported to anybody, devices stay visible to workers that ask for none, and a client shows
the token of this user."""
ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for one machine alone: "0" binds all its servers to loopback, on every system."""


def prepare(address: str | None = None) -> None:
    """Set the variables.

    Args:
        address: Of a running cluster; without one, and without RAY_ADDRESS, a Ray that is started is
            reachable from this machine alone.
    """
    if address is not None:
        os.environ[ADDRESS] = address
    if "ray" in sys.modules:
        return  # it has read its environment; half of the settings would not fit the other half
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not os.environ.get(ADDRESS):
        os.environ.setdefault(ONE_MACHINE, "0")
