"""What losses of the reverse process are given beside the current prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_core.choices import StepKind
from omni_core.engine import LossInputs, LossTerms
from omni_core.options import DiffusionSamplingConfig, OptimizerConfig
from omni_core.reverse_step import old_mean
from omni_core.testing.samples import requests_for, train_batch
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import EngineRollout, EngineRolloutConfig, PPODiffusersFSDPEngine


class Seen:
    """A loss that keeps what it was given."""

    needs_noise = True

    def __init__(self) -> None:
        self.inputs: list[LossInputs] = []

    def __call__(self, inputs: LossInputs) -> LossTerms:
        self.inputs.append(inputs)
        return LossTerms(terms=inputs.current.require_log_prob())


def sampled(engine: PPODiffusersFSDPEngine, kind: StepKind) -> Trajectory:
    rollout = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    config = DiffusionSamplingConfig(num_inference_steps=4, guidance_scale=3.0)
    spec = SamplingSpec(
        sigmas=rollout.schedule(config).values(),
        guidance_scale=3.0,
        height=16,
        width=16,
        max_sequence_length=8,
        kind=kind,
        noise_level=0.7,
    )
    return Trajectory.concat(rollout.generate(requests_for(spec, window=(0, 2))))


@pytest.mark.parametrize("kind", [StepKind.SDE, StepKind.CPS, StepKind.DANCE_SDE])
def test_the_noise_is_what_the_steps_were_drawn_with(
    build_engine: Any, tiny_sd3: Path, kind: StepKind
) -> None:
    """With unchanged weights x' - s noise is the mean itself, in any micro-batch."""
    engine = build_engine(tiny_sd3, optimizer=OptimizerConfig(), micro_batch_size=5)
    batch = train_batch(sampled(engine, kind))
    seen = Seen()
    engine.infer_batch(batch, seen)
    assert sum(len(inputs.advantages) for inputs in seen.inputs) == 12
    for inputs in seen.inputs:
        assert inputs.noise is not None
        old = old_mean(inputs.current, inputs.noise)
        for name, mean in inputs.current.mean.items():
            torch.testing.assert_close(old[name], mean, rtol=1e-5, atol=1e-5)


def test_the_noise_is_not_drawn_where_no_loss_asks(build_engine: Any, tiny_sd3: Path) -> None:
    """It costs a draw for each pair."""
    engine = build_engine(tiny_sd3, optimizer=OptimizerConfig())
    seen = Seen()
    seen.needs_noise = False
    engine.infer_batch(train_batch(sampled(engine, StepKind.SDE)), seen)
    assert all(inputs.noise is None for inputs in seen.inputs)
