"""The shipped pipeline trained on Ray by the real engine: two ranks, and a killed worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_trainer.config import load_run
from omni_trainer.run import run_training

pytestmark = pytest.mark.timeout(300)

RUN = ("trainer.steps=6", "checkpoint.every=2", "evaluation.max_prompts=3", "trainer.device=cpu")


def metrics(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {n: v for n, v in json.loads(line).items() if not n.startswith(("time/", "memory/"))}
        for line in lines
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run, in one process."""
    loaded = load_run("smoke", RUN)
    return run_training(loaded.config, run_dir=tmp_path_factory.mktemp("whole") / "run")


@contextmanager
def omni(*arguments):
    with subprocess.Popen(
        [sys.executable, "-m", "omni_trainer.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def shells(pid):
    """Ray actors below the process *pid* that are at work."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    found = []
    for one in below:
        try:
            line = Path(f"/proc/{one}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if line.startswith("ray::Shell"):
            found.append(one)
    return found


def test_a_killed_worker_ends_the_run_with_its_cause_and_a_resume_changes_nothing(whole, tmp_path):
    run_dir = tmp_path / "run"
    overrides = [*RUN, "trainer.backend=ray", f"trainer.run_dir={tmp_path}", "trainer.name=run"]
    with omni("train", "smoke", *overrides) as run:
        deadline = time.monotonic() + 200
        while len(metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []) < 4:
            assert run.poll() is None, run.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for pid in shells(run.pid):
            os.kill(pid, signal.SIGKILL)
        _, errors = run.communicate(timeout=120)

    assert run.returncode == 1
    lines = [line for line in errors.splitlines() if "[transformers]" not in line]
    assert "rank 0: its process died" in lines[0]
    assert f"`omni resume {run_dir}` goes on after 2 steps" in errors or "after 4 steps" in errors
    assert len(metrics(run_dir)) < 7

    with omni("resume", str(run_dir)) as resumed:
        said, errors = resumed.communicate(timeout=200)

    assert resumed.returncode == 0, errors
    assert metrics(run_dir) == metrics(whole.run_dir)
    assert (run_dir / "export").is_dir()
    assert "held-out after" in said


def test_two_ranks_train_what_one_does(whole, tmp_path):
    """3 held-out prompts on 2 ranks are uneven; the training rows are shared equally."""
    loaded = load_run("smoke", [*RUN, "trainer.backend=ray", "trainer.ranks=2"])
    summary = run_training(loaded.config, run_dir=tmp_path / "run")
    alone, both = metrics(whole.run_dir), metrics(summary.run_dir)

    assert [line["step"] for line in both] == [line["step"] for line in alone]
    for one, other in zip(alone, both, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name.startswith("actor/"):
                assert other[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
    assert both[1]["canary/exact"] == 0.0
    assert both[1]["reward/mean"] == alone[1]["reward/mean"]
    assert summary.after is not None
    last = json.loads((summary.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    held = {name: value for name, value in last.items() if name.startswith("memory/")}
    assert held.keys() == {"memory/driver_rss", "memory/actor_rss", "memory/reward_rss"}
    assert all(0.01 < value < 100 for value in held.values())
    assert [len(prompt.rewards) for prompt in summary.after.prompts] == [1, 1, 1]
