"""Stopping and going on changes nothing but timings."""

import json
from pathlib import Path

import pytest

from omni_trainer.run_directory import RunDirectory, RunDirectoryError, write_json
from omni_trainer.run_status import RunState, read_status


def checkpoint(directory, step):
    """State and tensors of a checkpoint, timings and places aside."""
    path = directory / "checkpoints" / f"step-{step:06d}"
    state = json.loads((path / "state.json").read_text())
    state.pop("trackers")
    tensors = {p.name: p.read_bytes() for p in sorted((path / "tensors").iterdir())}
    return state, tensors


RUN = ("trainer.steps=6", "checkpoint.every=2", "algorithm.updates_per_rollout=2")


@pytest.mark.parametrize(
    ("stop", "goes_on_from", "extra"),
    [
        (3, 2, ()),
        (4, 4, ("algorithm.window_size=1", "optimizer.schedule=cosine")),
        # 6 rows in batches of 3: an epoch ends with step 2, and with step 4.
        (2, 2, ("data.prompts_per_step=3", "data.tail=drop")),
    ],
)
def test_case_28_a_resumed_run_is_an_undisturbed_one(
    train, stopped, metrics, stop, goes_on_from, extra
):
    whole = train(*RUN, *extra, name="whole")
    with stopped(stop):
        train(*RUN, *extra, name="halves")
    resumed = train(*RUN, *extra, name="halves", resume=True)

    assert resumed.trained == 6 - goes_on_from
    assert metrics(resumed.run_dir) == metrics(whole.run_dir)
    assert checkpoint(resumed.run_dir, 6) == checkpoint(whole.run_dir, 6)
    assert resumed.after.prompts == whole.after.prompts
    assert resumed.gain == whole.gain


def test_without_a_checkpoint_a_resume_starts_from_the_beginning(train, stopped, metrics):
    whole = train(*RUN, name="whole")
    with stopped(1):
        train(*RUN, name="halves")
    resumed = train(*RUN, name="halves", resume=True)

    assert resumed.trained == 6
    assert metrics(resumed.run_dir) == metrics(whole.run_dir)


def test_case_28_a_finished_run_does_nothing(train):
    first = train(*RUN)
    before = {path: path.read_bytes() for path in first.run_dir.rglob("*.js*")}
    again = train(*RUN, resume=True)

    assert again.finished_before
    assert again.trained == 0
    assert (again.gain, again.export) == (first.gain, first.export)
    assert {path: path.read_bytes() for path in first.run_dir.rglob("*.js*")} == before


def test_resume_mode_auto_goes_on_by_itself(train, stopped, metrics):
    with stopped(3):
        train(*RUN)
    resumed = train(*RUN, "trainer.resume_mode=auto")

    assert resumed.trained == 4
    assert [line["step"] for line in metrics(resumed.run_dir)] == list(range(7))


def test_a_directory_without_a_run_is_not_resumed(train):
    with pytest.raises(RunDirectoryError, match="holds no run"):
        train(resume=True)


def test_other_prompts_are_refused(train, stopped, tmp_path):
    with stopped(3):
        train(*RUN)
    (tmp_path / "train.txt").write_text("a bright sign\n" * 9)
    with pytest.raises(ValueError, match="the prompts are not those of the checkpoint"):
        train(*RUN, resume=True)


def test_a_run_that_ended_before_its_export_is_exported(train):
    first = train(*RUN)
    (first.run_dir / "exported.json").unlink()
    write_json(first.run_dir / "status.json", {"state": "running"})
    again = train(*RUN, resume=True)

    assert again.finished_before
    assert again.export == first.export
    assert read_status(first.run_dir).state is RunState.FINISHED


def test_a_config_that_was_edited_is_told_and_kept(train, stopped, capsys):
    with stopped(3):
        train(*RUN)
    resumed = train(*RUN, "optimizer.weight_decay=0.5", "trainer.canary_every=3", resume=True)

    said = capsys.readouterr()
    assert "resume.config_changed" in said.out + said.err
    assert "optimizer.weight_decay" in said.out + said.err
    assert "0.0001 -> 0.5" in said.out + said.err
    assert "canary_every" not in said.out + said.err
    assert "weight_decay: 0.5" in (resumed.run_dir / "config.yaml").read_text()


def test_two_processes_never_write_the_config_of_one_run(train, tmp_path):
    run = RunDirectory(tmp_path / "run")
    with run.locked(), pytest.raises(RunDirectoryError, match="in use by another process"):
        train(*RUN)
    assert not run.exists()


def test_checkpoints_lie_where_the_run_is_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunDirectory(Path("runs/a")).checkpoints(2).directory == tmp_path / "runs/a/checkpoints"
