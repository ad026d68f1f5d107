"""The quickstart's report is read from a run's files, and says what changed and why."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import numpy as np
import pytest
import structlog

from omni_trainer.config import load_run
from omni_trainer.evaluation import Evaluation, PromptScores, save_evaluation
from omni_trainer.reporting.jsonl import JsonlTracker
from omni_trainer.run_directory import RunDirectory
from omni_trainer.stopping import StoppedError
from omni_trainer.summary import summarise

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "tools/quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompt(place: int, reward: float, exact: float, blank: float) -> PromptScores:
    return PromptScores(
        row_id=str(place),
        prompt=f'A bus that reads "{place:02d}"',
        target=f"{place:02d}",
        rewards=(reward,) * 4,
        unscored=0,
        details={"exact": exact, "blank": blank},
    )


@pytest.fixture
def run(tmp_path):
    loaded = load_run("quickstart", ["trainer.steps=4"])
    found = RunDirectory.create(tmp_path / "run", loaded.config, loaded.resolved)
    scores = {
        # Half blank, half of the rest exact; then a fifth blank, the same spelling.
        0: [prompt(i, 0.25 + i / 100, 0.25, 0.5) for i in range(10)],
        4: [prompt(i, 0.45 + i / 100, 0.40, 0.2) for i in range(10)],
    }
    pictures = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), np.uint8)
    for step, prompts in scores.items():
        evaluation = Evaluation(step=step, prompts=tuple(prompts), seconds=1.0)
        save_evaluation(found.evaluations, evaluation, pictures)
    tracker = JsonlTracker()
    tracker.open(found.path, {}, offset=None)
    for step in range(1, 5):
        tracker.log(step, {"reward/mean": 0.3 + step / 20})
    tracker.close()
    return loaded.config, found


def test_the_report_says_what_changed_and_where_it_lies(quickstart, run):
    config, found = run
    summary = summarise(config, found)
    text = quickstart.report(summary, "quickstart")
    lines = text.splitlines()
    assert "Held-out prompts: 10 pairs" in text
    assert "4 pictures each" in text
    [reward] = [line for line in lines if line.startswith("OCR reward")]
    assert reward.split()[2] == "0.295"
    assert reward.endswith("+0.200 [+0.200, +0.200]")
    [exact] = [line for line in lines if line.startswith("read exactly, %")]
    assert exact.endswith("+15.0 [+15.0, +15.0]")
    [blank] = [line for line in lines if line.startswith("no number")]
    assert blank.endswith("-30.0 [-30.0, -30.0]")
    assert " 50% ->  80%" in text
    assert "+15.0 points: +15.0 from signs that show a number at all," in text
    assert "+0.0 from spelling" in text
    assert "taught with half of its signs blank" in text
    assert "taught with three wrong digits in ten" in quickstart.report(summary, "spelling")
    for path in (found.path, summary.plot, summary.before_after):
        assert path.exists()
        assert any(line.endswith(str(path)) for line in lines)
    assert "trained LoRA" not in text
    assert max(len(line) for line in lines if str(found.path) not in line) <= 110


def test_the_change_in_exact_reads_is_split_without_rest(quickstart):
    prompts = [
        prompt(i, 0.5, exact, blank) for i, (exact, blank) in enumerate([(0.1, 0.6), (0.3, 0.2)])
    ]
    found = quickstart.spelling(prompts)
    assert found.readable == pytest.approx(0.6)
    assert found.spelled == pytest.approx(0.2 / 0.6)
    nothing = quickstart.spelling([prompt(0, 0.0, 0.0, 1.0)])
    assert (nothing.readable, nothing.spelled) == (0.0, 0.0)


def test_a_mistake_is_answered_before_anything_starts(quickstart, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        assert quickstart.main(["--steps", "0", "algorithm.clip_rati=1"]) == 2
    finally:
        structlog.reset_defaults()  # what it set up writes to this test's stderr
    said = capsys.readouterr().err
    assert "trainer.steps" in said
    assert "clip_ratio" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt, 130, "interrupted; the run is in runs/q; "),
        (StoppedError(signal.SIGTERM), 143, "terminated; the run is in runs/q; "),
        (RuntimeError, 1, "the run is in runs/q; "),
    ],
)
def test_a_quickstart_that_stops_says_where_it_is_and_how_to_go_on(
    error, code, said, quickstart, tmp_path, monkeypatch, capsys
):
    def stops(config, *, run_dir, resolved):
        RunDirectory.create(run_dir, config, resolved)
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "run_training", stops)

    assert quickstart.main(["trainer.name=q"]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(said)
    assert last.endswith(
        "`omni resume runs/q` starts it from the beginning; `omni doctor runs/q` says what it shows"
    )
