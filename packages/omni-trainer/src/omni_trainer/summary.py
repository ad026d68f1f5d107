"""What a run came to: held-out scores before and after, pictures, and where everything lies."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from omni_trainer.config import RunConfig
from omni_trainer.evaluation import Evaluation, load_evaluation
from omni_trainer.reporting.changes import reward_change
from omni_trainer.reporting.grid import write_before_after_grid
from omni_trainer.reporting.intervals import Interval, bootstrap
from omni_trainer.reporting.jsonl import read_metrics
from omni_trainer.reporting.plot import plot_reward
from omni_trainer.run_directory import RunDirectory

EXPORTED = "exported.json"
"""File of a run directory that says where its exported adapter is."""


@attrs.frozen(kw_only=True)
class RunSummary:
    """What a run came to."""

    run_dir: Path
    steps: int
    """Trained in all."""
    trained: int
    """Trained by this call: 0 where the run was finished already."""
    seconds: float
    """Of this call."""
    before: Evaluation | None = None
    """Held-out scores before the first step."""
    after: Evaluation | None = None
    """Held-out scores after the last one."""
    gain: Interval | None = None
    """after - before, prompt by prompt."""
    export: Path | None = None
    """File of the trained adapter."""
    plot: Path | None = None
    before_after: Path | None = None
    """Grid of the same prompts and seeds before and after."""

    @property
    def finished_before(self) -> bool:
        """Whether there was nothing left to do."""
        return self.trained == 0


def summarise(config: RunConfig, run: RunDirectory) -> RunSummary:
    """Write plot and grid of a finished run, and say what it came to."""
    first, last = (load_evaluation(run.evaluations, step) for step in (0, config.trainer.steps))
    before, after = (None if found is None else found[0] for found in (first, last))
    change = None if before is None or after is None else reward_change(before, after)
    return RunSummary(
        run_dir=run.path,
        steps=config.trainer.steps,
        trained=0,
        seconds=0.0,
        before=before,
        after=after,
        gain=None if change is None else change.change,
        export=_exported(run),
        plot=_plot(config, run),
        before_after=_before_after(config, run),
    )


def _exported(run: RunDirectory) -> Path | None:
    path = run.path / EXPORTED
    if not path.is_file():
        return None
    return run.path / str(json.loads(path.read_text(encoding="utf-8"))["adapter"])


def _before_after(config: RunConfig, run: RunDirectory) -> Path | None:
    first, last = (load_evaluation(run.evaluations, step) for step in (0, config.trainer.steps))
    if first is None or last is None:
        return None
    before, after = first[1], last[1]
    if before is None or after is None or before.shape != after.shape:
        return None
    run.grids.mkdir(exist_ok=True)
    path = run.grids / "before_after.png"
    titles = [prompt.prompt for prompt in last[0].prompts[: len(after)]]
    write_before_after_grid(path, before, after, titles)
    return path


def _plot(config: RunConfig, run: RunDirectory) -> Path | None:
    training = [
        (step, values["reward/mean"])
        for step, values in read_metrics(run.path)
        if "reward/mean" in values
    ]
    heldout = []
    for step in range(config.trainer.steps + 1):
        found = load_evaluation(run.evaluations, step)
        means = [prompt.mean for prompt in found[0].prompts if prompt.rewards] if found else []
        if means:
            heldout.append((step, bootstrap(means)))
    if not training and not heldout:
        return None
    path = run.path / "reward.png"
    plot_reward(path, training=training, heldout=heldout, title=f"reward of {run.path.name}")
    return path
