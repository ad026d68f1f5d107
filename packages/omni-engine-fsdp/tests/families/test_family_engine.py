"""Every family in the engine: its rollout echoes what it used, and its export is the stock pipeline's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from family_under_test import log_probs_beside_and_alone
from peft.tuners.lora import LoraLayer
from safetensors import safe_open

from omni_core.choices import StepKind
from omni_core.engine import LossInputs, LossTerms, TrainBatch
from omni_core.model import NO_GUIDANCE, Guidance, Step
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DType,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import (
    EngineRollout,
    EngineRolloutConfig,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
)
from omni_engine_fsdp.kept_graphs import KeptGraphs
from omni_engine_fsdp.sharding import whole


@pytest.fixture(scope="module")
def engine(loaded: Any) -> PPODiffusersFSDPEngine:
    """Of the family, moved from its start."""
    built: PPODiffusersFSDPEngine = loaded.engine()
    return built


@torch.no_grad()
def test_case_22_case_25_the_exported_lora_loads_in_the_stock_pipeline(
    engine: PPODiffusersFSDPEngine, loaded: Any, tmp_path: Path
) -> None:
    """CASES 22 and 25: every name that is written is bound; outputs within 1e-5, scale 4.0."""
    file = engine.export_adapter(tmp_path)
    with safe_open(file, framework="pt") as opened:
        written = {name.removeprefix("transformer.") for name in opened.keys()}  # noqa: SIM118
    pipeline = loaded.stock()
    pipeline.load_lora_weights(tmp_path)
    layers = {
        name: layer
        for name, layer in pipeline.transformer.named_modules()
        if isinstance(layer, LoraLayer)
    }
    assert written == {f"{name}.lora_{side}.weight" for name in layers for side in "AB"}
    assert {scale for layer in layers.values() for scale in layer.scaling.values()} == {4.0}

    scale, negative = loaded.case.guided, loaded.case.negative
    conditioning = loaded.encode(("a red sign", "blue"), scale, negative)
    rows = torch.zeros(2, dtype=torch.int64)
    step = Step(index=rows, sigma=loaded.schedule.at(rows)[0])
    first = loaded.run_stock(scale, negative, pipeline)[0]
    with engine.eval_mode():
        found = engine.denoiser.velocity(
            loaded.ours(first.sample), step, conditioning, Guidance(scale=scale)
        )
        with engine.disable_adapter():
            base = engine.denoiser.velocity(
                loaded.ours(first.sample), step, conditioning, Guidance(scale=scale)
            )
    for name, value in loaded.ours(first.velocity).items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-5)
        assert (base[name] - value).abs().max() > 1e-3


def test_case_32_no_guidance_is_reported_as_such(
    engine: PPODiffusersFSDPEngine, loaded: Any
) -> None:
    """CASES 32: 1.0 asked, 1.0 used, one branch."""
    rollout = EngineRollout(EngineRolloutConfig(batch_size=2), engine=engine)
    spec = spec_of(loaded)
    (trajectory,) = rollout.generate(loaded.requests(spec, ["a sign"]))
    assert trajectory.effective == spec
    assert trajectory.log_probs.isfinite().all()
    assert engine.denoiser.branches(NO_GUIDANCE) == 1


def test_case_9_log_probs_do_not_depend_on_the_text_of_other_rows(
    engine: PPODiffusersFSDPEngine, loaded: Any
) -> None:
    """CASES 9: 3 and 40 characters in one batch, guided."""
    spec = attrs.evolve(spec_of(loaded), guidance_scale=loaded.case.guided)
    requests = loaded.requests(spec, ["abc", "a sign " * 6])
    beside, alone = log_probs_beside_and_alone(engine, requests)
    assert beside.isfinite().all()
    torch.testing.assert_close(alone, beside, rtol=0.0, atol=1e-5)


def test_a_bf16_engine_samples_what_it_replays(loaded: Any) -> None:
    """Weights, adapters and inputs of several formats meet in every family's modules."""
    model = DiffusionModelConfig(
        path=str(loaded.path),
        dtype=DType.BFLOAT16,
        pipeline=loaded.case.size,
        lora=LoRAConfig(rank=2, alpha=8.0),
    )
    built = PPODiffusersFSDPEngine(
        model,
        FSDPEngineConfig(device="cpu", gradient_checkpointing=True),
        OptimizerConfig(lr=1e-3),
        CheckpointConfig(),
    )
    built.initialize()
    rollout = EngineRollout(EngineRolloutConfig(batch_size=2), engine=built)
    spec = attrs.evolve(spec_of(loaded), guidance_scale=loaded.case.guided)
    (trajectory,) = rollout.generate(loaded.requests(spec, ["a sign"]))
    replayed = built.replay(trajectory)
    assert torch.equal(replayed, trajectory.log_probs)


def policy_gradient(inputs: LossInputs) -> LossTerms:
    return LossTerms(terms=-inputs.advantages * inputs.current.require_log_prob())


def gradient(engine: PPODiffusersFSDPEngine, batch: TrainBatch) -> torch.Tensor:
    """Of everything that is trained, in one vector."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, policy_gradient)
    found = [whole(p.grad).flatten() for p in engine.trained().values() if p.grad is not None]
    engine.optimizer_zero_grad()
    return torch.cat(found)


def test_kept_graphs_give_the_gradient_of_training_forwards(
    engine: PPODiffusersFSDPEngine, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`engine.keep_graph` knows nothing of a family: guided branches are in the graph."""
    spec = attrs.evolve(spec_of(loaded), guidance_scale=loaded.case.guided)
    rollout = EngineRollout(EngineRolloutConfig(batch_size=2), engine=engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "graphs", KeptGraphs(engine.device, None))
        engine.begin_rollout()
        found = rollout.generate(loaded.requests(spec, ["a sign", "blue"]), decode=False)
        trajectory = Trajectory.concat(found)
        batch = TrainBatch(
            trajectory=trajectory,
            advantages=torch.tensor([1.0, -0.5, 0.25, 2.0]),
            weights=torch.ones(4),
            denominator=float(trajectory.step_indices.numel()),
        )
        kept = gradient(engine, batch)
    plain = gradient(engine, batch)
    assert (kept - plain).norm() <= 1e-5 * plain.norm()
    assert plain.norm() > 0.0


def spec_of(loaded: Any) -> SamplingSpec:
    size = loaded.case.size
    return SamplingSpec(
        sigmas=loaded.schedule.values(),
        guidance_scale=1.0,
        height=size.height,
        width=size.width,
        max_sequence_length=size.max_sequence_length,
        num_frames=size.num_frames,
        kind=StepKind.SDE,
        noise_level=0.7,
    )
