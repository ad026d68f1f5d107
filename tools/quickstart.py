"""Train the tiny signs pipeline with FlowGRPO on Ray, and say plainly what that changed.

    hatch run quickstart [--recipe quickstart|spelling] [--seed N] [--steps N] [key=value ...]

It is a recipe of omni-configs: `omni train quickstart` runs the same. `spelling` starts from a model that
paints wrong digits, where that of `quickstart` often paints none. What is printed after the training is
read from the run directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from omni_core.log import configure
from omni_trainer.commands.failures import report as report_failure
from omni_trainer.commands.interruption import terminable
from omni_trainer.commands.training import where_it_is
from omni_trainer.config import LoadedRun, load_run
from omni_trainer.evaluation import Evaluation, PromptScores
from omni_trainer.reporting.changes import Change, change_of, scored_pairs
from omni_trainer.reporting.intervals import Interval, bootstrap_statistic
from omni_trainer.run import run_training
from omni_trainer.run_directory import new_run_path
from omni_trainer.stopping import told
from omni_trainer.summary import RunSummary

TAUGHT = {
    "quickstart": "with half of its signs blank, so there is much of the first to be had",
    "spelling": "with three wrong digits in ten, so there is much of the second to be had",
}
"""Recipe -> how the model that it starts from was taught."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, then report."""
    parser = argparse.ArgumentParser(
        prog="quickstart", description="Train a tiny text-to-image pipeline with RL, in minutes."
    )
    parser.add_argument("--recipe", choices=TAUGHT, default="quickstart", help="what is trained")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    parser.add_argument("--steps", type=int, help="training steps (default: the recipe's 60)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="over the recipe")
    arguments = parser.parse_args(argv)
    configure(level="warning")
    try:
        loaded = configured(arguments.recipe, arguments.seed, arguments.steps, arguments.overrides)
    except Exception as exc:  # noqa: BLE001 -- the last frame: every error ends in sentences
        return report_failure(exc)
    run_dir = new_run_path(loaded.config, loaded.source)
    print(
        f"training in {run_dir}; seed {arguments.seed}, {loaded.config.trainer.steps} steps",
        flush=True,
    )
    try:
        with terminable():
            summary = run_training(loaded.config, run_dir=run_dir, resolved=loaded.resolved)
    except KeyboardInterrupt as exc:
        said, code = told(exc)
        print(f"{said}; {where_it_is(run_dir)}", file=sys.stderr)
        return code
    except Exception as exc:  # noqa: BLE001 -- told here, where the run's directory is known
        code = report_failure(exc)
        print(where_it_is(run_dir), file=sys.stderr)
        return code
    print(report(summary, arguments.recipe))
    return 0


def configured(recipe: str, seed: int, steps: int | None, overrides: Sequence[str]) -> LoadedRun:
    """Load the recipe with what was asked for."""
    seeds = [f"seeds.{name}={seed}" for name in ("data", "rollout", "reward", "train")]
    length = [] if steps is None else [f"trainer.steps={steps}"]
    return load_run(recipe, [*seeds, *length, *overrides])


# -- what is said in the end --------------------------------------------------------------------------


def report(summary: RunSummary, recipe: str) -> str:
    """Write the report of a finished run of *recipe*."""
    parts = [f"{summary.steps} steps, {summary.seconds:.0f} s."]
    if summary.before is not None and summary.after is not None:
        evaluations = summary.before, summary.after
        parts += [_numbers(*evaluations), _meaning(*evaluations, TAUGHT[recipe])]
    parts += [_places(summary), _next(summary.run_dir, recipe)]
    return "\n\n".join(["", *parts])


def _numbers(before: Evaluation, after: Evaluation) -> str:
    """Tabulate reward, spelling and blank signs with their intervals."""
    pairs = scored_pairs(before, after)
    samples = len(pairs[0][0].rewards) if pairs else 0
    rows = [
        ("OCR reward", change_of(before, after, lambda prompt: prompt.mean), 1.0),
        ("read exactly, %", change_of(before, after, _exact), 100.0),
        ("no number to be read, %", change_of(before, after, _blank), 100.0),
    ]
    lines = [
        f"Held-out prompts: {len(pairs)} pairs of object and number that training did not see, "
        f"{samples} pictures each,",
        "the same seeds before and after. In brackets: 95% intervals (bootstrap over prompts).",
        "",
        f"{'':<25}{'before':<22}{'after':<22}change",
    ]
    return "\n".join([*lines, *(_row(name, change, scale) for name, change, scale in rows)])


def _row(name: str, change: Change, scale: float) -> str:
    style = ".3f" if scale == 1 else ".1f"
    cells = [
        _interval(change.before, scale, style),
        _interval(change.after, scale, style),
        _interval(change.change, scale, f"+{style}"),
    ]
    return f"{name:<25}{cells[0]:<22}{cells[1]:<22}{cells[2]}"


def _interval(interval: Interval, scale: float, style: str) -> str:
    mean, low, high = (
        format(round(value * scale, 3) + 0.0, style)
        for value in (interval.mean, interval.low, interval.high)
    )
    return f"{mean} [{low}, {high}]"


@attrs.frozen
class Spelling:
    """How the exact reads of one evaluation come about: exact = readable x spelled."""

    readable: float
    """Share of pictures with a number to be read."""
    spelled: float
    """Share of those in which it is the right one."""


def spelling(prompts: Sequence[PromptScores]) -> Spelling:
    """Take it from the means of the prompts."""
    readable = sum(1 - _blank(prompt) for prompt in prompts) / len(prompts)
    exact = sum(_exact(prompt) for prompt in prompts) / len(prompts)
    return Spelling(readable, exact / readable if readable else 0.0)


def spelling_change(pairs: Sequence[tuple[PromptScores, PromptScores]]) -> Interval:
    """Take the change in the share of readable numbers that are the right ones, in points of 100."""

    def change(places: NDArray[np.int64]) -> float:
        first, last = (spelling([pairs[each][side] for each in places]) for side in (0, 1))
        return (last.spelled - first.spelled) * 100

    return bootstrap_statistic(change, len(pairs))


def _meaning(before: Evaluation, after: Evaluation, taught: str) -> str:
    """Split the change in exact reads into signs that became readable and better spelling."""
    pairs = scored_pairs(before, after)
    first, last = spelling([pair[0] for pair in pairs]), spelling([pair[1] for pair in pairs])
    shown = (last.readable - first.readable) * (first.spelled + last.spelled) / 2
    better = (last.spelled - first.spelled) * (first.readable + last.readable) / 2
    return "\n".join(
        [
            "What RL changed:",
            f"  signs with a number to be read      {first.readable:4.0%} -> {last.readable:4.0%}",
            f"  of those, read exactly as asked     {first.spelled:4.0%} -> {last.spelled:4.0%}"
            f"   {_interval(spelling_change(pairs), 1.0, '+.1f')} points",
            f"  The change in exact reads is {_points(shown + better)} points: "
            f"{_points(shown)} from signs that show a number at all,",
            f"  {_points(better)} from spelling.",
            f"  The starting model was taught {taught};",
            "  that says little about how well large models learn to write.",
        ]
    )


def _points(share: float) -> str:
    return f"{round(share * 100, 1) + 0.0:+.1f}"  # + 0.0: never -0.0


def _places(summary: RunSummary) -> str:
    found: list[tuple[str, Path | None]] = [
        ("run", summary.run_dir),
        ("plot of the reward", summary.plot),
        ("before and after", summary.before_after),
        ("trained LoRA", summary.export),
    ]
    return "\n".join(f"{name:<20}{path}" for name, path in found if path is not None)


def _next(run: Path, recipe: str) -> str:
    other = "spelling" if recipe == "quickstart" else "quickstart"
    rows = [
        (f"omni config show {recipe}", "every value, and where it comes from"),
        (f"omni train {recipe} algorithm.window_size=2", "two steps of each sample, not five"),
        (f"omni train {recipe} data.train=FILE", "other prompts of this form, one a line"),
        (f"omni train {other}", f"a model taught {TAUGHT[other].partition(',')[0]}"),
    ]
    lines = [
        "To try next (in the environment: `hatch shell`):",
        *(f"  {command:<48}  {what}" for command, what in rows),
        f"  omni report {run}",
        f"  omni eval {run}",
    ]
    return "\n".join(lines)


def _exact(prompt: PromptScores) -> float:
    return prompt.details["exact"]


def _blank(prompt: PromptScores) -> float:
    return prompt.details["blank"]


if __name__ == "__main__":
    sys.exit(main())
