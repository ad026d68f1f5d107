"""The engine of the forward process keeps its suite, in both precisions, and knows other policies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.choices import Policy, PredictionGuidance, StepKind
from omni_core.engine import BaseEngine, TrainBatch
from omni_core.forward_cells import step_of
from omni_core.forward_needs import ForwardNeeds
from omni_core.options import DiffusionSamplingConfig, DType, LoRAConfig, OptimizerConfig
from omni_core.rollout import BaseRollout
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing import ForwardEngineSuite
from omni_core.testing.engine_suite import EngineFactory, RolloutFactory
from omni_core.testing.forward_engine_suite import SeenLoss, error_loss
from omni_core.testing.samples import requests_for, train_batch
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import EngineRollout, EngineRolloutConfig, ForwardDiffusersFSDPEngine
from omni_engine_fsdp.forward_batches import _dummy


class TestForwardDiffusersFSDPEngine(ForwardEngineSuite):
    dtype = DType.FLOAT32
    untouched = tuple(
        # The text stream ends in the last block, whose queries of the text are used by nobody.
        f"transformer.transformer_blocks.1.attn.add_q_proj.lora_{factor}.weight"
        for factor in "AB"
    )

    @pytest.fixture
    def make_engine(self, build_engine: Callable[..., Any], tiny_sd3: Path) -> EngineFactory:
        def make(
            *, micro_batch_size: int = 8, optimizer: OptimizerConfig | None = None
        ) -> BaseEngine:
            built: BaseEngine = build_engine(
                tiny_sd3,
                dtype=self.dtype,
                kind=ForwardDiffusersFSDPEngine,
                micro_batch_size=micro_batch_size,
                optimizer=optimizer,
            )
            return built

        return make

    @pytest.fixture
    def make_rollout(self) -> RolloutFactory:
        def make(engine: BaseEngine) -> BaseRollout:
            return EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)

        return make

    @pytest.fixture
    def sampling(self, engine: BaseEngine, make_rollout: RolloutFactory) -> SamplingSpec:
        return spec(make_rollout(engine), kind=StepKind.SDE, noise_level=0.7)


class TestForwardDiffusersFSDPEngineInFloat64(TestForwardDiffusersFSDPEngine):
    dtype = DType.FLOAT64
    gradient_bound = 1e-12


def spec(rollout: BaseRollout, *, kind: StepKind, noise_level: float) -> SamplingSpec:
    config = DiffusionSamplingConfig(num_inference_steps=4, guidance_scale=3.0)
    return SamplingSpec(
        sigmas=rollout.schedule(config).values(),
        guidance_scale=config.guidance_scale,
        height=16,
        width=16,
        max_sequence_length=8,
        kind=kind,
        noise_level=noise_level,
    )


@pytest.fixture(params=[LoRAConfig(rank=2, alpha=8.0), None], ids=["lora", "full"])
def lora(request: pytest.FixtureRequest) -> LoRAConfig | None:
    """Policies are adapters, or copies of every weight."""
    config: LoRAConfig | None = request.param
    return config


@pytest.fixture
def engine(
    build_engine: Any, tiny_sd3: Path, lora: LoRAConfig | None
) -> ForwardDiffusersFSDPEngine:
    built: ForwardDiffusersFSDPEngine = build_engine(
        tiny_sd3,
        lora=lora,
        kind=ForwardDiffusersFSDPEngine,
        adapters=("old", "ema"),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    return built


def ode_rows(engine: ForwardDiffusersFSDPEngine, adapter: str = "default") -> TrainBatch:
    """Two samples each of three prompts, sampled without noise: no step has a log-prob."""
    rollout = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    asked = requests_for(spec(rollout, kind=StepKind.ODE, noise_level=0.0), adapter=adapter)
    batch = train_batch(Trajectory.concat(rollout.generate(asked)))
    return attrs.evolve(batch, denominator=24.0)


def predictions(engine: ForwardDiffusersFSDPEngine, batch: TrainBatch) -> dict[str, Tensor]:
    others = (Policy.OLD, Policy.EMA, Policy.REFERENCE)
    loss = SeenLoss(ForwardNeeds(draws=1, others=others))
    engine.infer_batch(batch, loss)
    names = ("current", *(policy.value for policy in others))
    return {name: loss.joined(lambda i, name=name: getattr(i, name)["image"]) for name in names}


def test_every_policy_predicts_the_same_rows(engine: ForwardDiffusersFSDPEngine) -> None:
    """Adapters start equal to the trained one, stay when it moves, and follow when they are told to."""
    batch = ode_rows(engine)
    assert batch.trajectory.log_probs.shape == (6, 0)
    first = predictions(engine, batch)
    for value in first.values():
        assert torch.equal(value, first["current"])
    engine.train_batch(batch, error_loss)
    moved = predictions(engine, batch)
    for name in ("old", "ema", "reference"):
        assert torch.equal(moved[name], first[name])
    assert not torch.equal(moved["current"], first["current"])
    engine.copy_adapter("default", "old")
    engine.ema_update_adapter("default", "ema", 0.5)
    followed = predictions(engine, batch)
    # Not the same bits: the trained adapter's weights lie elsewhere, at another alignment.
    torch.testing.assert_close(followed["old"], moved["current"], rtol=1e-5, atol=1e-6)
    copied = dict(engine.get_per_tensor_param(adapter="old"))
    for name, value in engine.get_per_tensor_param():
        assert torch.equal(copied[name], value), name
    assert not torch.equal(followed["ema"], followed["old"])
    assert not torch.equal(followed["ema"], first["ema"])
    assert torch.equal(followed["reference"], first["reference"])


def test_the_old_adapter_samples(engine: ForwardDiffusersFSDPEngine) -> None:
    """Its samples stay what they were while the trained adapter moves away."""
    before = ode_rows(engine, "old").trajectory
    engine.train_batch(ode_rows(engine), error_loss)
    old, new = ode_rows(engine, "old").trajectory, ode_rows(engine).trajectory
    assert before.adapter == "old"
    assert torch.equal(old.latents["image"], before.latents["image"])
    assert not torch.equal(new.latents["image"], before.latents["image"])


def test_other_adapters_are_saved_and_restored(
    engine: ForwardDiffusersFSDPEngine,
    build_engine: Any,
    tiny_sd3: Path,
    lora: LoRAConfig | None,
    tmp_path: Path,
) -> None:
    batch = ode_rows(engine)
    engine.train_batch(batch, error_loss)
    engine.ema_update_adapter("default", "ema", 0.25)
    state = engine.save_checkpoint(tmp_path)
    resumed = build_engine(
        tiny_sd3,
        kind=ForwardDiffusersFSDPEngine,
        lora=lora,
        adapters=("old", "ema"),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    resumed.load_checkpoint(tmp_path, state)
    expected = predictions(engine, batch)
    for name, value in predictions(resumed, batch).items():
        assert torch.equal(value, expected[name]), name


def test_guidance_is_the_losss_own(engine: ForwardDiffusersFSDPEngine) -> None:
    """The rollout was guided; a loss may look at the conditional branch alone, or at what was sampled."""
    batch = ode_rows(engine)
    found = []
    for guidance in PredictionGuidance:
        loss = SeenLoss(ForwardNeeds(draws=1, guidance=guidance))
        engine.infer_batch(batch, loss)
        found.append(loss.joined(lambda inputs: inputs.current["image"]))
    assert not torch.allclose(found[0], found[1])


def test_a_policy_that_is_not_there_is_named(build_engine: Any, tiny_sd3: Path) -> None:
    engine = build_engine(
        tiny_sd3, kind=ForwardDiffusersFSDPEngine, optimizer=OptimizerConfig(lr=1e-2)
    )
    loss = SeenLoss(ForwardNeeds(others=(Policy.OLD,)))
    with pytest.raises(ValueError, match="no adapter named 'old'; there are: default"):
        engine.infer_batch(ode_rows(engine), loss)


@pytest.mark.parametrize(
    ("sigma", "step"), [(1.0, 0), (0.9, 0), (0.89, 0), (0.5, 2), (0.3, 2), (0.01, 3)]
)
def test_a_sigma_lies_in_a_step(sigma: float, step: int) -> None:
    schedule = FlowMatchSchedule.linear(4, shift=1.0)
    assert step_of(schedule, sigma) == step
    assert [step_of(schedule, value) for value in schedule.values()[:-1]] == [0, 1, 2, 3]


def test_an_expert_that_serves_no_known_sigma_is_named() -> None:
    denoiser: Any = SimpleNamespace(expert_at=lambda sigma: "transformer")
    with pytest.raises(ValueError, match="expert 'transformer_2' serves no step"):
        _dummy("transformer_2", FlowMatchSchedule.linear(2, shift=1.0), denoiser)
