"""A training engine on one process and the CPU: the contract of `BaseEngine`, kept in plain torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_core import device as devices
from omni_core.algorithm import ModelFacts
from omni_core.choices import Policy
from omni_core.engine import (
    BaseEngine,
    BatchOutput,
    CheckpointError,
    LossFunction,
    NonFiniteGradientsError,
    OptimizerReport,
    StepPrediction,
    TrainBatch,
    needs_noise,
    needs_reference,
    needs_teacher,
)
from omni_core.metrics import Moments, merge
from omni_core.model import ModelFamily
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    EngineConfig,
    OptimizerConfig,
)
from omni_core.plugins import MODELS, registry
from omni_core.prompt_length import PromptLength
from omni_core.testing.toys import lora
from omni_core.testing.toys.family import ToyDenoiser, ToyFamily
from omni_core.testing.toys.packing import MicroBatch, pack, predict_velocity, score
from omni_core.testing.toys.sampling import replay
from omni_core.testing.toys.tensor_files import INDEX, read_tensors, write_tensors
from omni_core.trajectory import Trajectory

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class ToyEngine(BaseEngine):
    """Trains the toy family, or any family of one expert whose layers are `nn.Linear`."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        engine_config: EngineConfig,
        optimizer_config: OptimizerConfig | None,
        checkpoint_config: CheckpointConfig | None,
    ) -> None:
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.device = devices.resolve("cpu")
        self.family: ModelFamily = _family(model_config)
        self.weight_version = 0
        """Optimizer steps taken."""
        self.nonfinite_steps = 0
        """Steps skipped, in all."""
        self._nonfinite_in_a_row = 0
        self._schedule_steps = 0
        self._optimizer: torch.optim.AdamW | None = None
        self._more_adapters: list[str] = []
        self._teacher: Path | None = None

    def facts(self) -> ModelFacts:
        """Take what the family declares."""
        return ModelFacts.of(self.family, has_adapter=self.has_adapter)

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength] | None:
        """Ask the family."""
        return self.family.prompt_lengths(prompts)

    def initialize(self) -> None:
        """Make the model, its adapter and the optimizer."""
        self.denoiser = self.family.load_denoiser(getattr(torch, self.model_config.dtype.value))
        (self.module,) = self.denoiser.experts.values()
        if isinstance(self.denoiser, ToyDenoiser):
            self.denoiser.transformer.gradient_checkpointing = (
                self.engine_config.gradient_checkpointing
            )
        self._base_hash = _content_hash(self.module)
        config = self.model_config.lora
        if config is not None:
            targets = self.denoiser.lora_targets if config.targets is None else config.targets
            lora.inject(self.module, config, targets)
            for name in ("default", *self._more_adapters):
                self.add_adapter(name)
            for layer in lora.layers(self.module).values():
                layer.active = "default"
            self._read_teacher()
        self.module.eval()
        if self.optimizer_config is not None:
            trained = [parameter for _, parameter in self._trained()]
            self._optimizer = torch.optim.AdamW(
                trained,
                lr=self.optimizer_config.rate(0),
                betas=cast(tuple[float, float], self.optimizer_config.betas),
                eps=self.optimizer_config.eps,
                weight_decay=self.optimizer_config.weight_decay,
                foreach=False,
            )

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    # -- modes -------------------------------------------------------------------------------------

    def train_mode(self) -> AbstractContextManager[None]:
        """Gradients are taken."""
        return self._mode(train=True)

    def eval_mode(self) -> AbstractContextManager[None]:
        """Nothing is recorded."""
        return self._mode(train=False)

    @contextmanager
    def _mode(self, *, train: bool) -> Iterator[None]:
        former = self.module.training
        self.module.train(train)
        try:
            with torch.set_grad_enabled(train):
                yield
        finally:
            self.module.train(former)

    # -- forward and backward ----------------------------------------------------------------------

    def _predict(self, micro_batch: MicroBatch) -> StepPrediction:
        spec, index = micro_batch.spec, micro_batch.index
        velocity = predict_velocity(
            self.denoiser, micro_batch.before, index, micro_batch.conditioning, spec
        )
        return score(micro_batch.before, velocity, micro_batch.after, index, spec)

    def forward_step(
        self, micro_batch: Any, loss_function: LossFunction | None, *, forward_only: bool
    ) -> tuple[Tensor | None, BatchOutput]:
        """Run one `MicroBatch`; the output's log-probs are [M]."""
        with torch.set_grad_enabled(not forward_only):
            current = self._predict(micro_batch)
        log_probs = current.require_log_prob().detach().float()
        if loss_function is None:
            return None, BatchOutput(metrics={}, log_probs=log_probs)
        others: dict[str, StepPrediction] = {}
        asked = {
            Policy.REFERENCE: needs_reference(loss_function),
            Policy.TEACHER: needs_teacher(loss_function),
        }
        for policy in (policy for policy, wanted in asked.items() if wanted):
            with torch.no_grad(), self.use_policy(policy):
                others[policy.value] = self._predict(micro_batch)
        inputs = micro_batch.loss_inputs(
            current, others.get("reference"), noise=needs_noise(loss_function)
        )
        result = loss_function(attrs.evolve(inputs, teacher=others.get("teacher")))
        counts = micro_batch.weights > 0
        # Not a product with 0: the value is finite whatever the term of a row that counts for nothing. Its
        # gradient is 0 times that of the term, so what the row itself holds has to be finite.
        weighed = torch.where(counts, micro_batch.weights * result.terms, 0.0)
        share = weighed.sum() / micro_batch.denominator
        metrics = {name: Moments.of(value, counts) for name, value in result.metrics.items()}
        return share, BatchOutput(metrics=metrics, log_probs=log_probs)

    def forward_backward_batch(
        self,
        data: TrainBatch | TensorDict,
        loss_function: LossFunction | None = None,
        *,
        forward_only: bool = False,
    ) -> BatchOutput:
        """Run all micro-batches; `log_probs` come with `forward_only`."""
        batch = TrainBatch.of(data)
        metrics: list[Mapping[str, Moments]] = []
        log_probs: list[Tensor] = []
        micro_batches = list(pack(batch, self.engine_config.micro_batch_size))
        for left, micro_batch in zip(range(len(micro_batches))[::-1], micro_batches, strict=True):
            with self.syncing_gradients(last=left == 0):
                share, output = self.forward_step(
                    micro_batch, loss_function, forward_only=forward_only
                )
                if share is not None and not forward_only:
                    cast(Any, share).backward()
            metrics.append(output.metrics)
            assert output.log_probs is not None
            log_probs.append(output.log_probs)
        shape = batch.trajectory.step_indices.shape
        return BatchOutput(
            metrics=merge(metrics),
            log_probs=torch.cat(log_probs).reshape(shape) if forward_only and log_probs else None,
        )

    def syncing_gradients(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's forward and backward: for engines of several ranks that derive from this one.

        Args:
            last: Of its batch.
        """
        del last
        return nullcontext()

    def replay(self, trajectory: Trajectory) -> Tensor:
        """Score the rollout's own steps again, batch by batch: float32 [B, W]."""
        with self.eval_mode(), self.use_adapter(trajectory.adapter):
            return replay(self.denoiser, trajectory)

    # -- optimizer ---------------------------------------------------------------------------------

    def _require_optimizer(self) -> tuple[torch.optim.AdamW, OptimizerConfig]:
        if self._optimizer is None or self.optimizer_config is None:
            msg = "this engine was built without an optimizer: it only infers"
            raise ValueError(msg)
        return self._optimizer, self.optimizer_config

    def optimizer_step(self) -> OptimizerReport:
        """Clip and step, unless a gradient is not finite."""
        optimizer, config = self._require_optimizer()
        lr = float(optimizer.param_groups[0]["lr"])
        gradients = [p.grad for _, p in self._trained() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, error_if_nonfinite=False)
        if not math.isfinite(norm):
            self.nonfinite_steps += 1
            self._nonfinite_in_a_row += 1
            if self._nonfinite_in_a_row > config.max_nonfinite_steps:
                msg = (
                    f"{self._nonfinite_in_a_row} optimizer steps in a row had a non-finite gradient; "
                    f"optimizer.max_nonfinite_steps is {config.max_nonfinite_steps}"
                )
                raise NonFiniteGradientsError(msg)
            return OptimizerReport(grad_norm=float(norm), stepped=False, lr=lr)
        self._nonfinite_in_a_row = 0
        if config.max_grad_norm is not None:
            parameters = [p for _, p in self._trained()]
            torch.nn.utils.clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
        optimizer.step()
        self.weight_version += 1
        return OptimizerReport(grad_norm=float(norm), stepped=True, lr=lr)

    def optimizer_zero_grad(self) -> None:
        """Drop gradients."""
        self.module.zero_grad(set_to_none=True)

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one step; returns the new rate."""
        optimizer, config = self._require_optimizer()
        self._schedule_steps += 1
        rate = config.rate(self._schedule_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    # -- ranks -------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        """Always 0."""
        return 0

    def get_data_parallel_size(self) -> int:
        """Always 1."""
        return 1

    def get_data_parallel_group(self) -> None:
        """There is none."""
        return

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Always."""
        return True

    # -- adapters ----------------------------------------------------------------------------------

    def _require_adapter(self) -> None:
        if not self.has_adapter:
            msg = (
                "this engine trains every weight: without model.lora there is no base to go back to"
            )
            raise ValueError(msg)

    def add_adapter(self, name: str) -> None:
        """Make a named adapter beside `default`; it is not trained."""
        self._require_adapter()
        if not hasattr(self, "module"):
            self._more_adapters.append(name)
            return
        lora.add_adapter(self.module, name, seed=self.engine_config.seed)
        if name != "default":
            for tensor in lora.tensors(self.module, name).values():
                tensor.requires_grad_(False)

    def add_teacher(self, name: str, directory: Path) -> None:
        """Ask, before `initialize`, for the one teacher that this engine keeps: what `export_adapter` wrote.

        Raises:
            ValueError: a second one, or every weight is trained.
        """
        self._require_adapter()
        if self._teacher is not None:
            msg = f"the toy engine keeps one teacher; {name!r} ({directory}) is a second one"
            raise ValueError(msg)
        self._teacher = directory

    def _read_teacher(self) -> None:
        if self._teacher is None:
            return
        self.add_adapter("teacher")
        ours = lora.tensors(self.module, "teacher")
        theirs = {
            f"{name.rpartition('.')[0]}.teacher": value
            for name, value in read_tensors(self._teacher).items()
        }
        if theirs.keys() != ours.keys():
            msg = f"{self._teacher}: not an adapter of this model"
            raise ValueError(msg)
        lora.copy_tensors(theirs, ours)

    @contextmanager
    def use_policy(self, policy: Policy) -> Iterator[None]:
        """Run with another policy's weights: the base is the reference, the others are adapters."""
        if policy is Policy.REFERENCE:
            with self.disable_adapter():
                yield
            return
        with self.use_adapter("default" if policy is Policy.CURRENT else policy.value):
            yield

    @contextmanager
    def use_adapter(self, name: str) -> Iterator[None]:
        """Run with a named adapter; `default` is all there is where every weight is trained."""
        if not self.has_adapter and name == "default":
            yield
            return
        self._require_adapter()
        with lora.active(self.module, name):
            yield

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the base model."""
        self._require_adapter()
        with lora.active(self.module, None):
            yield

    def copy_adapter(self, source: str, target: str) -> None:
        """Make *target* equal to *source*."""
        self.ema_update_adapter(source, target, 0.0)

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        """target <- decay * target + (1 - decay) * source."""
        self._require_adapter()
        theirs = lora.tensors(self.module, source).values()
        with torch.no_grad():
            for ours, new in zip(lora.tensors(self.module, target).values(), theirs, strict=True):
                ours.copy_(new if decay == 0.0 else decay * ours + (1.0 - decay) * new)

    # -- checkpoints and weights -------------------------------------------------------------------

    def _checkpointed(self) -> dict[str, Tensor]:
        """Every trained tensor, every adapter, and the optimizer's moments, by name."""
        kept: dict[str, Tensor] = dict(self._trained())
        if self.has_adapter:
            names = {n for layer in lora.layers(self.module).values() for n in layer.lora_A}
            for adapter in sorted(names):
                kept.update(lora.tensors(self.module, adapter))
        found = {f"model.{name}": tensor for name, tensor in kept.items()}
        if self._optimizer is not None:
            for name, parameter in self._trained():
                state = self._optimizer.state[parameter]
                found.update({f"adam.{key}.{name}": state[key] for key in _MOMENTS if state})
        return found

    @property
    def writes_files(self) -> bool:
        """Whether this process writes checkpoints and adapters: one of several does."""
        return True

    def save_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Write `tensors/` below *directory*."""
        tensors = self._checkpointed()
        if self.writes_files:
            write_tensors(directory / "tensors", tensors)
        return {
            "kind": "toy",
            "tensors": len(tensors),
            "base": self._base_hash,
            "weight_version": self.weight_version,
            "schedule_steps": self._schedule_steps,
            "nonfinite_steps": self.nonfinite_steps,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def load_checkpoint(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Restore what `save_checkpoint` wrote; nothing changes unless all of it fits."""
        if state.get("kind") != "toy" or state.get("base") != self._base_hash:
            msg = f"{directory}: not a checkpoint of this toy model (kind or base weights differ)"
            raise CheckpointError(msg)
        tensors = read_tensors(directory / "tensors")
        if len(tensors) != state["tensors"]:
            msg = f"{directory}: {len(tensors)} tensors, {state['tensors']} were saved"
            raise CheckpointError(msg)
        saved = {k: v for k, v in tensors.items() if k.startswith("model.")}
        ours = {k: v for k, v in self._checkpointed().items() if k.startswith("model.")}
        differs = sorted(saved.keys() ^ ours.keys()) or [
            name for name, value in ours.items() if value.shape != saved[name].shape
        ]
        if differs:
            msg = f"{directory}: tensors differ in name or shape: {', '.join(differs)}"
            raise CheckpointError(msg)
        lora.copy_tensors(saved, ours)
        if self._optimizer is not None:
            self._load_optimizer(tensors, int(state["schedule_steps"]))
        self.weight_version = int(state["weight_version"])
        self._schedule_steps = int(state["schedule_steps"])
        self.nonfinite_steps = int(state["nonfinite_steps"])
        self._nonfinite_in_a_row = int(state["nonfinite_in_a_row"])

    def _load_optimizer(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        optimizer, config = self._require_optimizer()
        optimizer.state.clear()
        for name, parameter in self._trained():
            if f"adam.step.{name}" in tensors:
                optimizer.state[parameter] = {
                    key: tensors[f"adam.{key}.{name}"].clone() for key in _MOMENTS
                }
        for group in optimizer.param_groups:
            group["lr"] = config.rate(steps)

    def get_per_tensor_param(
        self, *, adapter: str | None = "default", merged: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield an adapter's tensors, or the weights under the names that they have without LoRA."""
        if adapter is not None and not merged:
            self._require_adapter()
            yield from lora.tensors(self.module, adapter).items()
            return
        added = lora.products(self.module, adapter) if adapter is not None else {}
        for name, parameter in self.module.named_parameters():
            if ".lora_" not in name:
                value = parameter.detach() + added[name] if name in added else parameter
                yield name.replace(".base.", "."), value

    def export_adapter(self, directory: Path, *, adapter: str = "default") -> Path:
        """Write the adapter as .npy files with an index: no stock pipeline knows the toy."""
        self._require_adapter()
        tensors = lora.tensors(self.module, adapter)
        return write_tensors(directory, tensors) if self.writes_files else directory / INDEX

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Everything is on the CPU and stays there.

        Raises:
            ValueError: another device is asked for.
        """
        del model, optimizer, grad
        if torch.device(device) != self.device:
            msg = f"the toy engine runs on {self.device}, not on {device!r}"
            raise ValueError(msg)


def _family(config: DiffusionModelConfig) -> ModelFamily:
    if config.family in (None, "toy"):
        return ToyFamily(config)
    return cast(ModelFamily, registry(MODELS).get(config.family).build(config))


def _content_hash(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
