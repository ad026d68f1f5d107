"""The client of a rollout that lives elsewhere: every call goes through one transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from omni_core.options import DiffusionSamplingConfig
from omni_core.rollout import (
    BaseRollout,
    RolloutHandle,
    RolloutState,
    UpdateReport,
    WeightUpdate,
)
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import RolloutRequest, Trajectory

Transport = Callable[..., Any]
"""`transport(method, *args, **kwargs)` runs the method where the rollout is and returns its result; what
the method raises is raised here."""


def serve(rollout: BaseRollout, method: str, *args: Any, **kwargs: Any) -> Any:
    """Answer one call of a `ServerAdapter`: what a transport runs on the other side.

    Raises:
        AttributeError: not a public method or property of a rollout.
    """
    if method.startswith("_") or not hasattr(BaseRollout, method):
        msg = f"a rollout has no method {method!r}"
        raise AttributeError(msg)
    found = getattr(rollout, method)
    return found(*args, **kwargs) if callable(found) else found


class ServerAdapter(BaseRollout):
    """A rollout of another process or actor, in the form of `BaseRollout`.

    >>> rollout = ServerAdapter(lambda method, *args, **kwargs: serve(far, method, *args, **kwargs))
    """

    def __init__(self, transport: Transport) -> None:
        self._call = transport

    @property
    def state(self) -> RolloutState:
        """What it may be asked for now."""
        return RolloutState(self._call("state"))

    @property
    def weight_version(self) -> int:
        """Version of the policy that samples."""
        return int(self._call("weight_version"))

    def schedule(self, sampling: DiffusionSamplingConfig) -> FlowMatchSchedule:
        """Return the sigmas that the rollout would use."""
        return cast(FlowMatchSchedule, self._call("schedule", sampling))

    def submit(self, requests: Sequence[RolloutRequest], *, decode: bool = True) -> RolloutHandle:
        """Queue requests."""
        return cast(RolloutHandle, self._call("submit", tuple(requests), decode=decode))

    def poll(self, handle: RolloutHandle) -> list[Trajectory]:
        """Return what finished since the last poll."""
        return cast("list[Trajectory]", self._call("poll", handle))

    def done(self, handle: RolloutHandle) -> bool:
        """Whether everything of *handle* was polled."""
        return bool(self._call("done", handle))

    def cancel(self, handle: RolloutHandle) -> None:
        """Drop what was not polled."""
        self._call("cancel", handle)

    def pause(self) -> None:
        """Return once no request is running."""
        self._call("pause")

    def update(self, update: WeightUpdate) -> UpdateReport:
        """Bind new weights while paused."""
        return cast(UpdateReport, self._call("update", update))

    def resume(self) -> None:
        """Sample again."""
        self._call("resume")

    def sleep(self, level: int = 1) -> None:
        """Give memory back."""
        self._call("sleep", level)

    def wake(self) -> None:
        """Undo `sleep`."""
        self._call("wake")

    def close(self) -> None:
        """Free everything on the other side."""
        self._call("close")
