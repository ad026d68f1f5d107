"""A rollout in an actor of its own, and the transport that a `ServerAdapter` reaches it by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from omni_core.rollout import BaseRollout
from omni_trainer.workers.server_adapter import ServerAdapter, Transport, serve


class RolloutServer:
    """Runs in the actor."""

    def __init__(self, factory: Callable[[], BaseRollout]) -> None:
        self._rollout = factory()

    def answer(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer one call."""
        return serve(self._rollout, method, *args, **kwargs)


def serve_rollout(factory: Callable[[], BaseRollout], **options: Any) -> Any:
    """Start an actor that holds the rollout; *options* are Ray's (`num_cpus`, `num_gpus`, ...)."""
    return ray.remote(RolloutServer).options(**options).remote(factory)


def actor_transport(actor: Any) -> Transport:
    """Reach the rollout of `serve_rollout`; what it raises is raised here."""

    def transport(method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return ray.get(actor.answer.remote(method, args, kwargs))
        except ray.exceptions.RayTaskError as exc:
            raise exc.cause from exc

    return transport


def connect_rollout(actor: Any) -> ServerAdapter:
    """Make the client of an actor's rollout."""
    return ServerAdapter(actor_transport(actor))
