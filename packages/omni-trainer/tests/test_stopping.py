"""A signal stops a run where its state is whole: it is saved, and goes on as if it had not been stopped."""

import errno
import json
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_core.testing.toys import ToyReward, register_toys, unregister_toys
from omni_trainer import loop, stopping
from omni_trainer.checkpoints import Checkpoints
from omni_trainer.config import load_run
from omni_trainer.evaluation import Evaluator
from omni_trainer.group import LocalGroup
from omni_trainer.loop import Trainer
from omni_trainer.run import run_training
from omni_trainer.run_status import RunState, read_status
from omni_trainer.stopping import NotSavedError, StoppedError, StopRequest, told
from omni_trainer.workers.actor_rollout_ref import ActorRolloutRefWorker as Worker

RUN = (
    "trainer.steps=4",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "evaluation.every=2",
    "trainer.canary_every=1",
    "algorithm.updates_per_rollout=2",
)


@pytest.fixture(autouse=True)
def handlers():
    """Whatever a test does to the process's signals is undone."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, found in before.items():
        signal.signal(number, found)


@pytest.fixture(scope="module")
def source(tmp_path_factory, write_toy_run):
    """Path of a YAML file that is a whole run; one for all tests, so that they share `whole`."""
    return write_toy_run(tmp_path_factory.mktemp("stopping"))


@pytest.fixture
def train(source, toys):
    """Train in a directory of its own, or go on there: `train("phase")`."""

    def run(name, *overrides, resume=False):
        loaded = load_run(source, [*RUN, *overrides])
        return run_training(
            loaded.config,
            run_dir=Path(source).parent / name,
            resume=resume,
            resolved=loaded.resolved,
        )

    return run


@pytest.fixture(scope="module")
def whole(source):
    """The run that nothing stopped."""
    register_toys()
    loaded = load_run(source, RUN)
    yield run_training(loaded.config, run_dir=Path(source).parent / "whole")
    unregister_toys()


@pytest.fixture
def signalled(monkeypatch):
    """`with signalled(Worker, "generate", 3):` the third call gets a signal before it does anything."""

    @contextmanager
    def at(owner, name, call, number=signal.SIGTERM):
        method, calls = getattr(owner, name), []

        def interrupted(*args, **kwargs):
            calls.append(name)
            if len(calls) == call:
                os.kill(os.getpid(), number)
            return method(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            yield

    return at


def checkpoint(directory, step):
    """State and tensors of a checkpoint, timings and places aside."""
    path = directory / "checkpoints" / f"step-{step:06d}"
    state = json.loads((path / "state.json").read_text())
    state.pop("trackers")
    return state, {p.name: p.read_bytes() for p in sorted((path / "tensors").iterdir())}


PHASES = {
    # owner, method, which call of it gets the signal -> the step that is saved
    "initial evaluation": (Evaluator, "_wave", 1, 0),
    "first sampling": (Worker, "generate", 2, 0),  # the first call is the evaluation's
    "sampling": (Worker, "generate", 3, 1),
    "advantages": (loop, "score_step", 2, 1),
    "canary": (Worker, "canary", 2, 1),
    "update": (Worker, "update_actor", 2, 2),
    "push": (Evaluator, "run", 2, 2),
    "update before no evaluation": (Worker, "update_actor", 3, 3),
    "evaluation": (Evaluator, "_wave", 2, 2),
    "report": (Trainer, "report", 3, 2),
    "periodic save": (Worker, "save_checkpoint", 1, 2),
    "between steps": (Worker, "rollout_metrics", 5, 2),
    "last update": (Worker, "update_actor", 4, 4),
    "last evaluation": (Evaluator, "_wave", 3, 4),
    "last save": (Worker, "save_checkpoint", 2, 4),
}


@pytest.mark.parametrize("phase", PHASES)
def test_case_28_a_run_stopped_in_any_phase_goes_on_as_an_undisturbed_one(
    phase, train, signalled, whole, metrics, capsys
):
    owner, name, call, step = PHASES[phase]
    with signalled(owner, name, call), pytest.raises(StoppedError, match="terminated") as stopped:
        train(phase)
    halves = whole.run_dir.with_name(phase)
    assert (stopped.value.number, stopped.value.lost) == (signal.SIGTERM, "")
    assert read_status(halves).state is RunState.INTERRUPTED
    newest = Checkpoints(halves / "checkpoints", keep=9).latest()
    assert newest.step == step
    said = capsys.readouterr().out.splitlines()
    assert said[-2].endswith(f": {newest.directory}")
    assert said[-1] == f"go on with: omni resume {halves}"

    resumed = train(phase, resume=True)
    assert resumed.trained == 4 - step
    assert metrics(halves) == metrics(whole.run_dir)
    assert checkpoint(halves, 4) == checkpoint(whole.run_dir, 4)
    assert (resumed.after.prompts, resumed.gain) == (whole.after.prompts, whole.gain)


def test_waiting_for_scores_is_left_at_once(train, monkeypatch):
    held = threading.Event()
    score = ToyReward.score

    def slow(self, *args):
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)
            held.wait(60)
        return score(self, *args)

    monkeypatch.setattr(ToyReward, "score", slow)
    save = Trainer._save_stopped

    def saved(self):
        save(self)
        assert not held.is_set()
        held.set()  # else closing the pool would wait for the scorer

    monkeypatch.setattr(Trainer, "_save_stopped", saved)
    with pytest.raises(StoppedError) as stopped:
        train("scores", "evaluation.initial=false")
    assert stopped.value.number == signal.SIGINT
    assert held.is_set()


def test_a_second_signal_ends_it_at_once_and_says_what_is_lost(
    train, signalled, source, monkeypatch
):
    monkeypatch.setattr(stopping, "ONE_SIGNAL", 0.0)
    twice = pytest.raises(StoppedError, match="terminated")
    with (
        signalled(Worker, "update_actor", 4),
        signalled(Worker, "save_checkpoint", 2, signal.SIGINT),
        twice as stopped,
    ):
        train("twice")
    assert told(stopped.value) == (
        "terminated, and what is lost: 2 steps (the last checkpoint is of step 2)",
        143,
    )
    held = Checkpoints(Path(source).parent / "twice/checkpoints", keep=9)
    assert [one.step for one in held.complete()] == [2]


def test_a_signal_that_is_sent_twice_at_once_is_one(train, signalled, source):
    """As where a scheduler sends it to all processes, and a launcher hands it on."""
    with (
        signalled(Worker, "update_actor", 1),
        signalled(Worker, "update_weights", 2),
        pytest.raises(StoppedError) as stopped,
    ):
        train("one", "evaluation.initial=false")
    assert stopped.value.lost == ""
    assert Checkpoints(Path(source).parent / "one/checkpoints", keep=9).latest().step == 1


def test_a_disk_that_is_full_at_a_stop_is_told_and_the_checkpoint_before_stays(
    train, signalled, source, monkeypatch
):
    save = Checkpoints._write

    def full(self, aside, step, write):
        save(self, aside, step, write)
        if step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_write", full)
    said = (
        r"terminated, and the run could not be saved: \[Errno 28\] No space left on device; what is lost: "
        r"1 step \(the last checkpoint is of step 2\)"
    )
    with signalled(Worker, "update_actor", 3), pytest.raises(NotSavedError, match=said):
        train("full")
    run = Path(source).parent / "full"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    assert read_status(run).error == "NotSavedError"
    monkeypatch.undo()
    assert train("full", resume=True).trained == 2


def test_while_it_starts_a_run_ends_at_once(train, signalled, source):
    with signalled(Worker, "init_model", 1), pytest.raises(StoppedError):
        train("starting")
    assert not (Path(source).parent / "starting/checkpoints").exists()


def test_what_is_not_deferred_ends_at_the_signal():
    stop = StopRequest()
    with pytest.raises(StoppedError), stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked is None


def test_a_signal_that_was_ignored_before_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = StopRequest()
    with stop.listening(), stop.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        stop.look()
    assert stop.asked is None


def test_a_signal_that_another_process_had_is_this_one_s(train, monkeypatch):
    monkeypatch.setattr(LocalGroup, "stop_asked", lambda group: signal.SIGINT)
    with pytest.raises(StoppedError) as stopped:
        train("elsewhere", "evaluation.initial=false")
    assert stopped.value.number == signal.SIGINT
