"""A rollout that servers hold for all ranks; here the servers are in this process."""

from __future__ import annotations

import attrs
import pytest
import torch

from omni_core.choices import StepKind
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    LoRAConfig,
    WeightTransport,
)
from omni_core.rollout import RolloutHandle, RolloutState, WeightMismatchError, WeightUpdate
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing import RolloutSuite, requests_for
from omni_core.testing.toys import (
    ToyEngine,
    ToyEngineConfig,
    ToyRolloutConfig,
    register_toys,
    unregister_toys,
)
from omni_core.testing.toys.options import ToyPlacement
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_core.weight_buckets import Bucket, PackedBucket
from omni_trainer.workers.process import Place
from omni_trainer.workers.rollout_server import RolloutServerConfig
from omni_trainer.workers.shared_rollout import ServerLink, ServerLinks, SharedRollout, batches
from omni_trainer.workers.weight_transport import choose

MODEL = DiffusionModelConfig(
    path="toy",
    family="toy",
    pipeline=DiffusionPipelineConfig(height=16, width=16),
    lora=LoRAConfig(rank=4, alpha=8.0),
)
SPEC = SamplingSpec(
    sigmas=FlowMatchSchedule.linear(4, shift=3.0).values(),
    guidance_scale=2.0,
    height=16,
    width=16,
    max_sequence_length=MODEL.pipeline.max_sequence_length,
    kind=StepKind.SDE,
    noise_level=0.7,
)


class Call:
    """What a call gave, or the handle that is still being collected."""

    def __init__(self, *, value=None, error=None, collects=None):
        self.value, self.error, self.collects = value, error, collects


class Link(ServerLink):
    """A server of this process, which works while somebody waits."""

    def __init__(self, server):
        self.server = server
        self.calls = []

    def begin(self, method, *args, **kwargs):
        self.calls.append(args[0] if method == "answer" else method)
        if method == "collect":
            return Call(value=[], collects=args[0])
        try:
            return Call(value=getattr(self.server, method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- raised where the result is asked for
            return Call(error=error)

    def result(self, pending):
        if pending.error is not None:
            raise pending.error
        return pending.value

    def advance(self, call):
        """Whether a call is finished, having worked a little."""
        if call.collects is None or call.error is not None:
            return True
        try:
            call.value += self.server.rollout.poll(call.collects)
        except Exception as error:  # noqa: BLE001 -- raised where the result is asked for
            call.error = error
            return True
        return self.server.rollout.done(call.collects)


class Links(ServerLinks):
    def __init__(self, servers, one_machine=True):
        self.links = [Link(server) for server in servers]
        self.one_machine = one_machine
        self.sent = []

    def finished(self, pending, *, timeout):
        return [call for call in pending if any(link.advance(call) for link in self.links_of(call))]

    def links_of(self, call):
        known = [link for link in self.links if call.collects.id in link.server.rollout._jobs]
        return known or self.links[:1]

    def shared(self, value):
        self.sent.append(value)
        return value


OPTIONS = ToyRolloutConfig(placement=ToyPlacement.REPLICA, batch_size=4, servers=2, bucket_mib=1)


MADE = []
"""What the test under way has to close."""


@pytest.fixture(autouse=True)
def toys():
    register_toys()
    yield
    while MADE:
        MADE.pop().close()
    unregister_toys()


@pytest.fixture
def engine():
    made = ToyEngine(MODEL, ToyEngineConfig(), None, CheckpointConfig())
    made.initialize()
    made.add_adapter("old")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in ("default", "old"):
            for _, value in made.get_per_tensor_param(adapter=adapter):
                value.normal_(0.0, 0.2, generator=generator)
    return made


def servers(count=2, options=OPTIONS):
    config = RolloutServerConfig(rollout="toy", options=options, model=MODEL)
    made = [config(Place(role="rollout", rank=rank), None) for rank in range(count)]
    MADE.extend(made)
    return made


def push(engine, version, adapter="default"):
    tensors = {n: v.detach().clone() for n, v in engine.get_per_tensor_param(adapter=adapter)}
    return WeightUpdate(version=version, tensors=tensors, adapter=adapter, alpha_over_rank=2.0)


def shared(engine, links, *, rank=0, **options):
    made = SharedRollout(
        links,
        options=attrs.evolve(OPTIONS, **options),
        rank=rank,
        schedule=engine.family.schedule,
    )
    MADE.append(made)
    made.pause()
    made.update(push(engine, 0))
    made.resume()
    return made


class TestSharedRollout(RolloutSuite):
    """Two servers, one rank."""

    sleeps = True

    @pytest.fixture
    def rollout(self, engine):
        return shared(engine, Links(servers()))

    @pytest.fixture
    def sampling(self):
        return SPEC

    @pytest.fixture
    def velocity(self, engine, rollout):
        del rollout
        return engine.denoiser.velocity

    @pytest.fixture
    def make_update(self, engine):
        return lambda version: push(engine, version)


# -- who samples what -------------------------------------------------------------------------------


def sizes(found):
    return [[len(request.samples) for request in batch] for batch in found]


def test_batches_hold_whole_requests_that_are_sampled_alike():
    asked = requests_for(SPEC, [f"sign {n}" for n in range(5)])
    other = requests_for(attrs.evolve(SPEC, guidance_scale=1.0), ["wall"])

    assert sizes(batches(asked, rows=4)) == [[2, 2], [2, 2], [2]]
    assert sizes(batches(asked, rows=1)) == [[2]] * 5
    assert sizes(batches([asked[0], *other, asked[1]], rows=4)) == [[2, 2], [2]]
    assert batches([], rows=4) == []


def test_each_batch_goes_to_the_server_with_the_least_to_do(engine):
    links = Links(servers())
    rollout = shared(engine, links)
    asked = requests_for(SPEC, [f"sign {n}" for n in range(8)])
    rollout.submit(asked[:2])
    rollout.submit(asked[2:4])
    rollout.submit(asked[4:5])
    rollout.submit(asked[5:6])

    assert [link.calls.count("submit") for link in links.links] == [2, 2]
    assert rollout._load == [6, 6]


def test_other_ranks_begin_with_other_servers_and_push_nothing(engine):
    links = Links(servers())
    first = shared(engine, links)
    pushed = [list(link.calls) for link in links.links]
    second = shared(engine, links, rank=1)

    assert [link.calls for link in links.links] == pushed
    assert second.weight_version == first.weight_version == 0
    second.submit(requests_for(SPEC, ["a sign"]))
    assert [link.calls.count("submit") for link in links.links] == [0, 1]
    assert second.metrics() == {}


def test_a_server_is_given_so_many_batches_at_once(engine):
    links = Links(servers(1))
    rollout = shared(engine, links)
    asked = requests_for(SPEC, [f"sign {n}" for n in range(12)])
    handle = rollout.submit(asked)
    assert links.links[0].calls.count("submit") == 4

    found = []
    while not rollout.done(handle):
        found += rollout.poll(handle)
    assert {t.records[0].group_id for t in found} == {request.group_id for request in asked}


def latents(rollout, asked):
    return Trajectory.concat(rollout.generate(asked, timeout=20.0)).latents["image"]


def test_samples_do_not_depend_on_the_number_of_servers(engine):
    asked = requests_for(SPEC, [f"sign {n}" for n in range(6)])
    one, two = (latents(shared(engine, Links(servers(n))), asked) for n in (1, 2))
    assert torch.equal(one, two)


def test_what_fails_on_a_server_is_raised_by_the_poll_of_its_own_handle(engine):
    links = Links(servers(1))
    rollout = shared(engine, links)
    good, bad = requests_for(SPEC, ["a sign"]), requests_for(SPEC, ["a wall"], step=1)
    kept, lost = rollout.submit(good), rollout.submit(bad)
    links.links[0].server.rollout.cancel(RolloutHandle(1, 1))
    found = []
    while not rollout.done(kept):
        found += rollout.poll(kept)

    assert len(found) == 1
    with pytest.raises(KeyError):
        rollout.poll(lost)
    assert rollout.done(lost)
    assert rollout._load == [0]
    with pytest.raises(KeyError, match="unknown, cancelled or drained"):
        rollout.poll(RolloutHandle(99, 1))


# -- weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "one_machine", "kind"),
    [
        ("auto", True, Bucket),
        ("auto", False, PackedBucket),
        ("shared_memory", True, Bucket),
        ("object_store", True, PackedBucket),
    ],
)
def test_weights_take_the_road_that_fits(engine, transport, one_machine, kind):
    links = Links(servers(), one_machine=one_machine)
    rollout = shared(engine, links, transport=WeightTransport(transport))
    near = shared(engine, Links(servers()))
    asked = requests_for(SPEC)

    assert {type(bucket) for bucket in links.sent} == {kind}
    assert torch.equal(latents(rollout, asked), latents(near, asked))


def test_a_road_that_ends_at_the_machine_is_refused_across_machines():
    for transport in (WeightTransport.SHARED_MEMORY, WeightTransport.CUDA_IPC):
        with pytest.raises(ValueError, match=r"reaches one machine.*take auto or object_store"):
            choose(transport, one_machine=False)
    assert choose(WeightTransport.CUDA_IPC, one_machine=True) is WeightTransport.CUDA_IPC
    assert choose(WeightTransport.AUTO, one_machine=True) is WeightTransport.SHARED_MEMORY


def test_policies_of_one_version_are_pushed_one_after_the_other(engine):
    rollout = shared(engine, Links(servers()))
    asked = requests_for(SPEC)
    old = [attrs.evolve(request, adapter="old") for request in asked]
    with pytest.raises(ValueError, match="no adapter named 'old'"):
        rollout.submit(old)
    rollout.pause()
    rollout.update(push(engine, 0, "old"))
    with pytest.raises(ValueError, match="version 0 does not follow 0"):
        rollout.update(push(engine, 0, "old"))
    rollout.resume()

    assert rollout.state is RolloutState.READY
    assert not torch.equal(latents(rollout, asked), latents(rollout, old))


def test_case_25_a_server_that_binds_less_is_named(engine, monkeypatch):
    links = Links(servers())
    rollout = shared(engine, links)
    far = links.links[1].server.rollout
    update = far.update

    def forgetful(new):
        report = update(new)
        return attrs.evolve(report, bound=report.bound[1:])

    monkeypatch.setattr(far, "update", forgetful)
    rollout.pause()
    with pytest.raises(WeightMismatchError, match="server 1 did not bind"):
        rollout.update(push(engine, 1))
    assert rollout.weight_version == 0
