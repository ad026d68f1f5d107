"""What a training backend must do: one model, its optimizer, and the parallelism they live under.

Axes: B rows (samples), W trained steps of a row, M packed (sample, step) rows of a micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from omni_core.metrics import Moments
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionSamplingConfig,
    EngineConfig,
    OptimizerConfig,
)
from omni_core.prompt_length import PromptLength
from omni_core.records import TensorRecord
from omni_core.reverse_step import Latents, ReverseStep
from omni_core.trajectory import Trajectory

if TYPE_CHECKING:
    from omni_core.algorithm import ModelFacts


@attrs.frozen(kw_only=True, eq=False)
class TrainBatch(TensorRecord):
    """One rank's rows of one optimizer step."""

    trajectory: Trajectory
    """B rows."""
    advantages: Tensor
    """float32 [B]."""
    weights: Tensor
    """float32 [B]: 1 for a row that counts, 0 for an unscored or a dummy row."""
    denominator: float
    """Trained (sample, step) pairs of the whole optimizer step on all ranks: the loss is the sum of its
    terms over all ranks divided by this, however the batch is cut."""
    units: Tensor | None = None
    """int64 [B]: rows of equal number are one of the algorithm's units (`Algorithm.units`), which no
    micro-batch cuts; None makes each row a unit of its own."""
    update: int = 0
    """Optimizer steps that this rollout took before: each has draws of its own."""
    teachers: Tensor | None = None
    """int64 [B]: place of each row's teacher among those that the engine was given (`add_teacher`); None
    where there is one for all rows, or none."""
    step_weights: Tensor | None = None
    """float32 [B, W]: what the steps of a row count (rollout correction); None counts each as 1. A step
    of weight 0 stays in the denominator."""

    def select(self, rows: Tensor) -> TrainBatch:
        """Take rows; the denominator stays."""
        taken: dict[str, Any] = {name: value[rows] for name, value in self._per_row().items()}
        return attrs.evolve(self, trajectory=self.trajectory.select(rows), **taken)

    def _per_row(self) -> dict[str, Tensor]:
        names = ("advantages", "weights", "units", "teachers", "step_weights")
        given = ((name, getattr(self, name)) for name in names)
        return {name: value for name, value in given if value is not None}

    def to_tensordict(self) -> TensorDict:
        """Lay the per-row tensors out as a TensorDict of batch size B, the rest as non-tensor data."""
        return TensorDict(
            {
                "latents": TensorDict(
                    dict(self.trajectory.latents), batch_size=[self.trajectory.rows]
                ),
                "step_indices": self.trajectory.step_indices,
                "log_probs": self.trajectory.log_probs,
                **self._per_row(),
                "rest": NonTensorData(
                    (attrs.evolve(self.trajectory, latents={}), self.denominator, self.update),
                    batch_size=[self.trajectory.rows],
                ),
            },
            batch_size=[self.trajectory.rows],
        )

    @classmethod
    def of(cls, data: TrainBatch | TensorDict) -> TrainBatch:
        """Take a batch as it is, or as `to_tensordict` laid it out.

        Raises:
            ValueError: rows of the TensorDict were selected: select from the batch instead, which also
                selects what is no tensor.
        """
        if isinstance(data, TrainBatch):
            return data
        rest: tuple[Trajectory, float, int] = data.get("rest").data
        trajectory, denominator, update = rest
        if data.batch_size[0] != trajectory.rows:
            msg = (
                f"a TensorDict of {data.batch_size[0]} rows came from a batch of {trajectory.rows}: "
                "use TrainBatch.select before to_tensordict"
            )
            raise ValueError(msg)
        return cls(
            trajectory=attrs.evolve(
                trajectory,
                latents=dict(data["latents"].items()),
                step_indices=data["step_indices"],
                log_probs=data["log_probs"],
            ),
            advantages=data["advantages"],
            weights=data["weights"],
            denominator=denominator,
            units=data.get("units", None),
            update=update,
            teachers=data.get("teachers", None),
            step_weights=data.get("step_weights", None),
        )


@attrs.frozen(kw_only=True, eq=False)
class StepPrediction(ReverseStep):
    """What a policy makes of M (sample, step) rows: the reverse step that the rollout took."""

    velocity: Latents
    """modality -> [M, ...]."""


@attrs.frozen(kw_only=True, eq=False)
class LossInputs:
    """All that a loss may look at: M packed (sample, step) rows of one micro-batch."""

    current: StepPrediction
    """Of the policy being trained, with its graph."""
    reference: StepPrediction | None = None
    """Of the frozen reference, where the loss asked for it (see `needs_reference`)."""
    teacher: StepPrediction | None = None
    """Of the row's own teacher, where the loss asked for it (see `needs_teacher`)."""
    teacher_place: int = 0
    """Whose that is: the place among the engine's teachers; all rows of a micro-batch have the same."""
    noise: Latents | None = None
    """modality -> [M, ...]: what the rollout drew these steps with, where the loss asked for it (see
    `needs_noise`)."""
    old_log_probs: Tensor
    """[M], of the policy that sampled."""
    advantages: Tensor
    """[M]."""
    weights: Tensor
    """[M]: 0 for rows that count for nothing; losses leave them to the engine."""
    dt: Tensor
    """[M], negative: sigma' - sigma."""


@attrs.frozen(kw_only=True, eq=False)
class LossTerms:
    """What a loss returns: one term a row. The engine weighs, adds and divides."""

    terms: Tensor
    """[M], with graph. The objective is sum(weights * terms) / denominator, to be minimised."""
    metrics: Mapping[str, Tensor] = attrs.field(factory=dict)
    """Name -> [M] values without graph, averaged over the rows that count."""


LossFunction = Callable[[Any], LossTerms]
"""Any callable: of `LossInputs` for engines of model type diffusion, of
`forward_process.ForwardLossInputs` for diffusion_forward. One that looks at the reference says so by an
attribute `needs_reference = True`, as `omni_core.losses.ConfiguredLoss` does; likewise `needs_teacher`
and `needs_noise`."""


def needs_reference(loss: LossFunction | None) -> bool:
    """Whether an engine has to fill `LossInputs.reference` for *loss* (one more forward, no graph)."""
    return bool(getattr(loss, "needs_reference", False))


def needs_teacher(loss: LossFunction | None) -> bool:
    """Whether an engine has to fill `LossInputs.teacher` for *loss* (one more forward, no graph)."""
    return bool(getattr(loss, "needs_teacher", False))


def needs_noise(loss: LossFunction | None) -> bool:
    """Whether an engine has to fill `LossInputs.noise` for *loss* (from the samples' seeds)."""
    return bool(getattr(loss, "needs_noise", False))


@attrs.frozen(kw_only=True, eq=False)
class BatchOutput:
    """What one batch gave."""

    metrics: Mapping[str, Moments]
    """Of this rank's rows."""
    log_probs: Tensor | None = None
    """float32 [B, W] on the CPU, from `infer_batch`."""


@attrs.frozen(kw_only=True)
class OptimizerReport:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm before clipping; not finite when the step was skipped."""
    stepped: bool
    """False if a gradient on any rank was not finite: then no rank stepped."""
    lr: float
    """The rate that the step used (or would have used)."""


class NonFiniteGradientsError(RuntimeError):
    """Too many optimizer steps in a row had a non-finite gradient."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, or of another kind of run."""


class BaseEngine(ABC):
    """A training backend. Built as `Engine(model_config, engine_config, optimizer_config, checkpoint_config)`.

    One optimizer step, as `train_batch` does it::

        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, loss_function)
            report = engine.optimizer_step()
            engine.lr_scheduler_step()

    With more than one rank every method that runs the model is a collective: all ranks call it, in the
    same order.
    """

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        engine_config: EngineConfig,
        optimizer_config: OptimizerConfig | None,
        checkpoint_config: CheckpointConfig | None,
    ) -> None:
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.loss_function: LossFunction | None = None

    def set_loss_fn(self, loss_function: LossFunction) -> None:
        """Set the loss that `train_batch` and `infer_batch` use when none is passed."""
        self.loss_function = loss_function

    def facts(self) -> ModelFacts | None:
        """Say what `Algorithm.unsupported` may look at, before `initialize` and without loading weights.

        None, the default, is an engine that cannot tell: every algorithm is then tried.

        Raises:
            ValueError, FileNotFoundError: there is no such model.
        """
        return None

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Return the keywords with which the model's stock pipeline draws what a sampling config means."""
        return self.model_config.pipeline.stock_call(sampling)

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength] | None:
        """Count each prompt's tokens as the model's encoder does, before it cuts; also before `initialize`.

        None, the default, is an engine that cannot tell.

        Raises:
            ValueError, FileNotFoundError: there is no such model.
        """
        del prompts
        return None

    @abstractmethod
    def initialize(self) -> None:
        """Load, adapt and shard the model; make the optimizer (unless its config is None).

        Raises:
            ValueError: the model or the configuration does not fit; says what would.
        """

    def add_adapter(self, name: str) -> None:
        """Ask, before `initialize`, for another named adapter: frozen, and equal to `default` at first.

        Raises:
            ValueError: this engine keeps none beside the trained one, or not this one.
        """
        msg = f"{type(self).__name__} keeps no named adapters: {name!r} was asked for"
        raise ValueError(msg)

    def add_teacher(self, name: str, directory: Path) -> None:
        """Ask, before `initialize`, for a frozen adapter that others trained, which a loss may look at.

        Args:
            name: What messages call it.
            directory: An adapter as `export_adapter` writes it.

        Raises:
            ValueError: this engine keeps no teacher, or not this one.
        """
        msg = f"{type(self).__name__} keeps no teacher: {name!r} ({directory}) was asked for"
        raise ValueError(msg)

    def begin_rollout(self) -> None:
        """Say that what is sampled with this engine from now on is what the next update trains on."""

    def end_rollout(self) -> None:
        """Say that the rollout's update is done, or that there will be none."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling since the process began: warm-up that steps should not be judged by."""
        return 0.0

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Enter the state in which gradients are taken; restores the former state on leaving."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Enter the state in which the model only predicts."""

    @abstractmethod
    def forward_step(
        self, micro_batch: Any, loss_function: LossFunction | None, *, forward_only: bool
    ) -> tuple[Tensor | None, BatchOutput]:
        """Run one micro-batch: the objective's share (None without a loss) and what it gave."""

    @abstractmethod
    def forward_backward_batch(
        self,
        data: TrainBatch | TensorDict,
        loss_function: LossFunction | None = None,
        *,
        forward_only: bool = False,
    ) -> BatchOutput:
        """Run all micro-batches of a batch, gradients accumulated and synced once at the end."""

    def train_batch(
        self, data: TrainBatch | TensorDict, loss_function: LossFunction | None = None
    ) -> BatchOutput:
        """Take one optimizer step on *data*.

        Returns:
            Metrics of this rank, with `grad_norm`, `lr` and `skipped` of the step.

        Raises:
            ValueError: no loss function was set or passed.
            NonFiniteGradientsError: too many steps in a row were skipped.
        """
        loss = loss_function or self.loss_function
        if loss is None:
            msg = "train_batch needs a loss: call set_loss_fn first or pass loss_function"
            raise ValueError(msg)
        with self.train_mode():
            self.optimizer_zero_grad()
            output = self.forward_backward_batch(data, loss)
            report = self.optimizer_step()
            if report.stepped:
                self.lr_scheduler_step()
        said = {"lr": report.lr, "skipped": float(not report.stepped)}
        if report.stepped:
            said["grad_norm"] = report.grad_norm
        extra = {
            name: Moments.of(torch.tensor([value], dtype=torch.float64))
            for name, value in said.items()
        }
        return attrs.evolve(output, metrics={**output.metrics, **extra})

    def infer_batch(
        self, data: TrainBatch | TensorDict, loss_function: LossFunction | None = None
    ) -> BatchOutput:
        """Run forward only, through the same micro-batches as training: log-probs, and a loss if given."""
        with self.eval_mode():
            return self.forward_backward_batch(data, loss_function, forward_only=True)

    @abstractmethod
    def replay(self, trajectory: Trajectory) -> Tensor:
        """Score a rollout's own steps again in its own batch composition and shapes.

        Args:
            trajectory: Rows that together fill whole batches (`Trajectory.places`).

        Returns:
            float32 [B, W] log-probs on the CPU: bit-equal to `trajectory.log_probs` while the weights
            are those that sampled, on the same machine, threads and dtype.

        Raises:
            ValueError: rows of a batch are missing.
        """

    @abstractmethod
    def optimizer_step(self) -> OptimizerReport:
        """Clip and step, unless a gradient of any rank is not finite.

        Raises:
            NonFiniteGradientsError: too many steps in a row were skipped.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop gradients."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one optimizer step; returns the new rate."""

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """This process's place among those that hold different rows."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """How many processes hold different rows."""

    @abstractmethod
    def get_data_parallel_group(self) -> Any:
        """The process group of those processes (None if there is one)."""

    @abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are the ones to collect (the first of a model-parallel group)."""

    @abstractmethod
    def save_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Write every trained tensor, the optimizer, adapters and EMA as safetensors below *directory*.

        All ranks call it. Returns plain data (JSON) that the driver keeps in state.json and hands to
        `load_checkpoint`: schedules, counts, generator states.
        """

    @abstractmethod
    def load_checkpoint(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Restore what `save_checkpoint` wrote and returned.

        Raises:
            CheckpointError: incomplete, or of another model, adapter or kind; says why.
        """

    @abstractmethod
    def get_per_tensor_param(
        self, *, adapter: str | None = "default", merged: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole (unsharded) tensors, one at a time.

        Args:
            adapter: A named policy's own: with LoRA its adapter alone, else all weights. None is all
                weights but the adapters.
            merged: All weights of that policy, its adapter added in.
        """

    @abstractmethod
    def export_adapter(self, directory: Path, *, adapter: str = "default") -> Path:
        """Write a LoRA that stock diffusers (`load_lora_weights`) and PEFT load with the right scale.

        All ranks call it; the first writes. Returns the file.
        """

    def export_pipeline(self, directory: Path, *, adapter: str = "default") -> Path:
        """Write a policy as a whole pipeline directory that stock diffusers loads, a LoRA merged.

        All ranks call it; the first writes. Returns the directory.

        Raises:
            ValueError: this engine writes no pipelines, or not this one.
        """
        msg = f"{type(self).__name__} writes no pipelines ({adapter!r} to {directory})"
        raise ValueError(msg)

    @abstractmethod
    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move parts to `cpu` or back to the engine's own `device`."""

    @abstractmethod
    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model; leaves every parameter's requires_grad as it was, also by an exception."""

    def use_reference(self) -> AbstractContextManager[None]:
        """Predict with the reference policy: the base model, unless an engine keeps another one."""
        return self.disable_adapter()

    @property
    def has_adapter(self) -> bool:
        """Whether a LoRA is trained."""
        return self.model_config.lora is not None
