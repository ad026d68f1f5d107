"""The loop on processes that a launcher such as torchrun has started: no Ray, rank 0 drives.

Every process is started with the same command line. Rank 0 runs it, the others follow: they make their
worker when rank 0 makes its own, and do what it asks until it ends.
"""

from __future__ import annotations

import os


def launched_ranks() -> int:
    """Return how many processes a launcher started as one job (RANK, WORLD_SIZE); 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_follower() -> bool:
    """Whether this process is one of several, and not the one that drives."""
    return launched_ranks() > 1 and int(os.environ["RANK"]) > 0
