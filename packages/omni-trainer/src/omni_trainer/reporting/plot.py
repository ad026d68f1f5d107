"""The reward over a run: each training step, and the held-out prompts with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omni_trainer.reporting.intervals import Interval

SMOOTH = 10
"""Steps of the running mean."""


def plot_reward(
    path: Path,
    *,
    training: Sequence[tuple[int, float]],
    heldout: Sequence[tuple[int, Interval]] = (),
    title: str = "reward",
) -> None:
    """Write a PNG.

    Args:
        path: Of the file.
        training: (step, mean reward of its samples).
        heldout: (steps trained, mean over held-out prompts with its interval).
        title: Above the plot.

    Raises:
        ValueError: there is nothing to plot.
    """
    if not training and not heldout:
        msg = "there is no reward to plot"
        raise ValueError(msg)
    # Without pyplot: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        steps, rewards = [step for step, _ in training], [reward for _, reward in training]
        axes.plot(steps, rewards, color="0.75", linewidth=1, label="training, each step")
        if len(rewards) >= SMOOTH:
            label = f"training, mean of {SMOOTH} steps"
            axes.plot(steps[SMOOTH - 1 :], running_mean(rewards), color="tab:blue", label=label)
    if heldout:
        means = [interval.mean for _, interval in heldout]
        below = [interval.mean - interval.low for _, interval in heldout]
        above = [interval.high - interval.mean for _, interval in heldout]
        axes.errorbar(
            [step for step, _ in heldout],
            means,
            yerr=[below, above],
            color="tab:orange",
            marker="o",
            capsize=4,
            label="held-out prompts, 95% interval",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="steps trained", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path)


def running_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and the ones before it, *SMOOTH* together."""
    return [sum(values[end - SMOOTH : end]) / SMOOTH for end in range(SMOOTH, len(values) + 1)]
