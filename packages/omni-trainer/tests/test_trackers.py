"""What trackers write of a run: every step once, also after a resume."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omni_core import plugins
from omni_core.plugins import PluginError
from omni_trainer.reporting.jsonl import read_metrics
from omni_trainer.reporting.tensorboard import TensorBoardTracker


def build(name, **options):
    plugin = plugins.registry(plugins.TRACKERS).get(name)
    return plugin.build(plugin.options(**options))


@pytest.fixture
def picture(tmp_path):
    from PIL import Image

    path = tmp_path / "grid.png"
    Image.new("RGB", (8, 4), (200, 0, 0)).save(path)
    return path


# -- tensorboard ------------------------------------------------------------------------------------


def events(run_dir):
    found = EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "images": 0}
    )
    found.Reload()
    return found


def test_a_resumed_run_has_every_step_once_in_tensorboard(train, stopped):
    run = ("trainer.steps=4", "checkpoint.every=2", "trainer.grid_every=1", "evaluation.every=1")
    with stopped(3):
        train(*run)
    summary = train(*run, resume=True)

    found = events(summary.run_dir)
    steps = dict(read_metrics(summary.run_dir))
    assert list(steps) == [0, 1, 2, 3, 4]
    for name in ("reward/mean", "heldout/reward_mean", "time/step", "actor/grad_norm"):
        seen = {event.step: event.value for event in found.Scalars(name)}
        expected = {step: values[name] for step, values in steps.items() if name in values}
        assert len(found.Scalars(name)) == len(expected)
        assert seen == pytest.approx(expected, rel=1e-6)
    assert [event.step for event in found.Images("samples/train")] == [1, 2, 3, 4]
    assert [event.step for event in found.Images("samples/heldout")] == [0, 1, 2, 3, 4]
    assert "config/text_summary" in found.Tags()["tensors"]


def test_tensorboard_starts_anew_where_there_is_no_checkpoint(tmp_path, picture):
    for value in (1.0, 2.0):
        tracker = TensorBoardTracker()
        tracker.open(tmp_path, {"trainer": {"steps": 1}}, offset=None)
        tracker.image(1, "train", picture)
        tracker.log(1, {"reward/mean": value})
        assert tracker.position() == 2
        tracker.close()

    assert [(e.step, e.value) for e in events(tmp_path).Scalars("reward/mean")] == [(1, 2.0)]
    image = events(tmp_path).Images("samples/train")[0]
    assert (image.width, image.height) == (8, 4)


def test_metrics_jsonl_is_always_written(train):
    summary = train("trainer.trackers=[]", "evaluation.initial=false", "trainer.steps=1")
    assert [step for step, _ in read_metrics(summary.run_dir)] == [1]
    assert not (summary.run_dir / "tensorboard").exists()


# -- services ---------------------------------------------------------------------------------------


@pytest.fixture
def fake_wandb(monkeypatch):
    """A module that records what is asked of it."""
    calls = []

    class Run:
        id = "abc123"

        def log(self, values, step):
            calls.append(("log", step, values))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    def init(**options):
        calls.append(("init", options))
        return Run()

    made = types.SimpleNamespace(init=init, Image=lambda path: f"picture {path}")
    monkeypatch.setitem(sys.modules, "wandb", made)
    return calls


def test_wandb_is_asked_for_one_run_that_a_resume_goes_on_with(fake_wandb, tmp_path, picture):
    first = build("wandb", project="signs", tags=("ocr",))
    first.open(tmp_path, {"trainer": {"steps": 3}}, offset=None)
    first.image(0, "heldout", picture)
    for step in (0, 1, 2):
        first.log(step, {"reward/mean": step / 10})
    first.close(failed=True)
    again = build("wandb", project="signs")
    again.open(tmp_path, {}, offset=2)  # its checkpoint was written before step 2
    for step in (2, 3):
        again.image(step, "train", picture)
        again.log(step, {"reward/mean": step / 10})
    assert again.position() == 4
    again.close()

    kinds = [call[0] for call in fake_wandb]
    assert kinds == ["init", "log", "log", "log", "log", "finish", "init", "log", "log", "finish"]
    init, resumed = (call[1] for call in fake_wandb if call[0] == "init")
    assert {k: v for k, v in init.items() if v is not None} == {
        "project": "signs",
        "name": tmp_path.name,
        "tags": ["ocr"],
        "dir": str(tmp_path),
        "config": {"trainer": {"steps": 3}},
    }
    assert (resumed["id"], resumed["resume"]) == ("abc123", "allow")
    assert fake_wandb[1] == ("log", 0, {"samples/heldout": f"picture {picture}"})
    assert [call[1] for call in fake_wandb if call[0] == "log"] == [0, 0, 1, 2, 3, 3]
    assert [call[1] for call in fake_wandb if call[0] == "finish"] == [1, 0]


def test_a_run_that_fails_says_so_to_its_tracker(fake_wandb, train, stopped):
    with stopped(1):
        train("trainer.trackers=[{name: wandb, project: signs}]", "trainer.steps=3")
    assert fake_wandb[0][1]["project"] == "signs"
    assert fake_wandb[-1] == ("finish", 1)


class OutOfReachError(Exception):
    """Stands for MlflowException."""


@pytest.fixture
def fake_mlflow(monkeypatch):
    calls = []

    class Client:
        def __init__(self, uri):
            calls.append(("client", uri))

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return f"id of {name}"

        def create_run(self, experiment, run_name):
            calls.append(("create_run", experiment, run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, *args, kwargs))

    entities = types.SimpleNamespace(Param=lambda *a: a, Metric=lambda n, v, _, s: (n, v, s))
    errors = types.SimpleNamespace(MlflowException=OutOfReachError)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", errors)
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", types.SimpleNamespace(MlflowClient=Client))
    return calls


def test_mlflow_is_sent_every_step_once(fake_mlflow, tmp_path, picture):
    options = {"uri": "http://localhost:1", "experiment": "signs"}
    first = build("mlflow", **options)
    first.open(tmp_path, {"trainer": {"steps": 3}}, offset=None)
    first.image(1, "train", picture)
    first.log(1, {"reward/mean": 0.5})
    first.close(failed=True)
    again = build("mlflow", **options)
    again.open(tmp_path, {}, offset=1)
    again.log(1, {"reward/mean": 0.5})
    again.log(2, {"reward/mean": 0.7})
    again.close()

    assert fake_mlflow == [
        ("client", "http://localhost:1"),
        ("create_run", "id of signs", tmp_path.name),
        ("log_batch", "r1", {"params": [("trainer.steps", "3")]}),
        ("log_artifact", "r1", str(picture), "samples/train", {}),
        ("log_batch", "r1", {"metrics": [("reward/mean", 0.5, 1)]}),
        ("set_terminated", "r1", "FAILED", {}),
        ("client", "http://localhost:1"),
        ("update_run", "r1", {"status": "RUNNING"}),
        ("log_batch", "r1", {"metrics": [("reward/mean", 0.7, 2)]}),
        ("set_terminated", "r1", "FINISHED", {}),
    ]


def test_a_server_that_is_away_ends_no_run_and_gets_its_steps_later(
    fake_mlflow, tmp_path, picture, monkeypatch
):
    tracker = build("mlflow", uri="http://localhost:1")
    tracker.open(tmp_path, {}, offset=None)
    fake_mlflow.clear()

    def away(*args, **kwargs):
        raise OutOfReachError("no route")

    with monkeypatch.context() as patch:
        for name in ("log_batch", "log_artifact"):
            patch.setattr(tracker._client, name, away, raising=False)
        tracker.image(1, "train", picture)
        tracker.log(1, {"reward/mean": 0.1})
        tracker.log(2, {"reward/mean": 0.2})
        assert tracker.position() == 0
    tracker.log(3, {"reward/mean": 0.3})
    assert [call[2]["metrics"][0] for call in fake_mlflow] == [
        ("reward/mean", step / 10, step) for step in (1, 2, 3)
    ]
    assert tracker.position() == 4

    monkeypatch.setattr(tracker._client, "set_terminated", away, raising=False)
    tracker.close()


def test_steps_that_waited_when_the_process_ended_are_sent_by_a_resume(
    fake_mlflow, tmp_path, monkeypatch
):
    jsonl, tracker = build("jsonl"), build("mlflow", uri="http://localhost:1")
    for one in (jsonl, tracker):
        one.open(tmp_path, {}, offset=None)

    def away(*args, **kwargs):
        raise OutOfReachError("no route")

    with monkeypatch.context() as patch:
        for step in (1, 2, 3):
            for one in (jsonl, tracker):
                one.log(step, {"reward/mean": step / 10})
            if step == 1:
                patch.setattr(tracker._client, "log_batch", away, raising=False)
    jsonl.close()
    fake_mlflow.clear()  # the process is killed: nothing is closed

    again = build("mlflow", uri="http://localhost:1")
    again.open(tmp_path, {}, offset=4)
    sent = [call[2]["metrics"][0] for call in fake_mlflow if call[0] == "log_batch"]
    assert sent == [("reward/mean", 0.2, 2), ("reward/mean", 0.3, 3)]
    assert again.position() == 4


def test_mlflow_without_a_server_is_a_sentence(fake_mlflow, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(PluginError, match="needs a server: set MLFLOW_TRACKING_URI"):
        build("mlflow")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_extra_is_a_sentence_before_anything_starts(name, train, monkeypatch, tmp_path):
    for module in (name, f"{name}.entities", f"{name}.tracking", f"{name}.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PluginError, match=rf"pip install 'omni-trainer\[{name}\]'"):
        train(f"trainer.trackers=[{name}]")
    assert not (tmp_path / "run/ranks.json").exists()


needs = {
    name: pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"omni-trainer[{name}] is not installed"
    )
    for name in ("wandb", "mlflow")
}


@needs["wandb"]
def test_wandb_itself_writes_an_offline_run(tmp_path, picture, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for offset in (None, 1):
        tracker = build("wandb")
        tracker.open(tmp_path, {"trainer": {"steps": 2}}, offset=offset)
        tracker.image(1, "train", picture)
        tracker.log(1, {"reward/mean": 0.5})
        tracker.close()

    record = json.loads((tmp_path / "wandb.json").read_text())
    assert record["last_step"] == 1
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{record['run_id']}.wandb"))
    assert len(files) == 2  # one for each start, of one run
    assert b"reward/mean" in files[0].read_bytes()
    assert b"reward/mean" not in files[1].read_bytes()


@needs["mlflow"]
def test_mlflow_itself_keeps_a_run_in_a_local_store(tmp_path, picture, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    for offset, values in ((None, (0.5, 0.6)), (2, (0.6, 0.7))):
        tracker = build("mlflow", uri=uri)
        tracker.open(tmp_path, {"trainer": {"steps": 3}}, offset=offset)
        for step, value in enumerate(values, start=offset or 1):
            tracker.log(step, {"reward/mean": value})
        tracker.image(3, "train", picture)
        tracker.close()

    client = MlflowClient(uri)
    run_id = json.loads((tmp_path / "mlflow.json").read_text())["run_id"]
    history = client.get_metric_history(run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.6), (3, 0.7)]
    run = client.get_run(run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"trainer.steps": "3"})
    assert [f.path for f in client.list_artifacts(run_id, "samples/train")] == [
        "samples/train/grid.png"
    ]
