"""What a run directory says of its run, as it stands: finished, under way, or ended at any point.

Everything is read as plain data: no plugin of the run has to be installed, and no model is loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from omni_trainer.evaluation import Evaluation, Pictures, load_evaluation
from omni_trainer.reporting.changes import Change, reward_change
from omni_trainer.reporting.jsonl import read_metrics
from omni_trainer.run_directory import CONFIG, RANKS, STARTED, RunDirectory
from omni_trainer.run_status import RunState, RunStatus, read_status

Series = list[tuple[int, float]]
"""(step, value), in order."""


class RunRecord:
    """One run directory, read when it is asked.

    Raises:
        RunDirectoryError: it holds no run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = RunDirectory.open(path)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved config as plain data."""
        found: Any = yaml.safe_load((self.path / CONFIG).read_text(encoding="utf-8"))
        return found if isinstance(found, Mapping) else {}

    def setting(self, path: str, default: Any = None) -> Any:
        """Return the config's value at a dotted path."""
        found: Any = self.config
        for key in path.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        return found

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Dotted path -> the layer that its value came from."""
        return self._json("provenance.json")

    @cached_property
    def started_with(self) -> Mapping[str, Any]:
        """Dotted path -> the value that the run was started with; empty of a run that kept none."""
        return self._json(STARTED)

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Versions, platform, threads."""
        return self._json("environment.json")

    @cached_property
    def ranks(self) -> list[Mapping[str, Any]]:
        """What each rank runs on; empty if none ever came up."""
        return list(self._json(RANKS).get("ranks", []))

    @cached_property
    def status(self) -> RunStatus | None:
        """How it ended; None of a run that never trained."""
        return read_status(self.path)

    @cached_property
    def in_use(self) -> bool:
        """Whether a process works on it now."""
        return self.run.in_use()

    @property
    def killed(self) -> bool:
        """Whether its process ended without a word."""
        return self.status is not None and self.status.state is RunState.RUNNING and not self.in_use

    @property
    def state(self) -> str:
        """Where it is, in words."""
        if self.in_use:
            return "under way"
        if self.killed:
            return "ended without a word"
        if self.status is not None:
            return self.status.state.value
        return "finished" if 0 < self.planned <= self.trained else "not trained"

    @cached_property
    def steps(self) -> list[tuple[int, dict[str, float]]]:
        """(step, metrics), in order."""
        return list(read_metrics(self.path))

    @property
    def trained(self) -> int:
        """Steps whose metrics are there."""
        return self.steps[-1][0] if self.steps else 0

    @property
    def planned(self) -> int:
        """Steps that the config asks for."""
        return int(self.setting("trainer.steps", 0))

    @property
    def names(self) -> list[str]:
        """Every metric that any step has, in the order of their first appearance."""
        return list(dict.fromkeys(name for _, metrics in self.steps for name in metrics))

    def series(self, name: str) -> Series:
        """The values of one metric."""
        return [(step, metrics[name]) for step, metrics in self.steps if name in metrics]

    def median(self, name: str) -> float | None:
        """Median over all steps that have the metric; None if none has."""
        values = [value for _, value in self.series(name)]
        return median(values) if values else None

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Held-out scores, in order of their steps."""
        found = (
            load_evaluation(self.run.evaluations, step, pictured=False) for step in self._evaluated
        )
        return [each[0] for each in found if each is not None]

    def first_and_last_pictures(self) -> list[tuple[Evaluation, Pictures]]:
        """The first and the last evaluation with pictures (or the only one): uint8 [N, H, W, 3] each."""
        held = sorted(int(p.stem.removeprefix("step-")) for p in self.run.evaluations.glob("*.npy"))
        found = (
            load_evaluation(self.run.evaluations, step) for step in sorted({*held[:1], *held[-1:]})
        )
        return [(each[0], each[1]) for each in found if each is not None and each[1] is not None]

    @cached_property
    def gain(self) -> Change | None:
        """Change of the held-out reward from the first to the last evaluation; None without two."""
        if len(self.evaluations) < 2:
            return None
        return reward_change(self.evaluations[0], self.evaluations[-1])

    @cached_property
    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return [one.step for one in self.run.checkpoints(keep=1).complete()]

    @property
    def free_disk(self) -> int:
        """Bytes left where the run lies."""
        return shutil.disk_usage(self.path).free

    @property
    def _evaluated(self) -> list[int]:
        found = self.run.evaluations.glob("step-*.json")
        return sorted(int(path.stem.removeprefix("step-")) for path in found)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
