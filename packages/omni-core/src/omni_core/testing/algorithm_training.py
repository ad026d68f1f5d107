"""An algorithm that trains the toy model: its rollouts, advantages, units and updates, as a trainer makes them.

Letters: B rows, M rows of a micro-batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from omni_core.algorithm import Algorithm
from omni_core.choices import Policy, StepKind
from omni_core.engine import TrainBatch
from omni_core.losses import AlgorithmLoss
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.seeds import derive_seed
from omni_core.testing.samples import requests_for
from omni_core.testing.toys.engine import ToyEngine
from omni_core.testing.toys.forward import ToyForwardEngine
from omni_core.testing.toys.options import ToyEngineConfig, ToyRolloutConfig
from omni_core.testing.toys.rollout import ToyRollout
from omni_core.trajectory import RolloutRequest, SamplingSpec, Trajectory

MODEL = DiffusionModelConfig(
    path="toy",
    family="toy",
    lora=LoRAConfig(rank=4, alpha=8.0),
    pipeline=DiffusionPipelineConfig(height=16, width=12, max_sequence_length=8),
)
GROUP = 4
STEPS = 10


class BuiltLoss(AlgorithmLoss):
    """The loss of an algorithm that is at hand, registered or not."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    @property
    def algorithm(self) -> Algorithm:
        """The one that was given."""
        return self._algorithm


class ToyTraining:
    """One run of an algorithm on one process.

    Args:
        algorithm: Fresh.
        folder: For the teacher of an algorithm that looks at one.
        dtype: Of the model.
        micro_batch_size: M, at most.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        folder: Path,
        *,
        dtype: DType = DType.FLOAT32,
        micro_batch_size: int = 64,
    ) -> None:
        self.algorithm = algorithm
        self.loss = BuiltLoss(algorithm)
        self.model = attrs.evolve(MODEL, dtype=dtype)
        self._micro_batch_size = micro_batch_size
        asked = [prediction.policy for prediction in algorithm.predictions]
        self.engine = self._engine()
        for name in algorithm.adapters[1:]:
            self.engine.add_adapter(name)
        if Policy.TEACHER in asked:
            self.engine.add_teacher("teacher", self._teacher(folder / "teacher"))
        self.engine.initialize()
        self.rollout = ToyRollout(ToyRolloutConfig(batch_size=6), engine=self.engine)
        self.step = 0

    def _engine(self) -> ToyEngine:
        forward = self.algorithm.options.model_type == "diffusion_forward"
        options = ToyEngineConfig(micro_batch_size=self._micro_batch_size)
        training = OptimizerConfig(lr=1e-2, max_grad_norm=None)
        kind = ToyForwardEngine if forward else ToyEngine
        return kind(self.model, options, training, CheckpointConfig())

    def _teacher(self, folder: Path) -> Path:
        """An adapter that is not the student's first one."""
        engine = self._engine()
        engine.initialize()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, tensor in engine.get_per_tensor_param():
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
        engine.export_adapter(folder)
        return folder

    def _requests(self) -> list[RolloutRequest]:
        asked = self.algorithm.options.rollout_algo()
        schedule = self.rollout.schedule(DiffusionSamplingConfig(num_inference_steps=STEPS))
        pipeline = self.model.pipeline
        spec = SamplingSpec(
            sigmas=schedule.values(),
            guidance_scale=1.5,
            height=pipeline.height,
            width=pipeline.width,
            max_sequence_length=pipeline.max_sequence_length,
            kind=StepKind(asked.kind),
            noise_level=asked.noise_level,
        )
        requests = requests_for(
            spec, samples_per_prompt=GROUP, adapter=asked.adapter, step=self.step
        )
        return [
            attrs.evolve(
                request,
                window=self.algorithm.window(
                    schedule, seed=derive_seed("group", self.step, row), iteration=self.step
                ),
            )
            for row, request in enumerate(requests)
        ]

    def batch(self) -> TrainBatch:
        """Sample the step's groups and score them by drawn rewards, one sample of them not at all."""
        trajectory = Trajectory.concat(self.rollout.generate(self._requests()))
        rows = trajectory.rows
        generator = torch.Generator().manual_seed(self.step)
        rewards = torch.rand(rows, generator=generator)
        valid = torch.arange(rows) != self.step % rows
        groups = [record.group_id for record in trajectory.records]
        found = self.algorithm.advantages(rewards, groups, valid).advantages
        units = torch.full((rows,), -1)
        for place, unit in enumerate(self.algorithm.units(found, groups, valid)):
            units[list(unit)] = place
        weights = (units >= 0).float()
        return TrainBatch(
            trajectory=trajectory,
            advantages=found.float(),
            weights=weights,
            denominator=float(weights.sum()) * self._trained_steps(trajectory),
            units=units if self.algorithm.forward_needs is not None else None,
        )

    def _trained_steps(self, trajectory: Trajectory) -> int:
        needs = self.algorithm.forward_needs
        if needs is None:
            return int(trajectory.step_indices.shape[1])
        return needs.draws_of(trajectory.effective.schedule())

    def update(self) -> None:
        """Train on one rollout, with what the algorithm does afterwards."""
        before = self.engine.weight_version
        self.engine.train_batch(self.batch(), self.loss)
        taken = self.engine.weight_version
        if taken > before:
            self.algorithm.after_update(self.engine, optimizer_step=taken)
            self.algorithm.after_rollout(self.engine, optimizer_step=taken)
        self.step += 1

    def gradients(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Gradients of every trained tensor, by name, before any clipping."""
        self.engine.optimizer_zero_grad()
        with self.engine.train_mode():
            self.engine.forward_backward_batch(batch, self.loss)
        return {
            name: parameter.grad.clone()
            for name, parameter in self.engine.module.named_parameters()
            if parameter.grad is not None
        }

    def tensors(self) -> dict[str, Tensor]:
        """Copy every tensor of the model, adapters included."""
        return {name: value.clone() for name, value in self.engine.module.state_dict().items()}

    def save(self, directory: Path) -> dict[str, Any]:
        """Write a checkpoint; returns the plain data of engine and algorithm."""
        state = self.engine.save_checkpoint(directory)
        return {"engine": state, "algorithm": self.algorithm.state(), "step": self.step}

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote."""
        self.engine.load_checkpoint(directory, state["engine"])
        self.algorithm.load_state(state["algorithm"])
        self.step = state["step"]
