"""States, time limits, failures and lost engines of the real thing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.rollout import (
    RolloutState,
    RolloutStateError,
    RolloutTimeoutError,
    WeightUpdate,
)
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing.samples import requests_for
from omni_core.trajectory import RolloutRequest, SamplingSpec, Trajectory
from omni_rollout_vllm import messages
from omni_rollout_vllm.engine_link import EngineDiedError, RolloutEngineError
from omni_rollout_vllm.options import TimeLimits
from omni_rollout_vllm.rollout import VllmOmniRollout

MakeRollout = Callable[..., VllmOmniRollout]


def asked_for(steps: int = 4, samples: int = 2) -> list[RolloutRequest]:
    spec = SamplingSpec(
        sigmas=FlowMatchSchedule.linear(steps, shift=3.0).values(),
        guidance_scale=1.0,
        height=16,
        width=16,
        max_sequence_length=16,
        kind=StepKind.SDE,
        noise_level=0.7,
    )
    return requests_for(spec, samples_per_prompt=samples)


def sampled(rollout: VllmOmniRollout, asked: list[RolloutRequest]) -> Tensor:
    return Trajectory.concat(rollout.generate(asked, timeout=300.0)).latents["image"]


def drain(rollout: VllmOmniRollout, handle: Any) -> list[Trajectory]:
    found: list[Trajectory] = []
    while not rollout.done(handle):
        found += rollout.poll(handle)
        time.sleep(0.005)
    return found


@pytest.fixture
def make(engine: Any, options: Any, adapter: Any, push: Any) -> Iterator[MakeRollout]:
    """Start a rollout of a test's own."""
    made: list[VllmOmniRollout] = []

    def start(**changes: Any) -> VllmOmniRollout:
        made.append(VllmOmniRollout(options(**changes), engine=engine))
        push(made[-1], adapter)
        return made[-1]

    yield start
    for rollout in made:
        rollout.close()


def test_sleep_gives_back_the_weights_and_wake_brings_the_same(ready: VllmOmniRollout) -> None:
    asked = asked_for()
    before = sampled(ready, asked)
    ready.sleep(1)
    ready.sleep(1)
    assert ready.state is RolloutState.ASLEEP
    with pytest.raises(RolloutStateError, match="asleep"):
        ready.submit(asked)
    with pytest.raises(RolloutStateError, match="asleep"):
        ready.pause()
    ready.wake()
    ready.wake()
    assert ready.state is RolloutState.READY
    assert torch.equal(sampled(ready, asked), before)


def test_an_engine_that_sleeps_fails_at_once_if_it_is_asked_all_the_same(
    ready: VllmOmniRollout,
) -> None:
    (request,) = asked_for()[:1]
    ready.sleep(1)
    batch = messages.SampleBatch(
        name="asleep",
        sampling=request.sampling,
        adapter="default",
        rows=(messages.Row(prompt="a", seed=0, window=()),),
        decode=False,
    )
    with pytest.raises(RolloutEngineError, match="SampleBatch failed"):
        ready._pool.ask_all(batch, timeout=300.0)
    ready.wake()
    assert torch.isfinite(sampled(ready, asked_for())).all()


def test_a_level_that_workers_refuse_is_an_error_with_their_words(ready: VllmOmniRollout) -> None:
    with pytest.raises(RolloutEngineError, match=r"handle_sleep_task .* ERROR: sleep level 2"):
        ready._pool.ask_all(messages.Sleep(level=2), timeout=300.0)
    with pytest.raises(ValueError, match="there are 1 and 2"):
        ready.sleep(3)


def test_an_error_of_the_engine_is_raised_by_poll_and_the_engine_goes_on(
    ready: VllmOmniRollout,
) -> None:
    asked = asked_for()
    ready.pause()
    handle = ready.submit(asked)
    work = ready._pool._queue[0]
    broken = attrs.evolve(work, batch=attrs.evolve(work.batch, adapter="forgotten"))
    ready._pool._queue[0] = broken
    ready.resume()
    with pytest.raises(RolloutEngineError, match="forgotten"):
        drain(ready, handle)
    assert ready.done(handle)
    assert sampled(ready, asked).shape[0] == 6


def test_case_31_an_update_during_a_request_waits(
    ready: VllmOmniRollout, adapter: dict[str, Tensor]
) -> None:
    """CASES 31: pause returns after the running batch; no sample mixes versions."""
    asked = asked_for(steps=40, samples=8)
    version = ready.weight_version
    handle = ready.submit(asked)
    _wait(lambda: bool(ready._pool._running))
    ready.pause()
    assert not ready._pool._running
    ready.update(
        WeightUpdate(
            version=version + 1,
            tensors={name: value * 0.5 for name, value in adapter.items()},
            alpha_over_rank=2.0,
        )
    )
    ready.resume()
    with pytest.raises(RolloutStateError, match="weight versions"):
        drain(ready, handle)


def _wait(until: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.002)


def test_an_engine_killed_in_a_batch_is_replaced_and_nothing_is_lost(make: MakeRollout) -> None:
    rollout = make()
    asked = asked_for(steps=60, samples=4)
    wanted = sampled(rollout, asked)
    handle = rollout.submit(asked)
    _wait(lambda: bool(rollout._pool._running))
    pid = rollout._pool.links[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    found = {t.records[0].group_id: t for t in drain(rollout, handle)}

    assert rollout._pool.counts.restarts == 1
    again = torch.cat([found[request.group_id].latents["image"] for request in asked])
    assert torch.equal(again, wanted)


def test_an_engine_killed_in_a_push_is_replaced_and_gets_all_of_it(
    make: MakeRollout, adapter: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has taken every tensor and bound none when it is killed."""
    rollout = make()
    before = sampled(rollout, asked_for())
    bind, killed = rollout._end, []

    def killing(link: Any, pushed: Any) -> Any:
        if not killed:
            killed.append(link.pid)
            os.kill(link.pid, signal.SIGKILL)
        return bind(link, pushed)

    monkeypatch.setattr(rollout, "_end", killing)
    rollout.pause()
    half = {name: value * 0.5 for name, value in adapter.items()}
    report = rollout.update(WeightUpdate(version=7, tensors=half, alpha_over_rank=2.0))
    rollout.resume()

    assert killed != [rollout._pool.links[0].pid]
    assert set(report.bound) == set(half)
    assert rollout._pool.counts.restarts == 1
    assert not torch.equal(sampled(rollout, asked_for()), before)


def test_a_lost_engine_is_an_error_once_too_many_were(make: MakeRollout) -> None:
    rollout = make(max_restarts=0)
    rollout.pause()
    handle = rollout.submit(asked_for())
    pid = rollout._pool.links[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    rollout.resume()
    with pytest.raises(EngineDiedError, match="max_restarts"):
        drain(rollout, handle)


def test_a_batch_that_takes_too_long_ends_its_engine(make: MakeRollout) -> None:
    rollout = make(max_restarts=0)
    rollout._pool._limits = attrs.evolve(rollout._pool._limits, batch=0.01)
    handle = rollout.submit(asked_for(steps=200, samples=8))
    with pytest.raises(EngineDiedError, match=r"SampleBatch took longer than 0\.01 s"):
        drain(rollout, handle)
    assert not rollout._pool.links[0].alive


def test_two_engines_share_the_work_and_give_the_same(make: MakeRollout) -> None:
    rollout = make(replicas=2)
    asked = asked_for(steps=20, samples=8)
    took: set[str] = set()
    lock = threading.Lock()
    original = rollout._pool._sample

    def watch(link: Any, work: Any) -> Any:
        with lock:
            took.add(link.number)
        return original(link, work)

    rollout._pool._sample = watch
    together = sampled(rollout, asked)
    assert took == {0, 1}
    assert torch.equal(sampled(rollout, asked), together)


def test_a_model_that_is_not_there_is_an_error_of_the_start(engine: Any, options: Any) -> None:
    class Elsewhere:
        model_config = attrs.evolve(engine.model_config, path="no/such/folder")

    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        VllmOmniRollout(options(), engine=Elsewhere())


def test_an_engine_that_does_not_start_says_why(engine: Any, options: Any) -> None:
    pipeline = attrs.evolve(engine.model_config.pipeline, height=1024)

    class TooLarge:
        model_config = attrs.evolve(engine.model_config, pipeline=pipeline)

    with pytest.raises(RolloutEngineError, match="height 1024 does not fit"):
        VllmOmniRollout(options(), engine=TooLarge())


def test_a_start_has_a_time_limit(engine: Any, options: Any) -> None:
    with pytest.raises(
        (EngineDiedError, RolloutTimeoutError), match=r"start took longer than 0\.2"
    ):
        VllmOmniRollout(options(limits=TimeLimits(start=0.2)), engine=engine)
