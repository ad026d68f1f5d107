"""A rollout with a copy of its own: the conformance suite, pushes, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from omni_core.options import DiffusionSamplingConfig
from omni_core.reverse_step import Latents
from omni_core.rollout import RolloutStateError, WeightMismatchError, WeightUpdate
from omni_core.testing import RolloutSuite
from omni_core.testing.samples import requests_for
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import EngineRollout, EngineRolloutConfig, RolloutPlacement

OPTIONS = EngineRolloutConfig(batch_size=4, placement=RolloutPlacement.REPLICA)


@pytest.fixture(scope="module")
def engine(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> Any:
    """The trained one, one update old."""
    built = build_engine(tiny_sd3, optimizer=ranks.LR, adapters=("old",))
    built.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    return built


@pytest.fixture
def rollout(engine: Any) -> EngineRollout:
    return EngineRollout(OPTIONS, engine=engine)


@pytest.fixture
def sampling(engine: Any, ranks: ModuleType) -> SamplingSpec:
    config = DiffusionSamplingConfig(num_inference_steps=4)
    spec: SamplingSpec = ranks.SPEC
    return attrs.evolve(spec, sigmas=engine.family.schedule(config).values())


def update_of(engine: Any, version: int, adapter: str | None = "default") -> WeightUpdate:
    tensors = {n: t.clone() for n, t in engine.get_per_tensor_param(adapter=adapter)}
    return WeightUpdate(version=version, tensors=tensors, adapter=adapter, alpha_over_rank=4.0)


class TestReplica(RolloutSuite):
    """What every rollout keeps, pushes included."""

    @pytest.fixture
    def rollout(self, engine: Any) -> EngineRollout:
        return EngineRollout(OPTIONS, engine=engine)

    @pytest.fixture
    def sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        return sampling

    @pytest.fixture
    def velocity(self, rollout: EngineRollout) -> Callable[..., Latents]:
        def predict(*asked: Any) -> Latents:
            with rollout.engine.eval_mode():
                found: Latents = rollout.engine.denoiser.velocity(*asked)
            return found

        return predict

    @pytest.fixture
    def make_update(self, engine: Any) -> Callable[[int], WeightUpdate]:
        return lambda version: update_of(engine, version)


def samples(rollout: EngineRollout, sampling: SamplingSpec, **asked: Any) -> Trajectory:
    return Trajectory.concat(rollout.generate(requests_for(sampling, **asked), decode=False))


def test_it_samples_what_was_pushed_and_not_what_is_trained(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, sampling: SamplingSpec
) -> None:
    engine = build_engine(tiny_sd3, optimizer=ranks.LR)
    replica = EngineRollout(OPTIONS, engine=engine)
    shared = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    before = samples(replica, sampling)
    assert torch.equal(before.latents["image"], samples(shared, sampling).latents["image"])
    engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    assert torch.equal(samples(replica, sampling).latents["image"], before.latents["image"])
    assert replica.weight_version == 0
    replica.pause()
    replica.update(update_of(engine, engine.weight_version))
    replica.resume()
    after = samples(replica, sampling)
    assert after.weight_version == 1
    assert torch.equal(after.latents["image"], samples(shared, sampling).latents["image"])
    assert not torch.equal(after.latents["image"], before.latents["image"])
    # Two copies, the same kernels: the canary stays exact.
    assert torch.equal(engine.replay(after), after.log_probs)


def test_an_adapter_that_was_not_pushed_along_is_not_sampled_with(
    engine: Any, rollout: EngineRollout, sampling: SamplingSpec
) -> None:
    samples(rollout, sampling, adapter="old")  # as it was when the copy was made
    rollout.pause()
    rollout.update(update_of(engine, 5))
    rollout.resume()
    samples(rollout, sampling)
    with pytest.raises(ValueError, match="adapter 'old' was not pushed with version 5"):
        rollout.submit(requests_for(sampling, adapter="old"))
    rollout.pause()
    old = dict(engine.get_per_tensor_param(adapter="old"))
    rollout.update(WeightUpdate(version=5, tensors=old, adapter="old"))
    rollout.resume()
    samples(rollout, sampling, adapter="old")


def test_a_tensor_of_another_shape_changes_nothing(
    engine: Any, rollout: EngineRollout, sampling: SamplingSpec
) -> None:
    before = samples(rollout, sampling)
    update = update_of(engine, 5)
    name, value = next(reversed(update.tensors.items()))
    rollout.pause()
    with pytest.raises(WeightMismatchError, match=f"{name} \\(1, "):
        rollout.update(attrs.evolve(update, tensors={**update.tensors, name: value[:1]}))
    rollout.resume()
    assert torch.equal(samples(rollout, sampling).latents["image"], before.latents["image"])


def test_every_weight_is_pushed_where_every_weight_is_trained(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, sampling: SamplingSpec
) -> None:
    engine = build_engine(tiny_sd3, lora=None, optimizer=ranks.LR)
    rollout = EngineRollout(OPTIONS, engine=engine)
    engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    rollout.pause()
    report = rollout.update(update_of(engine, 1, adapter=None))
    rollout.resume()
    assert len(report.bound) == len(engine.trained())
    found = samples(rollout, sampling)
    assert torch.equal(engine.replay(found), found.log_probs)


def test_closing_frees_the_copy(engine: Any) -> None:
    rollout = EngineRollout(OPTIONS, engine=engine)
    copy = weakref.ref(rollout.engine)
    rollout.close()
    gc.collect()
    assert copy() is None


def test_a_shared_rollout_is_pushed_nothing(engine: Any) -> None:
    shared = EngineRollout(EngineRolloutConfig(), engine=engine)
    shared.pause()
    with pytest.raises(RolloutStateError, match="nothing to push"):
        shared.update(update_of(engine, 5))
