"""Workers, training loops, rewards, data, tracking and the `omni` command.

The names below are the public API; each is loaded from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from omni_trainer._version import __version__

_HOMES = {
    "omni_trainer.canary": ("CanaryError",),
    "omni_trainer.config": ("RunConfig", "load_run"),
    "omni_trainer.evaluation": ("Evaluation",),
    "omni_trainer.group": ("LocalGroup", "WorkerError", "WorkerGroup"),
    "omni_trainer.loop": ("Trainer",),
    "omni_trainer.run": ("evaluate_run", "export_run", "run_training"),
    "omni_trainer.summary": ("RunSummary",),
    "omni_trainer.workers": (
        "ActorRolloutRefConfig",
        "ActorRolloutRefWorker",
        "RewardWorker",
        "ServerAdapter",
        "TrainingWorker",
        "TrainingWorkerConfig",
    ),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # noqa: PLE0604 -- built from the table


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        msg = f"module 'omni_trainer' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
