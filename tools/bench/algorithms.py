"""What each algorithm learns for its CPU-seconds: `hatch run bench:algorithms` (slow: about an hour of one core).

The tiny pipeline is trained with each algorithm and seed, one process and one thread, by the trainer's own
loop. Held-out prompts are evaluated every few steps; their cost is not counted. The first JSON line of a
run holds its points (CPU-seconds, held-out reward); OUTPUT then holds all of them (`algorithms.json`), a
table (`algorithms.md`) and a plot (`algorithms.png`). Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from omni_trainer.config import load_run
from omni_trainer.evaluation import load_evaluation
from omni_trainer.loop import Trainer
from omni_trainer.reporting.intervals import bootstrap
from omni_trainer.run import run_training
from omni_trainer.run_directory import RunDirectory

RECIPES: Mapping[str, tuple[str, ...]] = {
    "flow_grpo": ("quickstart",),
    "mix_grpo": ("tiny_mix_grpo",),
    "diffusion_nft": ("tiny_diffusion_nft",),
    "pepg": ("tiny_elbo", "algorithm.form=pepg"),
    "awm": ("tiny_awm",),
    "diffusion_dpo": ("tiny_diffusion_dpo",),
}
"""What is compared: a recipe and what is said beside it."""

PLAIN = ("trainer.backend=local", "trainer.grid_every=0", "evaluation.grid_prompts=0")
Run = dict[str, Any]


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    """CPU-seconds after each trained step: of training alone, evaluations left out."""
    train, spent = Trainer.train, [0.0]

    def measured(trainer: Trainer) -> None:
        begun = time.process_time()
        train(trainer)
        spent.append(spent[-1] + time.process_time() - begun)

    Trainer.train = measured  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Trainer.train = train  # type: ignore[method-assign]


def run_one(name: str, seed: int, *, folder: Path, steps: int, every: int) -> Run:
    """Train once; the points of the run."""
    recipe, *more = RECIPES[name]
    seeds = [f"seeds.{kind}={seed}" for kind in ("data", "rollout", "train")]
    lengths = [f"trainer.steps={steps}", f"evaluation.every={every}"]
    loaded = load_run(recipe, [*PLAIN, *more, *seeds, *lengths])
    run_dir = folder / f"{name}-{seed}"
    with timed() as spent, contextlib.redirect_stdout(sys.stderr):
        summary = run_training(loaded.config, run_dir=run_dir, resolved=loaded.resolved)
    assert summary.gain is not None
    points = []
    for step in range(steps + 1):
        found = load_evaluation(RunDirectory(run_dir).evaluations, step)
        if found is not None:
            reward = bootstrap([prompt.mean for prompt in found[0].prompts])
            points.append([step, spent[step], reward.mean, reward.low, reward.high])
    gain = [summary.gain.mean, summary.gain.low, summary.gain.high]
    return {"algorithm": name, "seed": seed, "points": points, "gain": gain}


def reward_at(run: Run, seconds: float) -> float:
    """Held-out reward after so many CPU-seconds, between two evaluations along a line."""
    points = run["points"]
    for before, after in itertools.pairwise(points):
        if seconds <= after[1]:
            share = (seconds - before[1]) / max(after[1] - before[1], 1e-9)
            return float(before[2] + share * (after[2] - before[2]))
    return float(points[-1][2])


def table(runs: Sequence[Run]) -> str:
    """Held-out reward at equal cost and at the end, and every seed's gain, as Markdown."""
    least = min(run["points"][-1][1] for run in runs)
    lines = [
        f"Equal cost: {least:.0f} CPU-seconds of training, the shortest run's.",
        "",
        "| algorithm | CPU-seconds a run | before | at equal cost | at the end | gain of each seed, 95% |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(run["algorithm"] for run in runs):
        own = [run for run in runs if run["algorithm"] == name]
        means = [
            sum(values) / len(own)
            for values in (
                [run["points"][-1][1] for run in own],
                [run["points"][0][2] for run in own],
                [reward_at(run, least) for run in own],
                [run["points"][-1][2] for run in own],
            )
        ]
        gains = ", ".join("{:+.2f} [{:+.2f}, {:+.2f}]".format(*run["gain"]) for run in own)
        cost, before, equal, end = means
        lines.append(f"| {name} | {cost:.0f} | {before:.3f} | {equal:.3f} | {end:.3f} | {gains} |")
    return "\n".join(lines) + "\n"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Held-out reward against CPU-seconds: a line for each seed, a colour for each algorithm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours: dict[str, str] = {}
    for run in runs:
        name = run["algorithm"]
        label = None if name in colours else name
        colour = colours.setdefault(name, f"C{len(colours)}")
        seconds, rewards = [p[1] for p in run["points"]], [p[2] for p in run["points"]]
        axes.plot(seconds, rewards, color=colour, marker=".", alpha=0.8, label=label)
    axes.set(xlabel="CPU-seconds of training", ylabel="held-out reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


def main() -> None:
    """Run what is not there yet, and write everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--algorithms", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in given.seeds:
        for name in given.algorithms:
            kept = given.output / f"{name}-{seed}.json"
            if not kept.exists():
                folder = given.output / "runs"
                run = run_one(name, seed, folder=folder, steps=given.steps, every=given.every)
                kept.write_text(json.dumps(run) + "\n", encoding="utf-8")
            runs.append(json.loads(kept.read_text(encoding="utf-8")))
            print(json.dumps(runs[-1]), flush=True)
    runs.sort(key=lambda run: given.algorithms.index(run["algorithm"]))
    (given.output / "algorithms.json").write_text(json.dumps(runs, indent=1) + "\n")
    (given.output / "algorithms.md").write_text(table(runs), encoding="utf-8")
    plot(runs, given.output / "algorithms.png")


if __name__ == "__main__":
    main()
