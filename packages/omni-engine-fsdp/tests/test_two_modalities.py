"""A family of two modalities through the real engine: sampled, replayed, trained and decoded as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

from omni_core.algorithms.diffusion_nft_options import DiffusionNFTOptions
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import StepKind
from omni_core.losses import ConfiguredLoss
from omni_core.options import (
    CheckpointConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing import requests_for, train_batch
from omni_core.testing.toys import register_toys, unregister_toys
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import (
    ForwardDiffusersFSDPEngine,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
)
from omni_engine_fsdp.options import EngineRolloutConfig
from omni_engine_fsdp.rollout import EngineRollout

SPEC = SamplingSpec(
    sigmas=FlowMatchSchedule.linear(4, shift=3.0).values(),
    guidance_scale=2.0,
    height=8,
    width=12,
    max_sequence_length=8,
    num_frames=3,
    frame_rate=8.0,
    kind=StepKind.SDE,
    noise_level=0.7,
)


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    register_toys()
    yield
    unregister_toys()


def build(kind: type[Any] = PPODiffusersFSDPEngine, *, size: int = 4) -> Any:
    pipeline = DiffusionPipelineConfig(
        height=8, width=12, max_sequence_length=8, num_frames=3, frame_rate=8.0
    )
    model = DiffusionModelConfig(
        path="toy", family="toy_clips", lora=LoRAConfig(rank=2, alpha=4.0), pipeline=pipeline
    )
    engine = kind(
        model,
        FSDPEngineConfig(device="cpu", micro_batch_size=size),
        OptimizerConfig(lr=1e-2),
        CheckpointConfig(),
    )
    if kind is ForwardDiffusersFSDPEngine:
        engine.add_adapter("old")
    engine.initialize()
    return engine


def sampled(engine: Any, spec: SamplingSpec = SPEC) -> Trajectory:
    rollout = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    return Trajectory.concat(rollout.generate(requests_for(spec)))


def test_both_modalities_are_stored_decoded_and_replayed() -> None:
    engine = build()
    trajectory = sampled(engine)
    shapes = {name: tuple(value.shape) for name, value in trajectory.latents.items()}
    assert shapes == {"video": (6, 5, 3, 3, 2, 3), "audio": (6, 5, 3, 6)}
    media = trajectory.media
    assert media is not None
    assert media.video is not None
    assert media.audio is not None
    assert media.video.shape == (6, 3, 8, 12, 3)
    assert media.audio.shape == (6, 1, 18)
    assert SPEC.difference(trajectory.effective) is None
    with engine.eval_mode():
        assert torch.equal(engine.replay(trajectory), trajectory.log_probs)


def test_training_moves_what_is_seen_and_what_is_heard() -> None:
    engine = build()
    trajectory = sampled(engine)
    options = FlowGRPOOptions(clip_ratio=1e-2)
    loss = ConfiguredLoss(DiffusionLossConfig(name="flow_grpo", options=options))
    engine.train_batch(train_batch(trajectory), loss)
    assert engine.weight_version == 1
    again = sampled(engine)
    for name, value in trajectory.latents.items():
        assert torch.equal(value[:, 0], again.latents[name][:, 0])
        assert (value[:, -1] - again.latents[name][:, -1]).abs().max() > 1e-4, name


def test_the_forward_process_noises_both() -> None:
    engine = build(ForwardDiffusersFSDPEngine)
    trajectory = sampled(engine, attrs.evolve(SPEC, kind=StepKind.ODE, noise_level=0.0))
    batch = attrs.evolve(train_batch(trajectory), denominator=6.0)
    loss = ConfiguredLoss(DiffusionLossConfig(name="diffusion_nft", options=DiffusionNFTOptions()))
    engine.train_batch(batch, loss)
    assert engine.weight_version == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_scale_2": 2.0}, r"guidance_scale_2 2\.0: this family has one"),
        ({"frame_rate": 24.0}, r"frame_rate 24\.0: the model is run with 8\.0"),
    ],
)
def test_what_the_family_is_not_run_with_is_refused(
    changes: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampled(build(), attrs.evolve(SPEC, **changes))
