"""Runs of the shipped pipeline that are broken on purpose: `omni doctor RUN` names the cause of each."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
import types

import attrs
import pytest

from omni_core import plugins
from omni_core.plugins import Plugin
from omni_core.schedule import FlowMatchSchedule
from omni_engine_fsdp.options import EngineRolloutConfig
from omni_engine_fsdp.rollout import EngineRollout
from omni_trainer import cli
from omni_trainer.canary import CanaryError
from omni_trainer.config import load_run
from omni_trainer.diagnosis import diagnose
from omni_trainer.group import WorkerError
from omni_trainer.run import run_training
from omni_trainer.run_record import RunRecord

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers and transformers

BLIND = ("data.heldout=null", "evaluation.initial=false")


@pytest.fixture
def train(tmp_path):
    def run(*overrides):
        loaded = load_run("smoke", ["trainer.steps=3", *overrides])
        run_training(loaded.config, run_dir=tmp_path / "run", resolved=loaded.resolved)
        return tmp_path / "run"

    return run


def function(tmp_path, body):
    """A reward of a user's own."""
    path = tmp_path / "my_reward.py"
    path.write_text(f"def score(images, prompts, metadata):\n    {body}\n")
    return ("reward.name=python", f"reward.path={path}", *BLIND)


def named(run_dir):
    return [found.symptom.key for found in diagnose(RunRecord(run_dir))]


def evidence(run_dir):
    return diagnose(RunRecord(run_dir))[0].evidence


def test_a_healthy_run_has_no_finding(train, capsys):
    run_dir = train("trainer.steps=2")
    capsys.readouterr()

    assert cli.main(["doctor", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{run_dir}: finished, 2 of 2 steps",
        "nothing found",
    ]


def test_a_constant_reward(train, tmp_path):
    run_dir = train(*function(tmp_path, "return [0.25] * len(images)"))

    assert named(run_dir) == ["constant_reward", "no_gradient"]
    assert evidence(run_dir) == "100% of groups, steps 1 to 3; scores lie between 0.25 and 0.25"


class Perturbed(EngineRollout):
    """Samples on another schedule than it was asked for, and says that it did not."""

    def submit(self, requests, *, decode=True):
        self.asked = requests[0].sampling.sigmas
        shifted = FlowMatchSchedule.linear(len(self.asked) - 1, shift=1.7).values()
        changed = [
            attrs.evolve(request, sampling=attrs.evolve(request.sampling, sigmas=shifted))
            for request in requests
        ]
        return super().submit(changed, decode=decode)

    def poll(self, handle):
        return [
            attrs.evolve(each, effective=attrs.evolve(each.effective, sigmas=self.asked))
            for each in super().poll(handle)
        ]


def test_a_schedule_that_is_not_the_one_asked_for(train, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "perturbed", types.SimpleNamespace(made=Perturbed))
    registry = plugins.registry(plugins.ROLLOUTS)
    registry.register(
        "perturbed", Plugin(api=1, options=EngineRolloutConfig, target="perturbed:made")
    )
    try:
        with pytest.raises(CanaryError):
            train("rollout.name=perturbed", *BLIND)
    finally:
        registry.unregister("perturbed")

    assert named(tmp_path / "run") == ["canary"]
    assert evidence(tmp_path / "run").startswith(
        "after 0 of 3 steps: CanaryError: the exact canary is"
    )


def test_a_learning_rate_that_is_far_too_large(train, tmp_path):
    with pytest.raises(WorkerError):
        train(
            "optimizer.lr=1e30",
            "optimizer.max_nonfinite_steps=1",
            "trainer.steps=6",
            *function(tmp_path, "return [float(len(p) + i) for i, p in enumerate(prompts)]"),
        )

    assert named(tmp_path / "run") == ["non_finite", "skipped_steps"]
    assert "NonFiniteGradientsError: 2 " in evidence(tmp_path / "run")


def test_a_learning_rate_of_next_to_nothing(train):
    run_dir = train("optimizer.lr=1e-12", *BLIND)

    assert named(run_dir) == ["no_learning_rate"]
    assert evidence(run_dir) == "at most 1e-12, steps 1 to 3"


def test_a_scorer_that_fails_for_half_of_the_pictures(train, tmp_path):
    body = "return [None if i % 2 else i / 9 for i, _ in enumerate(images)]"
    run_dir = train(*function(tmp_path, body), "reward.on_error=mask")

    assert named(run_dir) == ["unscored"]
    assert evidence(run_dir) == (
        "12 samples in 3 steps of 8 a step, first at step 1; reward.on_error is mask"
    )


def test_a_process_that_was_killed(tmp_path, capsys):
    """With a checkpoint after every step: there is something to go on from."""
    run_dir = tmp_path / "run"
    overrides = ["trainer.steps=500", "checkpoint.every=1", *BLIND]
    overrides += [f"trainer.run_dir={tmp_path}", "trainer.name=run"]
    command = [sys.executable, "-m", "omni_trainer.cli", "train", "smoke", *overrides]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        marker = run_dir / "checkpoints/step-000001/COMPLETE"
        deadline = time.monotonic() + 100
        while not marker.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        process.kill()

    assert named(run_dir)[0] == "killed"
    assert cli.main(["doctor", str(run_dir)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{run_dir}: ended without a word, ")
    assert said[2] == "1. The process ended without a word (stopped, killed)"
    assert "the last checkpoint is of step " in said[3]
    assert "omni resume RUN" in said[5]


def test_a_disk_that_is_full_in_the_middle(train, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("omni_trainer.checkpoints._sync_tree", full)
    with pytest.raises(OSError, match="No space left"):
        train("checkpoint.every=2", *BLIND)

    assert named(tmp_path / "run") == ["disk_full"]
    assert evidence(tmp_path / "run").startswith("after 2 of 3 steps: OSError: [Errno 28]")
