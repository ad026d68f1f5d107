"""Rollout correction inside an update: which steps are weighed, by what, and what stays the old policy."""

from __future__ import annotations

import attrs
import pytest
import torch

from omni_core.choices import ImportanceLevel, RejectionStatistic
from omni_core.rollout_correction_options import RolloutCorrectionOptions
from omni_core.testing.samples import train_batch
from omni_trainer.workers.correction import with_old_log_probs


@pytest.fixture
def batch(toys):
    from omni_core.options import DiffusionModelConfig, DiffusionPipelineConfig, OptimizerConfig
    from omni_core.plugins import EngineRegistry
    from omni_core.testing.samples import requests_for
    from omni_core.testing.toys.options import ToyEngineConfig, ToyRolloutConfig
    from omni_core.testing.toys.rollout import ToyRollout
    from omni_core.trajectory import SamplingSpec, Trajectory

    pipeline = DiffusionPipelineConfig(height=16, width=16, max_sequence_length=8)
    engine = EngineRegistry.new(
        "diffusion",
        "toy",
        "cpu",
        model_config=DiffusionModelConfig(path="toy", family="toy", pipeline=pipeline),
        engine_config=ToyEngineConfig(),
        optimizer_config=OptimizerConfig(),
        checkpoint_config=None,
    )
    engine.initialize()
    spec = SamplingSpec(
        sigmas=(1.0, 0.75, 0.5, 0.25, 0.0),
        guidance_scale=1.0,
        height=16,
        width=16,
        max_sequence_length=8,
        kind="sde",
        noise_level=0.7,
    )
    rollout = ToyRollout(ToyRolloutConfig(), engine=engine)
    return train_batch(Trajectory.concat(rollout.generate(requests_for(spec, window=(0, 2)))))


def shifted(batch, values):
    """Old log-probs that differ from the rollout's by these, [W] alike for all rows."""
    return batch.trajectory.log_probs + torch.tensor(values)


def test_without_a_correction_only_the_log_probs_change(batch):
    old = shifted(batch, [1e-3, 0.0])
    found, said = with_old_log_probs(batch, old, None, {})

    assert found.step_weights is None
    assert torch.equal(found.trajectory.log_probs, old)
    assert said == {}


def test_decoupled_weights_are_ratios_to_the_rollout(batch):
    options = RolloutCorrectionOptions(importance=ImportanceLevel.TOKEN)
    found, said = with_old_log_probs(batch, shifted(batch, [0.5, -0.5]), options, {})

    torch.testing.assert_close(found.step_weights[0], torch.tensor([0.5, -0.5]).exp())
    assert torch.equal(found.trajectory.log_probs, shifted(batch, [0.5, -0.5]))
    assert said["rollout_weight"].count == 12
    assert said["rollout_rejected"].mean == 0.0


def test_a_rejection_is_in_units_of_each_steps_floor(batch):
    options = RolloutCorrectionOptions(rejection=RejectionStatistic.Z_K1, band=(3.0,), bypass=True)
    old = shifted(batch, [1e-3, 1e-3])
    found, said = with_old_log_probs(batch, old, options, {0: 1e-3, 2: 1e-4})

    assert found.step_weights.tolist() == [[1.0, 0.0]] * 6
    assert torch.equal(found.trajectory.log_probs, batch.trajectory.log_probs)  # bypass
    assert said["rollout_rejected"].mean == 0.5


def test_a_step_without_a_measured_floor_has_that_of_float32(batch):
    options = RolloutCorrectionOptions(rejection=RejectionStatistic.Z_K1, band=(3.0,))
    same, _ = with_old_log_probs(batch, batch.trajectory.log_probs, options, {})

    assert same.step_weights.tolist() == [[1.0, 1.0]] * 6


def test_a_row_that_counts_for_nothing_is_in_no_mean(batch):
    options = RolloutCorrectionOptions(importance=ImportanceLevel.SEQUENCE)
    half = attrs.evolve(batch, weights=torch.tensor([1.0, 0.0] * 3))
    _, said = with_old_log_probs(half, shifted(batch, [0.1, 0.1]), options, {})

    assert said["rollout_weight"].count == 6
    assert said["rollout_weight"].mean == pytest.approx(torch.tensor(0.2).exp().item())


def test_bypass_takes_no_importance_weights():
    with pytest.raises(ValueError, match="would count twice"):
        RolloutCorrectionOptions(importance=ImportanceLevel.TOKEN, bypass=True)
