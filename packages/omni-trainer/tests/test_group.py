"""The group of one process, and scorers in its threads."""

import threading
import time
from types import SimpleNamespace

import pytest

from omni_trainer.group import LocalGroup, WorkerError
from omni_trainer.reward_pool import LocalRewardPool, NoRewards
from omni_trainer.rewards.scoring import ScoreCounts


class Worker:
    def __init__(self):
        self.closed = 0

    def add(self, *numbers):
        return sum(numbers)

    def make(self, count):
        for i in range(count):
            if i == 3:
                raise ValueError("x")
            yield f"info {i}", i

    def close(self):
        self.closed += 1


@pytest.fixture
def group():
    made = LocalGroup(Worker)
    made.start()
    yield made
    made.shutdown()


def test_one_worker_answers_every_call(group):
    assert group.broadcast("add", 1, 2) == [3]
    assert group.scatter("add", [(1,)], [[2, 3]]) == [6]
    assert group.call(0, "add", 1, refs=[2]) == 3
    assert [(s.rank, s.info, s.ref) for s in group.stream("make", [(2,)])] == [
        (0, "info 0", 0),
        (0, "info 1", 1),
    ]
    with pytest.raises(IndexError, match="rank 1 of a group of 1"):
        group.call(1, "add")


def test_an_error_names_role_rank_and_method(group):
    with pytest.raises(WorkerError) as caught:
        list(group.stream("make", [(5,)]))

    assert str(caught.value).splitlines()[0] == "actor rank 0: ValueError: x (in make)"


def test_case_35_an_error_at_the_start_is_named_too():
    def failing():
        raise ValueError("x")

    with pytest.raises(WorkerError, match=r"^actor rank 0: ValueError: x \(in start\)"):
        LocalGroup(failing).start()


def test_a_group_is_shut_down_once():
    worker = Worker()
    group = LocalGroup(lambda: worker)
    group.start()
    group.shutdown()
    group.shutdown()

    assert worker.closed == 1
    with pytest.raises(RuntimeError, match="not started, or was shut down"):
        group.broadcast("add")


# -- scorers ----------------------------------------------------------------------------------------


class Scorer:
    """Scores with the thread that it ran in, once the gate is open; never used by two at once."""

    gate = threading.Event()
    gate.set()

    def __init__(self):
        self.busy = threading.Lock()
        self.scored = 0

    def setup(self):
        pass

    def score(self, inputs, trajectory):
        assert self.busy.acquire(blocking=False)
        try:
            time.sleep(0.02)
            assert self.gate.wait(60)
            if trajectory.media is None:
                raise ValueError("no media")
            self.scored += 1
            return [threading.current_thread().name for _ in inputs]
        finally:
            self.busy.release()

    def counts(self):
        return ScoreCounts(scored=self.scored, retries=1, seconds=0.5)

    def close(self):
        pass


TRAJECTORY = SimpleNamespace(media="pictures")


@pytest.fixture
def pool(request):
    made = LocalRewardPool(Scorer, **request.param)
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize("pool", [{"workers": 2, "overlap": True}], indirect=True)
def test_scoring_goes_on_while_others_are_submitted(pool, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Scorer, "gate", gate)
    for key in range(8):
        pool.submit(key, TRAJECTORY, ["a", "b"])
    gate.set()  # nothing was scored before, and yet all are submitted
    found = pool.collect()

    assert sorted(found) == list(range(8))
    names = {name for one in found.values() for name in one}
    assert names == {"reward_0", "reward_1"}
    assert pool.collect() == {}
    assert (pool.counts().retries, pool.counts().seconds) == (2, 1.0)


@pytest.mark.parametrize("pool", [{"workers": 2, "overlap": False}], indirect=True)
def test_without_overlap_the_driver_scores_itself(pool):
    pool.submit(0, TRAJECTORY, ["a"])

    assert pool.collect() == {0: [threading.main_thread().name]}


@pytest.mark.parametrize("pool", [{"workers": 1, "overlap": True}], indirect=True)
def test_a_scorer_that_fails_is_named(pool):
    pool.submit(0, SimpleNamespace(media=None), ["a"])
    with pytest.raises(WorkerError, match=r"^reward rank 0: ValueError: no media \(in score\)"):
        pool.collect()
    pool.submit(1, TRAJECTORY, ["a"])
    assert list(pool.collect()) == [1]


def test_nothing_is_scored_where_no_reward_is_asked_for():
    pool = NoRewards()
    pool.start()
    pool.submit(0, TRAJECTORY, ["a"])

    assert pool.collect() == {}
    assert pool.counts().retries == 0
    pool.close()
