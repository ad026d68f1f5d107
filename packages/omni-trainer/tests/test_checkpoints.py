"""A checkpoint is whole or it is not there."""

import json

import pytest

from omni_core.engine import CheckpointError
from omni_trainer.checkpoints import MARKER, Checkpoints


class KilledError(BaseException):
    """Stands for the end of the process: nothing of ours runs after it."""


def writer(text):
    def write(directory):
        (directory / "weights").write_text(text)
        return {"value": text}

    return write


def killed(directory):
    (directory / "weights").write_text("half")
    raise KilledError


def test_a_checkpoint_holds_what_was_written_and_its_state(tmp_path):
    found = Checkpoints(tmp_path, keep=2).save(3, writer("three"))

    assert (found.directory / "weights").read_text() == "three"
    assert found.state() == {"format": 1, "value": "three"}
    assert Checkpoints(tmp_path, keep=2).latest() == found


def test_old_ones_go_after_the_new_one_is_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10):
        checkpoints.save(step, writer(str(step)))

    assert [one.step for one in checkpoints.complete()] == [2, 10]


def test_case_29_a_save_that_was_killed_leaves_the_former_one_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, writer("one"))

    with pytest.raises(KilledError):
        checkpoints.save(2, killed)

    found = Checkpoints(tmp_path, keep=1).latest()
    assert found is not None
    assert (found.step, found.state()["value"]) == (1, "one")
    assert (found.directory / "weights").read_text() == "one"

    checkpoints.save(2, writer("two"))

    assert [one.step for one in checkpoints.complete()] == [2]
    assert checkpoints.at().state()["value"] == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002"]


def test_a_directory_without_its_marker_is_not_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, writer("one"))
    found = checkpoints.save(2, writer("two"))
    (found.directory / MARKER).unlink()

    assert checkpoints.at().step == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step 2; complete ones: 1"):
        checkpoints.at(2)


def test_none_at_all_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint; complete ones: none"):
        Checkpoints(tmp_path / "nowhere", keep=1).at()


def test_a_state_of_another_format_is_refused(tmp_path):
    found = Checkpoints(tmp_path, keep=1).save(1, writer("one"))
    (found.directory / "state.json").write_text(json.dumps({"format": 99}))

    with pytest.raises(CheckpointError, match="format 99, this version reads 1"):
        found.state()
