"""Engine-side rollout with the real engine: the conformance suite, exact replay, training after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from omni_core.choices import StepKind
from omni_core.engine import LossInputs, LossTerms, TrainBatch
from omni_core.model import Guidance, Step
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.reverse_step import Latents
from omni_core.testing import RolloutSuite
from omni_core.testing.samples import requests_for
from omni_core.trajectory import Conditioning, SamplingSpec, Trajectory
from omni_engine_fsdp.options import EngineRolloutConfig, FSDPEngineConfig
from omni_engine_fsdp.ppo import PPODiffusersFSDPEngine
from omni_engine_fsdp.rollout import EngineRollout


@contextlib.contextmanager
def made_engine(path: Path) -> Iterator[PPODiffusersFSDPEngine]:
    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(
            path=str(path),
            pipeline=DiffusionPipelineConfig(height=16, width=16, max_sequence_length=16),
            lora=LoRAConfig(rank=2, alpha=8.0),
        ),
        FSDPEngineConfig(micro_batch_size=4, device="cpu"),
        OptimizerConfig(lr=1e-2),
        None,
    )
    engine.initialize()
    try:
        yield engine
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def engine(tiny_sd3: Path) -> Iterator[PPODiffusersFSDPEngine]:
    with made_engine(tiny_sd3) as engine:
        yield engine


@pytest.fixture
def rollout(engine: PPODiffusersFSDPEngine) -> EngineRollout:
    return EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)


@pytest.fixture
def sampling(engine: PPODiffusersFSDPEngine) -> SamplingSpec:
    config = DiffusionSamplingConfig(num_inference_steps=5)
    return SamplingSpec(
        sigmas=engine.family.schedule(config).values(),
        guidance_scale=2.0,
        height=16,
        width=16,
        max_sequence_length=16,
        kind=StepKind.SDE,
        noise_level=0.7,
    )


class TestEngineRollout(RolloutSuite):
    """What every rollout keeps."""

    @pytest.fixture
    def rollout(self, engine: PPODiffusersFSDPEngine) -> EngineRollout:
        return EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)

    @pytest.fixture
    def sampling(self, sampling: SamplingSpec) -> SamplingSpec:
        return sampling

    @pytest.fixture
    def velocity(self, engine: PPODiffusersFSDPEngine) -> object:
        def predict(
            latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
        ) -> Latents:
            with engine.eval_mode():
                return engine.denoiser.velocity(latents, step, conditioning, guidance)

        return predict


def policy_gradient(inputs: LossInputs) -> LossTerms:
    ratio = (inputs.current.require_log_prob() - inputs.old_log_probs).exp()
    return LossTerms(terms=-inputs.advantages * ratio)


def test_case_7_a_replay_of_the_rollouts_own_batches_is_bit_equal(
    engine: PPODiffusersFSDPEngine, rollout: EngineRollout, sampling: SamplingSpec
) -> None:
    requests = requests_for(sampling)
    windows = [(0, 1, 2), (1, 2, 3), (0, 2, 3)]
    asked = [attrs.evolve(r, window=w) for r, w in zip(requests, windows, strict=True)]
    trajectory = Trajectory.concat(rollout.generate(asked, decode=False))
    assert torch.equal(engine.replay(trajectory), trajectory.log_probs)
    # Alone, a group's rows are other batches: equal up to rounding only.
    shifted = attrs.evolve(trajectory, places=tuple(reversed(trajectory.places)))
    torch.testing.assert_close(engine.replay(shifted), trajectory.log_probs, rtol=0.0, atol=1e-6)


def test_what_was_sampled_can_be_trained_on_and_the_next_sample_is_another_policys(
    tiny_sd3: Path, engine: PPODiffusersFSDPEngine, rollout: EngineRollout, sampling: SamplingSpec
) -> None:
    asked = requests_for(sampling)
    before = Trajectory.concat(rollout.generate(asked, decode=False))
    advantages = torch.linspace(-1.0, 1.0, before.rows)
    batch = TrainBatch(
        trajectory=before,
        advantages=advantages,
        weights=torch.ones(before.rows),
        denominator=float(before.log_probs.numel()),
    )
    version = rollout.weight_version
    engine.train_batch(batch, policy_gradient)
    after = Trajectory.concat(rollout.generate(asked, decode=False))
    assert (before.weight_version, after.weight_version) == (version, version + 1)
    assert torch.equal(before.latents["image"][:, 0], after.latents["image"][:, 0])
    assert not torch.equal(before.latents["image"], after.latents["image"])
    assert torch.equal(engine.replay(after), after.log_probs)


def test_encoders_and_codec_that_rest_give_the_same_samples(
    engine: PPODiffusersFSDPEngine,
    rollout: EngineRollout,
    sampling: SamplingSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are on the engine's device while they work, and in host memory else."""
    wanted = rollout.generate(requests_for(sampling))
    resting = EngineRollout(
        EngineRolloutConfig(batch_size=4, offload_encoders=True, offload_codec=True), engine=engine
    )
    seen: list[tuple[str, str]] = []
    for part, work in ((resting.conditioner, "encode"), (resting.codec, "decode")):
        name = type(part).__name__
        monkeypatch.setattr(part, "to", lambda place, name=name: seen.append((name, str(place))))
        monkeypatch.setattr(part, work, _watched(getattr(part, work), seen, name))
    found = resting.generate(requests_for(sampling))

    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.latents["image"], other.latents["image"])
        assert one.media is not None
        assert other.media is not None
        assert torch.equal(_image(one), _image(other))
    for name in {name for name, _ in seen}:
        own = [said for who, said in seen if who == name]
        runs = len(own) // 3
        assert own == ["cpu", "works", "cpu"] * runs
    assert len({name for name, _ in seen}) == 2


def _watched(work: Any, seen: list[tuple[str, str]], name: str) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        seen.append((name, "works"))
        return work(*args, **options)

    return run


def _image(trajectory: Trajectory) -> torch.Tensor:
    assert trajectory.media is not None
    assert trajectory.media.image is not None
    return trajectory.media.image
