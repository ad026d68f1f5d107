"""The toy engine of the forward process keeps its contract, and a teacher is an adapter of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch

from omni_core.choices import StepKind
from omni_core.engine import BaseEngine
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionSamplingConfig,
    DType,
    OptimizerConfig,
)
from omni_core.testing import ForwardEngineSuite
from omni_core.testing.algorithm_training import MODEL
from omni_core.testing.toys import (
    ToyEngine,
    ToyEngineConfig,
    ToyFamily,
    ToyForwardEngine,
    ToyRollout,
    ToyRolloutConfig,
)
from omni_core.trajectory import SamplingSpec


def make_engine(
    model: DiffusionModelConfig,
    *,
    micro_batch_size: int = 8,
    optimizer: OptimizerConfig | None = None,
    gradient_checkpointing: bool = False,
) -> ToyForwardEngine:
    options = ToyEngineConfig(
        micro_batch_size=micro_batch_size, gradient_checkpointing=gradient_checkpointing
    )
    engine = ToyForwardEngine(model, options, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


class TestToyForwardEngine(ForwardEngineSuite):
    model = MODEL

    @pytest.fixture
    def make_engine(self) -> Callable[..., BaseEngine]:
        return functools.partial(make_engine, self.model)

    @pytest.fixture
    def make_rollout(self) -> Callable[[ToyEngine], ToyRollout]:
        return lambda engine: ToyRollout(ToyRolloutConfig(batch_size=4), engine=engine)

    @pytest.fixture
    def sampling(self) -> SamplingSpec:
        schedule = ToyFamily(MODEL).schedule(DiffusionSamplingConfig(num_inference_steps=5))
        size = {"height": 16, "width": 12, "max_sequence_length": 8}
        return SamplingSpec(
            sigmas=schedule.values(), guidance_scale=1.5, kind=StepKind.SDE, noise_level=0.7, **size
        )


class TestToyForwardEngineInFloat64(TestToyForwardEngine):
    model = attrs.evolve(MODEL, dtype=DType.FLOAT64)
    gradient_bound = 1e-12


def test_one_teacher_is_kept_and_read_whole(tmp_path: Path) -> None:
    engine = ToyEngine(MODEL, ToyEngineConfig(), None, None)
    engine.initialize()
    with torch.no_grad():
        for _, tensor in engine.get_per_tensor_param():
            tensor.add_(1.0)
    engine.export_adapter(tmp_path / "teacher")

    student = ToyEngine(MODEL, ToyEngineConfig(), None, None)
    student.add_teacher("one", tmp_path / "teacher")
    with pytest.raises(ValueError, match="keeps one teacher; 'two'"):
        student.add_teacher("two", tmp_path / "teacher")
    student.initialize()
    found = [tensor for _, tensor in student.get_per_tensor_param(adapter="teacher")]
    expected = [tensor for _, tensor in engine.get_per_tensor_param()]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert not any(tensor.requires_grad for tensor in found)
