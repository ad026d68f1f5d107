"""Workers on Ray, for real: one cluster of four counted cores for the whole module."""

import importlib.util
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("the extra ray is not installed", allow_module_level=True)

import ray
import torch

from omni_core.reward import RewardInput
from omni_core.testing.toys import ToyRewardConfig
from omni_core.trajectory import Media
from omni_trainer.group import WorkerError
from omni_trainer.loop import Trainer
from omni_trainer.rpc import cluster
from omni_trainer.rpc.ray_group import RayGroup
from omni_trainer.rpc.resources import Demand, ResourceError, wait_for_resources
from omni_trainer.rpc.reward_pool import RayRewardPool
from omni_trainer.rpc.workers import session
from omni_trainer.workers.process import LOOPBACK

pytestmark = pytest.mark.timeout(180)

BIG = 16 * 2**20


@pytest.fixture(scope="module")
def started():
    """Ray with four counted cores; what this module defines travels by value."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    assert cluster.connect(cpus=4)
    yield
    ray.shutdown()


class Worker:
    """Does what a test tells it to."""

    def __init__(self, place, store):
        self.place = place
        self.store = store
        self.seen = 0

    def rank(self):
        return self.place.rank, self.place.world_size, self.place.local_rank

    def environment(self):
        names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
        return {name: os.environ[name] for name in names}

    def add(self, *numbers):
        return sum(numbers)

    def make(self, count):
        for i in range(count):
            image = torch.full((1, BIG // 3, 1, 3), i, dtype=torch.uint8)
            yield (self.place.rank, i), Media(image=image)

    def firsts(self, *media):
        return [int(one.image[0, 0, 0, 0]) for one in media]

    def fail_on(self, rank, error):
        if self.place.rank == rank:
            raise error
        time.sleep(30)

    def die_on(self, rank):
        """The peers notice before anybody else does."""
        if self.place.rank == rank:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")

    def stream_and_die(self, rank):
        yield "first", 1
        if self.place.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
        yield "second", 2

    def close(self):
        pass


def failing(place, store):
    if place.rank == 1:
        raise ValueError("x")
    return Worker(place, store)


@pytest.fixture
def group(started):
    made = []

    def make(factory=Worker, **options):
        one = RayGroup(factory, **{"size": 2, "resources": {"CPU": 1}, **options})
        made.append(one)
        one.start()
        return one

    yield make
    for one in made:
        one.shutdown()


# -- the cluster ------------------------------------------------------------------------------------


def test_a_ray_of_our_own_is_reached_from_this_machine_alone(started):
    (node,) = ray.nodes()

    assert node["NodeManagerAddress"] == LOOPBACK
    assert not ray.get_runtime_context().gcs_address.startswith("0.0.0.0")
    outside = socket.gethostbyname(socket.gethostname())
    port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    if outside != LOOPBACK:
        with socket.socket() as client:
            client.settimeout(2)
            assert client.connect_ex((outside, port)) != 0


def test_case_34_more_devices_than_there_are_is_an_error_in_time_with_a_table(started):
    begun = time.monotonic()
    demands = [Demand(role="actor", count=8, each={"CPU": 1.0})]
    with pytest.raises(ResourceError) as caught, session(demands, timeout=2.0):
        pytest.fail("nothing may start")

    assert time.monotonic() - begun < 30
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()]
    assert lines[0].startswith("the cluster has not what this run asks for")
    assert "actor 8 CPU 1" in lines
    assert "resource wanted available" in lines
    assert "CPU 8 4 <- short" in lines


def test_a_table_names_every_resource_and_waiting_may_help():
    demands = [
        Demand(role="actor", count=8, each={"GPU": 1.0, "CPU": 1.0}),
        Demand(role="reward", count=2, each={"CPU": 0.0}),
    ]
    free = iter([{"GPU": 4.0, "CPU": 64.0}, {"GPU": 8.0, "CPU": 64.0}])
    wait_for_resources(demands, lambda: next(free), timeout=5, can_grow=True, interval=0.01)

    with pytest.raises(ResourceError) as caught:
        wait_for_resources(demands, lambda: {"GPU": 4.0, "CPU": 64.0}, timeout=5, can_grow=False)
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()]
    assert lines[-2:] == ["GPU 8 4 <- short", "CPU 8 64"]


# -- groups -----------------------------------------------------------------------------------------


def test_ranks_know_their_places_and_answer_in_order(group):
    ranks = group(size=2, threads=3)

    assert ranks.broadcast("rank") == [(0, 2, 0), (1, 2, 1)]
    assert ranks.scatter("add", [(1, 2), (3, 4)]) == [3, 7]
    assert ranks.call(1, "add", 5) == 5
    assert (
        ranks.broadcast("environment")
        == [{"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}] * 2
    )


def test_large_objects_stay_where_they_are_and_the_driver_does_not_grow(group):
    """2 ranks x 5 objects of 16 MiB."""
    ranks = group()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = list(ranks.stream("make", [(5,), (5,)]))
    by_rank = [[one.ref for one in made if one.rank == rank] for rank in (0, 1)]
    crossed = ranks.scatter("firsts", [(), ()], [by_rank[1], by_rank[0]])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert sorted(one.info for one in made) == [(rank, i) for rank in (0, 1) for i in range(5)]
    assert crossed == [[0, 1, 2, 3, 4]] * 2
    assert ranks.fetched_bytes == 0
    assert grown * 1024 < BIG, "160 MiB were made"
    assert ranks.get(by_rank[0][0]).image.shape == (1, BIG // 3, 1, 3)
    assert ranks.fetched_bytes == BIG // 3 * 3


def test_case_35_the_first_line_names_role_rank_and_error(started):
    ranks = RayGroup(failing, size=2, resources={"CPU": 1})
    with pytest.raises(WorkerError) as caught:
        ranks.start()
    ranks.shutdown()

    first, *rest = str(caught.value).splitlines()
    assert first == "actor rank 1: ValueError: x (in start)"
    assert any('raise ValueError("x")' in line for line in rest)
    assert not caught.value.died


def test_an_error_ends_the_wait_for_ranks_that_hang(group):
    ranks = group()
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"^actor rank 1: KeyError: 'y' \(in fail_on\)"):
        ranks.broadcast("fail_on", 1, KeyError("y"))

    assert time.monotonic() - begun < 15


def test_a_death_is_named_before_the_errors_that_it_causes(group):
    with pytest.raises(WorkerError) as caught:
        group().broadcast("die_on", 1)

    assert str(caught.value).startswith("actor rank 1: its process died: ")
    assert caught.value.died


def test_a_death_in_the_middle_of_a_stream_is_named(group):
    with pytest.raises(WorkerError) as caught:
        list(group().stream("stream_and_die", [(1,), (1,)]))

    assert str(caught.value).startswith("actor rank 1: its process died: ")


# -- scorers ----------------------------------------------------------------------------------------


@pytest.fixture
def pool(started, toys):
    made = RayRewardPool("toy", ToyRewardConfig(workers=2), seed=0, resources={"CPU": 1})
    made.start()
    yield made
    made.close()


def trajectory(media):
    """Something with media and records, as far as a scorer looks."""
    return SimpleNamespace(media=media, records=[SimpleNamespace(group_id="g")])


def test_scorers_share_what_is_submitted(pool):
    white = Media(image=torch.full((2, 4, 4, 3), 255, dtype=torch.uint8))
    inputs = [RewardInput(prompt="a bright sign"), RewardInput(prompt="a dark sign")]
    for key in range(4):
        pool.submit(key, ray.put(trajectory(white)), inputs)
    found = pool.collect()

    assert sorted(found) == [0, 1, 2, 3]
    assert [[result.value for result in one] for one in found.values()] == [[1.0, 0.0]] * 4
    assert [count.scored for count in pool.group.broadcast("counts")] == [4, 4]
    assert pool.counts().retries == 0


def test_a_scorer_that_fails_is_named(pool):
    pool.submit(0, ray.put(trajectory(None)), [RewardInput(prompt="a sign")])
    with pytest.raises(WorkerError, match=r"^reward rank 0: ValueError: group 'g' has no media"):
        pool.collect()


# -- runs -------------------------------------------------------------------------------------------

ON_RAY = ("trainer.backend=ray", "trainer.steps=4", "checkpoint.every=2", "trainer.device=cpu")


def test_a_run_on_ray_is_the_run_in_one_process(started, train, metrics):
    here = train("trainer.steps=4", name="here")
    there = train(*ON_RAY, "reward.workers=2", name="there")

    assert metrics(there.run_dir) == metrics(here.run_dir)
    assert there.after is not None
    assert here.after is not None
    assert there.after.prompts == here.after.prompts


def test_what_the_driver_reads_does_not_grow_with_the_pictures(started, train, monkeypatch):
    """16 px pictures against 128 px ones: a step's samples take 37 times as much."""
    get, read, seen = ray.get, [0], [0]

    def counting(refs, **options):
        found = get(refs, **options)
        read[0] += len(ray.cloudpickle.dumps(found))
        return found

    score = RayRewardPool.submit

    def submitted(self, key, ref, inputs):
        seen[0] += get(ref).nbytes()
        return score(self, key, ref, inputs)

    monkeypatch.setattr(ray, "get", counting)
    monkeypatch.setattr(RayRewardPool, "submit", submitted)
    counts = []
    for side in (16, 128):
        read[0] = seen[0] = 0
        size = [f"model.pipeline.{name}={side}" for name in ("height", "width")]
        train(*ON_RAY, *size, "evaluation.grid_prompts=0", name=f"side-{side}")
        counts.append((read[0], seen[0]))
    (small, small_seen), (large, large_seen) = counts

    assert large_seen > 30 * small_seen > 10**6
    assert large < 1.05 * small


def descendants(pid):
    """Processes below *pid*: pid -> command line."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return {one: Path(f"/proc/{one}/cmdline").read_text() for one in found - {pid}}
        found |= more


def test_lost_workers_are_rebuilt_from_the_last_checkpoint(started, train, metrics, monkeypatch):
    """Steps 1 to 3 are done when the rank's process is killed; the checkpoint is of step 2."""
    whole = train("trainer.steps=4", "checkpoint.every=2", name="whole")
    train_step = Trainer.train
    killed = []

    def killing(self):
        if self.step == 3 and not killed:
            pids = [pid for pid, line in descendants(os.getpid()).items() if "ray::Shell" in line]
            killed.extend(pids)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        train_step(self)

    monkeypatch.setattr(Trainer, "train", killing)
    restarted = train(*ON_RAY, "trainer.max_restarts=1", name="restarted")

    assert killed
    assert metrics(restarted.run_dir) == metrics(whole.run_dir)


def test_a_rollout_that_servers_hold_samples_what_a_rank_of_its_own_does(
    started, train, metrics, monkeypatch
):
    """Two servers, weights through the object store; one server dies in step 3 and is made again."""
    own = ("rollout.placement=replica", "rollout.batch_size=4", "checkpoint.every=2")
    whole = train(*own, "trainer.steps=4", name="whole")
    sample = Trainer.sample
    killed = []

    def killing(self):
        if self.step == 3 and not killed:
            lines = descendants(os.getpid()).items()
            killed.extend(pid for pid, line in lines if "ray::ServerShell" in line)
            os.kill(killed[0], signal.SIGKILL)
        return sample(self)

    monkeypatch.setattr(Trainer, "sample", killing)
    served = ("rollout.servers=2", "rollout.transport=object_store", "trainer.max_restarts=1")
    found = train(*own, *ON_RAY, *served, name="served")

    assert len(killed) == 2
    assert metrics(found.run_dir) == metrics(whole.run_dir)
    held = metrics(found.run_dir, timings=True)[-1]
    assert 0.05 < held["memory/server_rss"] < 5
    assert found.after.prompts == whole.after.prompts


def test_without_restarts_a_lost_worker_ends_the_run(started, train, monkeypatch):
    train_step = Trainer.train

    def killing(self):
        if self.step == 1:
            for pid, line in descendants(os.getpid()).items():
                if "ray::Shell" in line:
                    os.kill(pid, signal.SIGKILL)
        train_step(self)

    monkeypatch.setattr(Trainer, "train", killing)
    with pytest.raises(WorkerError, match=r"^\w+ rank 0: its process died: "):
        train(*ON_RAY)


def test_importing_the_package_imports_no_ray():
    import subprocess

    code = "import sys, omni_trainer.rpc, omni_trainer.loop, omni_trainer.assembly; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
