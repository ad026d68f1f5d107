"""The shipped pipeline trained for a few steps by the real engine, in one process."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file

from omni_trainer import cli
from omni_trainer.config import load_run
from omni_trainer.loop import Trainer
from omni_trainer.run import evaluate_run, export_run, run_training

RUN = (
    "trainer.steps=4",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "algorithm.updates_per_rollout=2",
    "algorithm.kl_coef=0.01",
    "optimizer.schedule=cosine",
    "evaluation.every=2",
)


class StoppedError(BaseException):
    """Stands for the end of the process."""


@contextmanager
def stopped(step):
    """Let the process end while the step after *step* trained ones is under way."""
    train = Trainer.train

    def stopping(self):
        train(self)
        if self.step == step:
            raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", stopping)
        with pytest.raises(StoppedError):
            yield


def train(run_dir, *overrides, resume=False):
    loaded = load_run("smoke", [*RUN, *overrides])
    return run_training(loaded.config, run_dir=run_dir, resume=resume, resolved=loaded.resolved)


def metrics(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {n: v for n, v in json.loads(line).items() if not n.startswith(("time/", "memory/"))}
        for line in lines
    ]


def tensors(file):
    """Every value of a safetensors file (the order in its header is not fixed)."""
    return {name: tensor.tolist() for name, tensor in load_file(file).items()}


def checkpoint(run_dir, step):
    path = run_dir / "checkpoints" / f"step-{step:06d}"
    state = json.loads((path / "state.json").read_text())
    state.pop("trackers")
    files = path.rglob("*.safetensors")
    return state, {file.relative_to(path).as_posix(): tensors(file) for file in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole") / "run")


def test_case_7_the_engine_scores_what_the_rollout_sampled(whole):
    lines = metrics(whole.run_dir)

    assert lines[1]["canary/exact"] == 0.0
    assert lines[1]["canary/floor"] <= 1e-6
    assert lines[1]["actor/kl"] >= 0.0
    assert lines[-1]["actor/weight_version"] == 8


@pytest.mark.parametrize("step", [1, 3])
def test_case_28_two_halves_are_the_whole(whole, tmp_path, step):
    with stopped(step):
        train(tmp_path / "run")
    resumed = train(tmp_path / "run", resume=True)

    assert resumed.trained == 4 - step
    assert metrics(resumed.run_dir) == metrics(whole.run_dir)
    assert checkpoint(resumed.run_dir, 4) == checkpoint(whole.run_dir, 4)
    assert tensors(resumed.export) == tensors(whole.export)


def test_case_28_a_finished_run_does_nothing(whole):
    again = train(whole.run_dir, resume=True)

    assert again.finished_before
    assert again.gain == whole.gain


def test_a_checkpoint_is_evaluated_and_exported_again(whole, tmp_path):
    found = evaluate_run(whole.run_dir, step=2)
    exported = export_run(whole.run_dir, output=tmp_path)

    line = metrics(whole.run_dir)[2]
    heldout = {n: v for n, v in line.items() if n.startswith("heldout/")}
    assert heldout.pop("heldout/retries") == 0
    assert found.metrics() == heldout
    assert tensors(exported) == tensors(whole.export)


def test_no_pickle_is_read_by_a_resume(whole, tmp_path, monkeypatch):
    import pickle  # noqa: TID251 -- to see that nobody uses it

    import torch

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle was read")

    with stopped(2):
        train(tmp_path / "run")
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)

    assert metrics(train(tmp_path / "run", resume=True).run_dir) == metrics(whole.run_dir)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.pipeline.height=30", "a multiple of 8 up to 32 does; nearest: 24 or 32"),
        ("model.pipeline.max_sequence_length=600", "takes at most 512"),
    ],
)
def test_a_size_that_the_pipeline_has_not_is_a_sentence(override, said, tmp_path, capsys):
    """Before anything is sampled, without a traceback."""
    assert cli.main(["train", "smoke", f"trainer.run_dir={tmp_path}", override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: actor rank 0: ValueError: ")
    assert said in line
