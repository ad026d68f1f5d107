"""What a run shows while it goes on: trackers, progress, pictures, held-out scores on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from omni_core import config as core
from omni_core.plugins import TRACKERS, registry
from omni_core.tracking import Tracker
from omni_trainer.config import RunConfig
from omni_trainer.evaluation import Evaluation, Shown, pick_shown, save_evaluation
from omni_trainer.group import WorkerGroup
from omni_trainer.reporting.clips import write_clips
from omni_trainer.reporting.grid import (
    write_before_after_grid,
    write_contact_sheet,
    write_grid,
)
from omni_trainer.reporting.progress import Progress
from omni_trainer.run_directory import RunDirectory
from omni_trainer.samples import Samples

GRID_COLUMNS = 8
EDITS = "each pair: what is edited (left) and an edit of it (right)"
JSONL = "jsonl"

log = structlog.get_logger()


class Observer:
    """Told by the loop what happened; nothing that it does changes the run."""

    def __init__(self, config: RunConfig, run: RunDirectory, progress: Progress) -> None:
        self.config = config
        self.run = run
        self.progress = progress
        self.trackers: dict[str, Tracker] = {}

    def open(
        self, trackers: Mapping[str, Tracker], positions: Mapping[str, int | None] | None
    ) -> None:
        """Open the trackers: anew, or cut back to where a checkpoint found them."""
        plain = core.unstructure(self.config)
        for name, tracker in trackers.items():
            offset = None if positions is None else positions.get(name)
            tracker.open(self.run.path, plain, offset=offset)
            self.trackers[name] = tracker

    def positions(self) -> dict[str, int | None]:
        """Say where the trackers' next entries go."""
        return {name: tracker.position() for name, tracker in self.trackers.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one step's metrics on."""
        for tracker in self.trackers.values():
            tracker.log(step, metrics)
        log.info("step.done", step=step, **metrics)
        if step:
            samples = self.config.rows_per_step
            reward, seconds = metrics.get("reward/mean"), metrics.get("time/step")
            self.progress.step(step, reward=reward, samples=samples, seconds=seconds)

    def samples(self, step: int, samples: Samples, group: WorkerGroup) -> None:
        """Show one sample of each group, where a grid is due."""
        every = self.config.trainer.grid_every
        if not every or step % every:
            return
        requests = samples.plan.requests[: GRID_COLUMNS * 4]
        keys = [(request.group_id, request.samples[0].k) for request in requests]
        shown = pick_shown(group, samples, [samples.places[key] for key in keys])
        titles = [
            f"{result.value:.2f}  {request.prompt}" if result is not None else request.prompt
            for request, result in zip(requests, map(samples.results.get, keys), strict=True)
        ]
        self._grid(step, f"train-step-{step:06d}", shown, titles)

    def evaluated(self, found: Evaluation, shown: Shown | None) -> None:
        """Keep held-out scores, and show the first samples."""
        pictures = None if shown is None else shown.pictures
        save_evaluation(self.run.evaluations, found, pictures)
        numbers = found.metrics()
        said = "  ".join(
            f"{name.removeprefix('heldout/')} {value:.3g}" for name, value in numbers.items()
        )
        self.progress.note(f"held-out after {steps_said(found.step)}: {said}")
        if shown is not None:
            titles = [f"{p.mean:.2f}  {p.prompt}" for p in found.prompts[: len(shown.pictures)]]
            self._grid(found.step, f"heldout-step-{found.step:06d}", shown, titles)

    def stopped(self, step: int, checkpoint: Path) -> None:
        """Say where a run was saved that a signal stops, before its workers are closed."""
        self.progress.note(f"saved after {steps_said(step)}: {checkpoint}")
        self.progress.note(f"go on with: omni resume {self.run.path}")

    def _grid(self, step: int, name: str, shown: Shown, titles: Sequence[str]) -> None:
        """Write pictures as a grid; of videos, a sheet of frames and files that play beside it."""
        self.run.grids.mkdir(exist_ok=True)
        path = self.run.grids / f"{name}.png"
        frames = [clip.frames for clip in shown.clips if clip.frames is not None]
        if frames:
            write_contact_sheet(path, frames, titles[: len(frames)])
        elif shown.edited is not None:
            write_before_after_grid(
                path, shown.edited, shown.pictures, titles, heading=EDITS, columns=GRID_COLUMNS // 2
            )
        else:
            write_grid(path, shown.pictures, columns=GRID_COLUMNS, titles=titles)
        write_clips(self.run.grids, name, shown.clips)
        for tracker in self.trackers.values():
            tracker.image(step, name.partition("-step")[0], path)

    def close(self, *, failed: bool = False) -> None:
        """Close the trackers."""
        trackers, self.trackers = self.trackers, {}
        for tracker in trackers.values():
            tracker.close(failed=failed)


def steps_said(count: int) -> str:
    """Say a number of steps."""
    return f"{count} step{'s' * (count != 1)}"


def make_trackers(config: RunConfig) -> dict[str, Tracker]:
    """Build the trackers of a run, unopened: metrics.jsonl, which a resume lives on, and the config's own.

    Raises:
        PluginError: one cannot be used here (an extra is missing); says what to install.
    """
    jsonl = registry(TRACKERS).get(JSONL)
    made: dict[str, Tracker] = {JSONL: jsonl.build(jsonl.options())}
    for choice in config.trainer.trackers:
        if choice.name != JSONL:
            made[choice.name] = choice.plugin.build(choice.options)
    return made


def positions_of(state: Mapping[str, Any]) -> dict[str, int | None]:
    """Take the trackers' positions out of a checkpoint's state."""
    return dict(state["trackers"])
