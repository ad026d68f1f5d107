"""Compiled blocks are the same function: sampled, replayed, trained, with LoRA, CFG and checkpointing.

The backend is `aot_eager`, which captures and differentiates as `inductor` does and generates no code.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from omni_core.options import DType, EMAConfig
from omni_core.testing.samples import requests_for
from omni_core.trajectory import Trajectory
from omni_engine_fsdp import EngineRollout, EngineRolloutConfig
from omni_engine_fsdp.compilation import Compiled, compile_blocks

pytestmark = [
    # Dynamo asks every tensor for its gradient and hides the warning, unless warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.timeout(180),
]

COMPILED = {"compile": True, "compile_backend": "aot_eager"}


@pytest.fixture(scope="module")
def engine(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> Any:
    """Compiled and checkpointed, with weights that make every gradient count."""
    built = build_engine(tiny_sd3, optimizer=ranks.LR, gradient_checkpointing=True, **COMPILED)
    ranks.warm(built)
    return built


@pytest.fixture(scope="module")
def plain(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> Any:
    """The same without."""
    built = build_engine(tiny_sd3, optimizer=ranks.LR)
    ranks.warm(built)
    return built


@pytest.fixture(scope="module")
def sampled(engine: Any, ranks: ModuleType) -> Trajectory:
    """Rows of the compiled engine, with guidance (two branches in one batch)."""
    rollout = EngineRollout(EngineRolloutConfig(batch_size=3), engine=engine)
    return Trajectory.concat(rollout.generate(requests_for(ranks.SPEC, samples_per_prompt=3)))


def test_a_replay_runs_the_compiled_function_that_sampled(engine: Any, sampled: Trajectory) -> None:
    assert torch.equal(engine.replay(sampled), sampled.log_probs)


def test_gradients_are_those_of_the_plain_engine(
    engine: Any, plain: Any, ranks: ModuleType
) -> None:
    ours, theirs = (ranks.gradients(each, ranks.rows([0, 1, 2])) for each in (engine, plain))
    apart = sum(float((ours[name] - value).square().sum()) for name, value in theirs.items())
    size = sum(float(value.square().sum()) for value in theirs.values())
    assert size > 0.0
    assert (apart / size) ** 0.5 <= 1e-6


def test_predictions_stand_in_for_training_bit_for_bit(engine: Any, ranks: ModuleType) -> None:
    """Old log-probs and the canary's floor come from the graph that training differentiates."""
    seen = []

    def loss(inputs: Any) -> Any:
        seen.append(inputs.current.require_log_prob())
        return ranks.loss(inputs)

    batch = ranks.rows([0, 1, 2])
    predicted = engine.infer_batch(batch).log_probs
    graphs = Compiled.so_far().graphs
    ranks.gradients(engine, batch, loss)
    assert all(value.requires_grad for value in seen)
    assert torch.equal(torch.cat(seen).detach(), predicted.flatten())
    # Training may look at another mode of a module, never at graphs without end.
    assert Compiled.so_far().graphs - graphs <= 4


def test_the_reference_is_another_function_and_comes_back(engine: Any, ranks: ModuleType) -> None:
    batch = ranks.rows([0, 1])
    before = engine.infer_batch(batch).log_probs
    with engine.disable_adapter():
        assert not torch.equal(engine.infer_batch(batch).log_probs, before)
    assert torch.equal(engine.infer_batch(batch).log_probs, before)


def test_every_weight_is_trained_against_its_reference_and_averaged(
    ranks: ModuleType, tiny_sd3: Path
) -> None:
    """The copies are compiled like the trained weights, and train what plain ones train (float64)."""
    optimizer = attrs.evolve(ranks.LR, ema=EMAConfig(decay=0.5))
    found = []
    for options in (COMPILED, {}):
        built = ranks.build(
            tiny_sd3, dtype=DType.FLOAT64, lora=None, optimizer=optimizer, **options
        )
        for _ in range(2):
            built.train_batch(ranks.rows([0, 1, 2]), ranks.KLLoss())
        found.append({policy: ranks.weights(built, policy) for policy in ("default", "ema")})
    compiled, plain = found
    for policy, expected in plain.items():
        for name, value in expected.items():
            torch.testing.assert_close(compiled[policy][name], value, rtol=0.0, atol=1e-10)


def test_warm_up_is_counted_apart(engine: Any, plain: Any, sampled: Trajectory) -> None:
    spent = engine.compile_seconds
    assert spent > 0.0
    engine.replay(sampled)
    assert engine.compile_seconds == spent
    assert plain.compile_seconds == 0.0


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.compile_backend: no backend 'gcc'; there are: "):
        compile_blocks([], backend="gcc")
