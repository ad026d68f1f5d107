"""A model, its optimizer and nothing else: what every trainer steps, whatever it trains."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from tensordict import TensorDict

from omni_core import device as devices
from omni_core import resources
from omni_core.algorithm import AdapterOperations
from omni_core.engine import BaseEngine, BatchOutput, LossFunction, TrainBatch
from omni_core.metrics import merge
from omni_core.options import CheckpointConfig, DiffusionModelConfig, EngineConfig, OptimizerConfig
from omni_core.plugins import EngineRegistry


@attrs.frozen(kw_only=True)
class TrainingWorkerConfig:
    """What a training worker is built from."""

    model: DiffusionModelConfig
    engine: EngineConfig
    optimizer: OptimizerConfig | None = attrs.field(factory=OptimizerConfig)
    """None only infers."""
    checkpoint: CheckpointConfig = attrs.field(factory=CheckpointConfig)
    model_type: str = "diffusion"
    backend: str = "fsdp2"
    """With `model_type` the name of the engine's plugin."""
    device: str = "auto"
    adapters: tuple[str, ...] = ("default",)
    """Named policy adapters; all start equal to the first, which is trained."""
    teachers: tuple[tuple[str, str], ...] = ()
    """(name, directory) of each frozen adapter that others trained."""


class TrainingWorker:
    """Owns one engine.

    >>> worker = TrainingWorker(config)
    >>> worker.reset()
    >>> worker.set_loss_fn(ConfiguredLoss(loss_config))
    >>> worker.train_batch(batch)
    """

    def __init__(self, config: TrainingWorkerConfig, *, local_rank: int = 0) -> None:
        self.config = config
        self.device = devices.resolve(config.device, local_rank=local_rank)
        self.optimizer_steps = 0
        """Steps asked for, skipped ones included."""
        self._engine: BaseEngine | None = None
        self._loss: LossFunction | None = None

    @property
    def engine(self) -> BaseEngine:
        """The engine, once `reset` has made it."""
        if self._engine is None:
            msg = "the worker holds no model yet: call reset first"
            raise RuntimeError(msg)
        return self._engine

    @property
    def weight_version(self) -> int:
        """Optimizer steps that changed the weights, as the engine counts them."""
        return int(getattr(self.engine, "weight_version", self.optimizer_steps))

    def reset(self, check: Callable[[BaseEngine], None] | None = None) -> None:
        """Build and load the model and the optimizer anew.

        Args:
            check: Sees the engine before anything is loaded; what it raises ends the reset.
        """
        config = self.config
        engine: BaseEngine = EngineRegistry.new(
            config.model_type,
            config.backend,
            self.device.type,
            model_config=config.model,
            engine_config=config.engine,
            optimizer_config=config.optimizer,
            checkpoint_config=config.checkpoint,
        )
        if check is not None:
            check(engine)
        for name in config.adapters[1:]:
            engine.add_adapter(name)
        for name, path in config.teachers:
            engine.add_teacher(name, resources.resolve(path))
        engine.initialize()
        if self._loss is not None:
            engine.set_loss_fn(self._loss)
        self._engine = engine
        self.optimizer_steps = 0

    def close(self) -> None:
        """Let the model and its optimizer go; `reset` makes them anew."""
        self._engine = None

    def set_loss_fn(self, loss_function: LossFunction) -> None:
        """Set the loss of `train_batch`, kept over a `reset`."""
        self._loss = loss_function
        if self._engine is not None:
            self._engine.set_loss_fn(loss_function)

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move parts of the engine to `cpu` or back to its own `device`."""
        self.engine.to(device, model=model, optimizer=optimizer, grad=grad)

    # -- batches -----------------------------------------------------------------------------------

    def train_batch(
        self, data: TrainBatch | TensorDict, loss_function: LossFunction | None = None
    ) -> BatchOutput:
        """Take one optimizer step on all rows of *data*."""
        output = self.engine.train_batch(data, loss_function)
        self.optimizer_steps += 1
        return output

    def train_mini_batch(
        self,
        data: TrainBatch | TensorDict,
        *,
        mini_batches: int,
        loss_function: LossFunction | None = None,
    ) -> BatchOutput:
        """Cut *data* into equal parts, in order, and take an optimizer step on each.

        Args:
            data: B rows; its denominator is that of the whole, so a part's is a share of it.
            mini_batches: Parts; divides B.
            loss_function: None takes the one that was set.

        Raises:
            ValueError: *mini_batches* does not divide the rows; says what would.
        """
        batch = TrainBatch.of(data)
        outputs = [
            self.train_batch(part, loss_function) for part in _equal_parts(batch, mini_batches)
        ]
        return attrs.evolve(outputs[-1], metrics=merge(output.metrics for output in outputs))

    def infer_batch(
        self, data: TrainBatch | TensorDict, loss_function: LossFunction | None = None
    ) -> BatchOutput:
        """Run forward only, through the micro-batches of training."""
        return self.engine.infer_batch(data, loss_function)

    # -- adapters ----------------------------------------------------------------------------------

    def copy_adapter(self, source: str, target: str) -> None:
        """Make the adapter *target* equal to *source*."""
        self._adapters().copy_adapter(source, target)

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        """target <- decay * target + (1 - decay) * source."""
        self._adapters().ema_update_adapter(source, target, decay)

    def _adapters(self) -> AdapterOperations:
        engine = self.engine
        if not hasattr(engine, "copy_adapter") or not hasattr(engine, "ema_update_adapter"):
            msg = f"{type(engine).__name__} keeps no named adapters (it has no copy_adapter)"
            raise TypeError(msg)
        return cast(AdapterOperations, engine)

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Write tensors below *directory* (all ranks call it); returns plain data for the driver."""
        return {
            "engine": self.engine.save_checkpoint(directory),
            "optimizer_steps": self.optimizer_steps,
            "generators": {
                kind: base64.b64encode(bytes(state.tolist())).decode()
                for kind, state in devices.rng_state(self.device).items()
            },
        }

    def load_checkpoint(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Restore what `save_checkpoint` wrote and returned."""
        self.engine.load_checkpoint(directory, state["engine"])
        self.optimizer_steps = int(state["optimizer_steps"])
        devices.set_rng_state(
            {
                kind: torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
                for kind, text in state["generators"].items()
            }
        )


def _equal_parts(batch: TrainBatch, count: int) -> Iterator[TrainBatch]:
    rows = batch.trajectory.rows
    if rows % count:
        fits = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        msg = f"{rows} rows do not divide into {count} mini-batches; {fits} would"
        raise ValueError(msg)
    size = rows // count
    for start in range(0, rows, size):
        part = batch.select(torch.arange(start, start + size))
        yield attrs.evolve(part, denominator=batch.denominator / count)
