"""Options of the trackers. Imports no torch."""

from __future__ import annotations

import enum
from typing import Any
from urllib.parse import urlsplit

import attrs


class WandbMode(enum.StrEnum):
    """Where Weights & Biases writes."""

    ONLINE = "online"
    OFFLINE = "offline"
    """Only below the run directory: `wandb sync` sends it later."""


@attrs.frozen(kw_only=True)
class WandbOptions:
    """Weights & Biases; what is left out is its own default, or what its WANDB_* variables say."""

    project: str = "omni"
    entity: str | None = None
    """Team or user."""
    run_name: str | None = None
    """None takes the name of the run directory."""
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: WandbMode | None = None


@attrs.frozen(kw_only=True)
class MLflowOptions:
    """An MLflow tracking server."""

    uri: str | None = attrs.field(default=None)
    """Of the server; None takes the variable MLFLOW_TRACKING_URI."""
    experiment: str = "omni"
    """Made if it is not there."""
    run_name: str | None = None
    """None takes the name of the run directory."""

    @uri.validator
    def _without_credentials(self, _: Any, value: str | None) -> None:
        parts = urlsplit(value or "")
        if parts.username is not None or parts.password is not None:
            msg = (
                "holds credentials, and the config is saved with the run: take the variables "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
            raise ValueError(msg)
