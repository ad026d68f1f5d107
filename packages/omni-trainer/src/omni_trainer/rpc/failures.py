"""Which failure came first: of several ranks that fail together, the one that the others fail by.

When a process dies, its peers' collectives fail at once, and that news is faster than the news of the
death. So after a first failure the others get a moment to report theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import ObjectRefGenerator
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from omni_trainer.group import WorkerError, describe
from omni_trainer.rpc.shell import RemoteFailure

GRACE = 3.0
"""Seconds."""

DEATHS = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, ObjectLostError)


def first_failure(role: str, rank: int, error: Exception, others: Mapping[Any, int]) -> WorkerError:
    """Return the error to raise.

    Args:
        role: Of the workers.
        rank: Whose failure was seen first.
        error: What Ray raised for it.
        others: References that are still open -> their ranks.
    """
    found = [worker_error(role, rank, error)]
    if others and not found[0].died:
        done, _ = ray.wait(list(others), num_returns=len(others), timeout=GRACE, fetch_local=False)
        for ref in done:
            try:
                ray.get(next(ref) if isinstance(ref, ObjectRefGenerator) else ref)
            except StopIteration:
                continue
            except Exception as exc:  # noqa: BLE001 -- a failure of whatever kind is looked at
                found.append(worker_error(role, others[ref], exc))
    return next((one for one in found if one.died), found[0])


def worker_error(role: str, rank: int, error: Exception) -> WorkerError:
    """Turn what Ray raised for a rank into the error that a driver raises."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RemoteFailure):
        return WorkerError(role, rank, cause.error, details=cause.details, died=cause.lost)
    if isinstance(cause, DEATHS):
        said = " ".join(str(cause).split())
        return WorkerError(role, rank, f"its process died: {said}", died=True)
    return WorkerError(role, rank, describe(cause), details=str(error))
