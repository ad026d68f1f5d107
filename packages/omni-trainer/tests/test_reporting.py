"""Metrics, progress, plots, grids and intervals that a run shows."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from omni_core import plugins
from omni_trainer import cli
from omni_trainer.reporting import metric_names
from omni_trainer.reporting.grid import write_before_after_grid, write_grid
from omni_trainer.reporting.intervals import (
    Interval,
    bootstrap,
    bootstrap_statistic,
    paired_bootstrap,
)
from omni_trainer.reporting.jsonl import JsonlTracker, read_metrics
from omni_trainer.reporting.metric_names import METRICS, describe, table_of_metrics
from omni_trainer.reporting.plot import plot_reward
from omni_trainer.reporting.progress import Progress

# -- metrics.jsonl ----------------------------------------------------------------------------------


def test_one_line_a_step(tmp_path):
    plugin = plugins.registry(plugins.TRACKERS).get("jsonl")
    tracker = plugin.build(plugin.options())
    tracker.open(tmp_path, {}, offset=None)
    assert tracker.position() == 0
    tracker.log(0, {"heldout/reward_mean": 0.375})
    tracker.log(1, {"reward/mean": 0.1, "loss": -2e-12})
    # On the disk at once: nothing waits for close.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "heldout/reward_mean": 0.375},
        {"step": 1, "reward/mean": 0.1, "loss": -2e-12},
    ]
    assert tracker.position() == (tmp_path / "metrics.jsonl").stat().st_size
    tracker.close()
    assert list(read_metrics(tmp_path))[1] == (1, {"reward/mean": 0.1, "loss": -2e-12})


def test_a_resumed_run_cuts_back_what_came_after_the_checkpoint(tmp_path):
    tracker = JsonlTracker()
    tracker.open(tmp_path, {}, offset=None)
    tracker.log(1, {"a": 1.0})
    position = tracker.position()
    tracker.log(2, {"a": 2.0})
    tracker.close()
    tracker.open(tmp_path, {}, offset=position)
    with pytest.raises(ValueError, match="step 1 after step 1"):
        tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.5})
    tracker.close()
    assert list(read_metrics(tmp_path)) == [(1, {"a": 1.0}), (2, {"a": 2.5})]
    tracker.open(tmp_path, {}, offset=0)
    tracker.log(1, {"a": 9.0})
    tracker.close()
    assert list(read_metrics(tmp_path)) == [(1, {"a": 9.0})]


@pytest.mark.parametrize("offset", [3, 10_000])
def test_a_file_that_does_not_fit_the_checkpoint_is_refused(tmp_path, offset):
    tracker = JsonlTracker()
    tracker.open(tmp_path, {}, offset=None)
    tracker.log(1, {"a": 1.0})
    tracker.close()
    with pytest.raises(ValueError, match=f"no line that ends at {offset}"):
        tracker.open(tmp_path, {}, offset=offset)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_case_36_a_metric_that_is_not_finite_is_an_error(tmp_path, value):
    tracker = JsonlTracker()
    tracker.open(tmp_path, {}, offset=None)
    with pytest.raises(ValueError, match=f"step 1: b={value}; metrics are finite numbers"):
        tracker.log(1, {"a": 1.0, "b": value})
    with pytest.raises(ValueError, match="a metric named 'step'"):
        tracker.log(1, {"step": 1.0})
    tracker.close()
    assert list(read_metrics(tmp_path)) == []


def test_a_tracker_is_opened_first():
    with pytest.raises(RuntimeError, match="not open"):
        JsonlTracker().log(1, {})


# -- intervals --------------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_that_of_theory():
    values = np.random.default_rng(1).normal(0.5, 0.2, 400)
    found = bootstrap(values.tolist())
    error = 1.96 * values.std() / math.sqrt(len(values))
    assert found.mean == pytest.approx(values.mean(), abs=1e-12)
    assert found.low == pytest.approx(values.mean() - error, abs=2e-3)
    assert found.high == pytest.approx(values.mean() + error, abs=2e-3)


def test_pairs_take_out_what_differs_between_prompts():
    rng = np.random.default_rng(0)
    before = rng.uniform(0, 1, 40)
    after = before + 0.1 + rng.normal(0, 0.01, 40)
    found = paired_bootstrap(before.tolist(), after.tolist())
    assert found.mean == pytest.approx(0.1, abs=5e-3)
    assert found.high - found.low < 0.01
    apart = bootstrap(after.tolist())
    assert apart.high - apart.low > 0.1


def test_an_interval_follows_from_its_seed_and_narrows_with_its_level():
    values = [0.1, 0.4, 0.2, 0.9, 0.3]
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)
    assert bootstrap(values, seed=3) != bootstrap(values, seed=4)
    narrow, wide = bootstrap(values, level=0.5), bootstrap(values, level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
    assert bootstrap([0.25]) == Interval(mean=0.25, low=0.25, high=0.25)
    assert str(bootstrap([0.25])) == "0.250 [0.250, 0.250]"


def test_the_interval_of_a_ratio_is_that_of_theory():
    rng = np.random.default_rng(2)
    below = rng.uniform(0.5, 1.0, 400)
    above = 0.3 * below + rng.normal(0, 0.05, 400)

    def ratio(places):
        return above[places].sum() / below[places].sum()

    found = bootstrap_statistic(ratio, 400, samples=4000)
    value = above.sum() / below.sum()
    # The delta method: the residuals of above on the line through nothing.
    error = 1.96 * (above - value * below).std() / math.sqrt(400) / below.mean()
    assert found.mean == pytest.approx(value, abs=1e-12)
    assert found.low == pytest.approx(value - error, abs=1e-3)
    assert found.high == pytest.approx(value + error, abs=1e-3)


def test_intervals_of_nothing_are_refused():
    with pytest.raises(ValueError, match="some prompts, got 0"):
        bootstrap_statistic(lambda places: 0.0, 0)
    with pytest.raises(ValueError, match="5 of 5 draws have no finite value"):
        bootstrap_statistic(lambda places: math.nan, 3, samples=5)
    with pytest.raises(ValueError, match="one value for each of some prompts"):
        bootstrap([])
    with pytest.raises(ValueError, match="got 1 that are not"):
        bootstrap([0.1, math.nan])
    with pytest.raises(ValueError, match="got 2 before and 1 after"):
        paired_bootstrap([0.1, 0.2], [0.1])


# -- pictures ---------------------------------------------------------------------------------------


def pictures(count, height=32, width=32):
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def read(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_small_pictures_are_enlarged_pixel_by_pixel(tmp_path):
    images = pictures(3)
    write_grid(tmp_path / "grid.png", images, columns=2)
    sheet = read(tmp_path / "grid.png")
    assert sheet.shape == (8 + 2 * 136, 8 + 2 * (128 + 8), 3)
    shown = sheet[8 : 8 + 128, 8 : 8 + 128]
    assert np.array_equal(shown, images[0].repeat(4, axis=0).repeat(4, axis=1))
    third = sheet[8 + 136 : 8 + 136 + 128, 8 : 8 + 128]
    assert np.array_equal(third[::4, ::4], images[2])
    assert (sheet[8 + 136 :, 8 + 136 :] == 255).all()


def test_large_pictures_keep_their_size_and_long_captions_are_wrapped(tmp_path):
    title = (
        "A coffee mug on a table that reads a text which is much longer than three lines hold " * 2
    )
    write_grid(
        tmp_path / "a.png", pictures(1, 64, 160), columns=4, titles=[title], heading="step 7"
    )
    write_grid(tmp_path / "b.png", pictures(1, 64, 160), columns=4, titles=["x" * 99])
    first, second = (read(tmp_path / name).shape for name in ("a.png", "b.png"))
    assert first[1] == second[1] == 8 + 160 + 8
    # Three lines of a caption and the heading against one line.
    assert first[0] - second[0] == 2 * 17 + 17 + 8


def test_before_and_after_stand_side_by_side(tmp_path):
    before, after = pictures(5), 255 - pictures(5)
    write_before_after_grid(tmp_path / "pairs.png", before, after, [f"p{i}" for i in range(5)])
    sheet = read(tmp_path / "pairs.png")
    top = 8 + 17 + 8
    assert np.array_equal(sheet[top : top + 128 : 4, 8 : 8 + 128 : 4], before[0])
    assert np.array_equal(sheet[top : top + 128 : 4, 138 : 138 + 128 : 4], after[0])
    assert sheet.shape[1] == 8 + 4 * (258 + 8)


def test_grids_of_anything_else_are_refused(tmp_path):
    with pytest.raises(ValueError, match="1 titles for 2 pictures"):
        write_grid(tmp_path / "x.png", pictures(2), columns=2, titles=["one"])
    with pytest.raises(ValueError, match=r"uint8 \[N, H, W, 3\] with N >= 1, got float64"):
        write_grid(tmp_path / "x.png", pictures(2) / 255, columns=2)
    with pytest.raises(ValueError, match="must have one shape"):
        write_before_after_grid(tmp_path / "x.png", pictures(2), pictures(2, 16), ["a", "b"])


def test_steps_are_whole_numbers_on_the_axis(tmp_path, monkeypatch):
    ticks = []
    monkeypatch.setattr(Figure, "savefig", lambda self, _: ticks.extend(self.axes[0].get_xticks()))
    plot_reward(tmp_path / "plot.png", training=[(1, 0.3), (2, 0.4)])
    assert len(ticks) >= 2
    assert all(float(tick).is_integer() for tick in ticks)


def test_the_reward_is_plotted(tmp_path):
    training = [(step, 0.3 + step / 100) for step in range(1, 31)]
    heldout = [(step, bootstrap([0.3, 0.4, 0.3 + step / 60])) for step in (0, 20, 30)]
    plot_reward(tmp_path / "plot.png", training=training, heldout=heldout, title="quickstart")
    image = read(tmp_path / "plot.png").astype(int)
    assert image.shape == (540, 960, 3)
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    assert ((red > 200) & (abs(green - 127) < 20) & (blue < 60)).sum() > 200  # held-out points
    assert ((red < 60) & (abs(green - 119) < 20) & (blue > 150)).sum() > 200  # running mean
    plot_reward(tmp_path / "few.png", training=training[:3])
    with pytest.raises(ValueError, match="no reward to plot"):
        plot_reward(tmp_path / "none.png", training=[])


# -- progress ---------------------------------------------------------------------------------------


def test_outside_a_terminal_each_step_is_a_plain_line():
    out = io.StringIO()
    with Progress(3, console=Console(file=out, width=20)) as progress:
        progress.note("held-out reward 0.375 [0.301, 0.452]")
        progress.step(1, reward=0.25, samples=96)
        progress.step(2, seconds=2.5, samples=96)
    lines = out.getvalue().splitlines()
    assert lines[0] == "held-out reward 0.375 [0.301, 0.452]"
    assert lines[1].startswith("step 1/3  reward 0.250  0.0 s/step  ")
    assert lines[1].endswith(" samples/s")
    assert lines[2] == "step 2/3  2.5 s/step  38 samples/s"


@pytest.mark.parametrize("width", [30, 120])
def test_on_a_terminal_a_bar_fits_its_width(width):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with Progress(4, done=1, console=console) as progress:
        progress.step(2, reward=0.5, samples=8)
        progress.note("saved")
        progress.step(3, reward=0.5, samples=8)
    shown = out.getvalue()
    assert "3/4" in shown
    assert "reward" in shown
    assert "saved" in shown
    assert ("training" in shown) == (width == 120)


# -- names ------------------------------------------------------------------------------------------


def test_metrics_have_a_meaning():
    assert describe("reward/mean").means == "mean reward of the step's scored samples"
    assert describe("reward/aesthetic") is METRICS["reward/*"]
    assert describe("actor/teacher_distance/style") is METRICS["actor/teacher_distance/*"]
    assert describe("no_such/metric") is None
    assert all(name.count("/") == 1 for name in METRICS if not name.endswith("/*"))
    assert all(metric.unit and metric.means for metric in METRICS.values())
    assert len(METRICS) == len(metric_names._LINES), "a name is there twice"


def test_the_page_of_metrics_is_the_dictionary():
    page = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
    start = page.index("\n## ")
    assert page[start:].strip().splitlines() == "\n".join(table_of_metrics()).strip().splitlines()


def test_omni_metrics_prints_the_dictionary_and_finds_names(capsys):
    assert cli.main(["metrics"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(METRICS) + 1
    assert cli.main(["metrics", "clip"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:3] == ["metric", "advantage/clipped", "actor/clip_fraction"]
    assert cli.main(["metrics", "no_such_metric"]) == 1
    assert "no metric" in capsys.readouterr().err
