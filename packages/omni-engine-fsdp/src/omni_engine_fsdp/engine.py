"""What every diffusers engine on FSDP2 shares: loading, LoRA, sharding, modes, optimizer, checkpoints.

A subclass says how a batch becomes forwards and gradients. Parameters are always reached through
`parameters`, the sharded ones: modules hold gathered copies between a forward and the next backward.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW

from omni_core import device as devices
from omni_core.algorithm import ModelFacts
from omni_core.engine import BaseEngine, NonFiniteGradientsError, OptimizerReport
from omni_core.model import Denoiser, ModelFamily
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionSamplingConfig,
    OptimizerConfig,
)
from omni_core.prompt_length import PromptLength
from omni_core.seeds import derive_seed
from omni_engine_fsdp import checkpoint, compilation, export, lora, precision, sharding, teachers
from omni_engine_fsdp.branch_parallel import BranchParallelDenoiser
from omni_engine_fsdp.frozen_parts import frozen_parts
from omni_engine_fsdp.kept_graphs import KeptGraphs
from omni_engine_fsdp.lora import DEFAULT, LoRAAdapterMixin
from omni_engine_fsdp.model_index import find_family
from omni_engine_fsdp.optimizer import build_optimizer, clip_gradients
from omni_engine_fsdp.options import FSDPEngineConfig, ShardTrained
from omni_engine_fsdp.rank_mesh import CFG, DP, ULYSSES, RankMesh
from omni_engine_fsdp.sequence_parallel import split_sequences

log = structlog.get_logger()


class DiffusersFSDPEngine(LoRAAdapterMixin, BaseEngine):
    """A diffusers denoiser with LoRA (or all weights trained) under `fully_shard`."""

    engine_config: FSDPEngineConfig
    family: ModelFamily
    denoiser: Denoiser
    """Over the sharded, adapted modules."""
    device: torch.device
    mesh: RankMesh
    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    units: Mapping[str, Sequence[FSDPModule]]
    """Expert -> its FSDP units, the root first."""
    optimizer: AdamW | None
    weight_version: int
    """Optimizer steps taken; kept by checkpoints, so that it only grows."""

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: OptimizerConfig | None,
        checkpoint_config: CheckpointConfig | None,
    ) -> None:
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.parameters = {}
        self.layers = ()
        self.optimizer = None
        self.schedule_steps = 0
        """How far the learning rate's schedule is."""
        self.weight_version = 0
        self.nonfinite_steps = 0
        """Updates skipped for a non-finite gradient since the last one that was taken."""
        self._more_adapters: list[str] = []
        self._teachers: dict[str, Path] = {}
        self.graphs: KeptGraphs | None = None
        """What `engine.keep_graph` keeps of sampling."""
        self.teachers: dict[str, str] = {}
        """Name -> content hash of the frozen adapters that others trained, in the order of `add_teacher`."""

    # -- making -----------------------------------------------------------------------------------

    def add_adapter(self, name: str) -> None:
        """Ask for another named adapter, frozen and equal to `default` at first.

        Raises:
            RuntimeError: the model is initialised: adapters are sharded together with it.
            ValueError: the name is taken or holds a dot, or the model trains without LoRA.
        """
        if self.parameters:
            msg = f"add_adapter({name!r}): adapters are added before initialize, which shards them"
            raise RuntimeError(msg)
        if self.model_config.lora is None:
            msg = f"add_adapter({name!r}): model.lora is null, every weight is trained"
            raise ValueError(msg)
        if name in (DEFAULT, *self._more_adapters) or not name or "." in name:
            msg = f"add_adapter({name!r}): taken, empty or with a dot"
            raise ValueError(msg)
        self._more_adapters.append(name)

    def add_teacher(self, name: str, directory: Path) -> None:
        """Ask for a frozen adapter that others trained: `initialize` reads it, whole or not at all.

        Raises:
            RuntimeError: the model is initialised: adapters are sharded together with it.
            ValueError: the name is taken, empty or holds a dot, or the model trains without LoRA.
        """
        if self.parameters:
            msg = f"add_teacher({name!r}): teachers are added before initialize, which shards them"
            raise RuntimeError(msg)
        if self.model_config.lora is None:
            msg = f"add_teacher({name!r}): model.lora is null, every weight is trained"
            raise ValueError(msg)
        if name in self._teachers or not name or "." in name:
            msg = f"add_teacher({name!r}): taken, empty or with a dot"
            raise ValueError(msg)
        self._teachers[name] = directory

    def facts(self) -> ModelFacts:
        """Take what the family of the pipeline declares."""
        return ModelFacts.of(self._asked_family, has_adapter=self.has_adapter)

    def prompt_lengths(self, prompts: Sequence[str]) -> list[PromptLength] | None:
        """Ask the family of the pipeline, which reads its tokenizer alone."""
        return self._asked_family.prompt_lengths(prompts)

    @cached_property
    def _asked_family(self) -> ModelFamily:
        return find_family(self.model_config)

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Ask the family; see `ModelFamily.stock_call`."""
        return self.family.stock_call(sampling)

    def initialize(self) -> None:
        """Load, adapt and shard every expert; make the optimizer unless its config is None.

        Raises:
            ValueError: a LoRA target matches nothing, a config does not fit the model, or a teacher is of
                another base, family, rank, scale or set of targets.
            FileNotFoundError: a teacher is not where it should be.
        """
        config = self.model_config
        self.device = devices.resolve(self.engine_config.device, local_rank=sharding.local_rank())
        sharding.ensure_process_group(self.device)
        self.mesh = RankMesh.of(self.engine_config, self.device)
        self.family = self._asked_family
        frozen = config.lora is not None
        stored = precision.compute_dtype if frozen else precision.master_dtype
        self.denoiser = self.family.load_denoiser(stored(config.dtype))
        experts = self.denoiser.experts
        read = [
            teachers.read_teacher(name, path, tuple(experts))
            for name, path in self._teachers.items()
        ]
        for name, expert in experts.items():
            expert.requires_grad_(not frozen)
            self._adapt(name, expert)
            self._bind(name, expert, read)
            self._checkpoint_activations(name, expert)
        self._compile()
        self._shard()
        self._parallelize()
        self.parameters = {name: dict(e.named_parameters()) for name, e in experts.items()}
        self.units = {name: sharding.units_of(expert) for name, expert in experts.items()}
        self.layers = tuple(
            layer for expert in experts.values() for layer in lora.layers_of(expert).values()
        )
        for name in self._more_adapters:
            self.copy_adapter(DEFAULT, name)
        for teacher in read:
            teachers.check_base(teacher, self.base_hash, config.dtype.value)
            teachers.check_parts(teacher, frozen_parts(config.path, tuple(experts)))
        self.teachers = {teacher.name: teacher.digest() for teacher in read}
        if self.engine_config.keep_graph:
            self.graphs = KeptGraphs(self.device, self.mesh.group)
        if self.optimizer_config is not None:
            self.optimizer = build_optimizer(list(self.trained().values()), self.optimizer_config)
        self._log_made()

    def _adapt(self, name: str, expert: nn.Module) -> None:
        config = self.model_config.lora
        if config is None:
            return
        targets = self.lora_targets
        lora.check_targets(expert, targets, name=name)
        others = map(teachers.adapter_name, self._teachers)
        for adapter in (DEFAULT, *self._more_adapters, *others):
            lora.inject(
                expert,
                config,
                targets,
                adapter=adapter,
                seed=derive_seed("expert", self.engine_config.seed, name),
                dtype=precision.master_dtype(self.model_config.dtype),
            )
        for layer in lora.layers_of(expert).values():
            layer.set_adapter(DEFAULT)  # makes it trainable, and freezes every other adapter

    def _bind(self, name: str, expert: nn.Module, read: Sequence[teachers.Teacher]) -> None:
        config = self.model_config.lora
        for teacher in read:
            assert config is not None  # add_teacher
            adapter = teachers.adapter_name(teacher.name)
            teachers.check_experts(teacher, tuple(self.denoiser.experts))
            teachers.check_teacher(teacher, name, lora.parameters_of(expert, adapter), config)
            dtype = precision.master_dtype(self.model_config.dtype)
            lora.bind(expert, teacher.tensors[name], adapter=adapter, dtype=dtype)

    def _checkpoint_activations(self, name: str, expert: nn.Module) -> None:
        if not self.engine_config.gradient_checkpointing:
            return
        enable = getattr(expert, "enable_gradient_checkpointing", None)
        if enable is None:
            msg = (
                f"engine.gradient_checkpointing: expert {name!r} ({type(expert).__name__}) has none"
            )
            raise ValueError(msg)
        enable()

    def _compile(self) -> None:
        config = self.engine_config
        if not config.compile:
            return
        for expert in self.denoiser.experts.values():
            blocks = self.denoiser.shard_units(expert)
            compilation.compile_blocks(blocks, backend=config.compile_backend)

    @property
    def compile_seconds(self) -> float:
        """What this process spent compiling so far: part of the time of the calls that waited for it."""
        return compilation.Compiled.so_far().seconds if self.engine_config.compile else 0.0

    def _shard(self) -> None:
        config, experts = self.engine_config, self.denoiser.experts.values()
        frozen = sharding.nbytes(p for e in experts for p in e.parameters() if not p.requires_grad)
        replicate = self.model_config.lora is not None and sharding.replicates_base(
            config, frozen, device=self.device, ranks=self.mesh.size
        )
        free = config.reshard_after_forward
        if free is None:
            free = not replicate and self.mesh.size > 1
        for expert in experts:
            sharding.shard(
                expert.to(self.device),
                self.denoiser.shard_units(expert),
                mesh=self.mesh.weights,
                policy=precision.mixed_precision(self.model_config.dtype),
                whole=[*(lora.base_of(expert) if replicate else ()), *self._whole_trained(expert)],
                reshard_after_forward=free,
            )

    def _parallelize(self) -> None:
        """Let ranks compute one forward together, where the options say so."""
        sequence, branches = self.mesh.axis_group(ULYSSES), self.mesh.axis_group(CFG)
        if sequence is not None:
            for name, expert in self.denoiser.experts.items():
                plan = self.denoiser.sequence_plan(expert)
                if plan is None:
                    denoiser = type(self.denoiser).__name__
                    msg = f"engine.ulysses: {denoiser} says no plan to share sequences; take 1"
                    raise ValueError(msg)
                split_sequences(expert, plan, sequence, name=name)
        if branches is not None:
            self.denoiser = BranchParallelDenoiser(self.denoiser, branches)

    def _whole_trained(self, expert: nn.Module) -> list[nn.Parameter]:
        """Trained weights that every rank keeps whole, and what lies like them: the other adapters.

        Raises:
            ValueError: nobody would cast them for computation.
        """
        model = self.model_config
        if ShardTrained(self.engine_config.shard_trained) is ShardTrained.SHARD:
            return []
        if model.lora is not None:
            return lora.adapters_of(expert)
        if precision.compute_dtype(model.dtype) != precision.master_dtype(model.dtype):
            msg = (
                f"engine.shard_trained: replicate keeps {model.dtype.value} models' weights in float32, "
                "which FSDP alone casts for computation; take shard with engine.replicate, or a LoRA"
            )
            raise ValueError(msg)
        return list(expert.parameters())

    def _log_made(self) -> None:
        trained = self.trained()
        log.info(
            "engine.initialized",
            family=type(self.family).__name__,
            experts=list(self.denoiser.experts),
            trained=sum(p.numel() for p in trained.values()),
            device=str(self.device),
            ranks=self.mesh.size,
        )

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Suffixes of the modules that LoRA adapts: the config's, or the family's own."""
        config = self.model_config.lora
        if config is None or config.targets is None:
            return tuple(self.denoiser.lora_targets)
        return config.targets

    def trained(self) -> dict[str, nn.Parameter]:
        """Return every trained parameter (sharded) as `expert.name`."""
        return {
            f"{expert}.{name}": parameter
            for expert, parameters in self.parameters.items()
            for name, parameter in parameters.items()
            if parameter.requires_grad
        }

    def replicated(self) -> list[nn.Parameter]:
        """Return the trained parameters that every rank keeps whole."""
        return [p for p in self.trained().values() if not sharding.is_sharded(p)]

    # -- a rollout of its own weights ---------------------------------------------------------------

    def begin_rollout(self) -> None:
        """Keep the graphs of what is sampled from now on, with `engine.keep_graph`."""
        if self.graphs is not None:
            self.graphs.begin()

    def end_rollout(self) -> None:
        """Drop what was kept."""
        if self.graphs is not None:
            self.graphs.end()

    # -- modes ------------------------------------------------------------------------------------

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Take gradients; the former state comes back on leaving."""
        with self._mode(training=True), torch.enable_grad():
            yield

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Predict only, without gradients (no_grad: inference tensors cannot be trained on later)."""
        with self._mode(training=False), torch.no_grad():
            yield

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        before = {name: expert.training for name, expert in self.denoiser.experts.items()}
        for expert in self.denoiser.experts.values():
            expert.train(training)
        try:
            yield
        finally:
            for name, expert in self.denoiser.experts.items():
                expert.train(before[name])

    # -- optimizer --------------------------------------------------------------------------------

    def _optimizer(self) -> tuple[AdamW, OptimizerConfig]:
        if self.optimizer is None or self.optimizer_config is None:
            msg = "this engine only predicts: it was built without an optimizer config"
            raise RuntimeError(msg)
        return self.optimizer, self.optimizer_config

    def optimizer_step(self) -> OptimizerReport:
        """Clip by the global norm and step, unless a gradient of any rank is not finite.

        Raises:
            NonFiniteGradientsError: more than `optimizer.max_nonfinite_steps` in a row were skipped.
            RuntimeError: there is no optimizer, or no gradient at all.
        """
        optimizer, config = self._optimizer()
        self.prepare_weights()
        trained = [p for p in self.trained().values() if p.grad is not None]
        if not trained:
            msg = "optimizer_step: no parameter has a gradient; run forward_backward_batch first"
            raise RuntimeError(msg)
        norm = clip_gradients(trained, config.max_grad_norm)
        rate = float(optimizer.param_groups[0]["lr"])
        self.end_rollout()  # graphs of other weights than those that follow
        if math.isfinite(norm):
            optimizer.step()
            self.weight_version += 1
            self.nonfinite_steps = 0
            return OptimizerReport(grad_norm=norm, stepped=True, lr=rate)
        self.optimizer_zero_grad()
        self.nonfinite_steps += 1
        log.warning("engine.step_skipped", grad_norm=norm, in_a_row=self.nonfinite_steps)
        if self.nonfinite_steps > config.max_nonfinite_steps:
            msg = (
                f"{self.nonfinite_steps} updates in a row had a non-finite gradient "
                f"(optimizer.max_nonfinite_steps is {config.max_nonfinite_steps}); weights are those "
                f"of version {self.weight_version}"
            )
            raise NonFiniteGradientsError(msg)
        return OptimizerReport(grad_norm=norm, stepped=False, lr=rate)

    def optimizer_zero_grad(self) -> None:
        """Drop gradients."""
        for parameters in self.parameters.values():
            for parameter in parameters.values():
                parameter.grad = None

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one optimizer step; returns the new rate."""
        optimizer, config = self._optimizer()
        self.schedule_steps += 1
        rate = config.rate(self.schedule_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def group_options(self) -> dict[str, Any]:
        """Return what the config says of the optimizer's groups, at the schedule's present place."""
        _, config = self._optimizer()
        return {
            "lr": config.rate(self.schedule_steps),
            "betas": tuple(config.betas),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }

    def prepare_weights(self) -> None:
        """Free gathered copies, so that what modules hold are the sharded weights themselves."""
        for units in self.units.values():
            sharding.reshard(units)

    # -- parallelism ------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        """Place among those that hold different rows."""
        return self.mesh.axis(DP)[0]

    def get_data_parallel_size(self) -> int:
        """Ranks, divided by those that hold the same rows (`engine.ulysses`, `engine.cfg_parallel`)."""
        return self.mesh.axis(DP)[1]

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Group of those that hold different rows; None for one."""
        return self.mesh.axis_group(DP)

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether it is the first of those that hold the same rows; all of them have the outputs."""
        return self.mesh.first_of_rows

    # -- weights ----------------------------------------------------------------------------------

    @cached_property
    def base_hash(self) -> str | None:
        """Content hash of the frozen weights; None where every weight is trained. A collective."""
        if self.model_config.lora is None:
            return None
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self.get_per_tensor_param(adapter=None):
            raw = tensor.cpu().flatten().view(torch.uint8)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(raw.numpy().data)
        return digest.hexdigest()

    def get_per_tensor_param(
        self, *, adapter: str | None = DEFAULT
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors one at a time, detached, on the engine's device; a collective.

        Names are the expert's, a dot, and the name that a stock module or LoRA file has:
        `transformer.blocks.0.to_q.lora_A.weight`, or with None `transformer.blocks.0.to_q.weight`: all
        weights but the adapters, which are not merged.

        Raises:
            ValueError: no such adapter.
        """
        self.prepare_weights()
        found = self.base_parameters() if adapter is None else self.adapter_parameters(adapter)
        for expert, parameters in found.items():
            for name, parameter in parameters.items():
                yield f"{expert}.{name}", sharding.whole(parameter.detach())

    def export_adapter(self, directory: Path, *, adapter: str = DEFAULT) -> Path:
        """Write a LoRA for stock diffusers and PEFT; see `export.write_adapter`."""
        return export.write_adapter(self, directory, adapter)

    def save_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Write trained tensors, adapters and optimizer; see `checkpoint.save`."""
        return checkpoint.save(self, directory)

    def load_checkpoint(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Restore what `save_checkpoint` wrote and returned; see `checkpoint.load`."""
        checkpoint.load(self, directory, state)

    def to(
        self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move parts to `cpu` (to free the device), or back to `device`, the engine's own.

        Gradients lie where their weights lie, so they are moved with `model`.

        Raises:
            ValueError: another device than those two; or `grad` unlike `model` while there are
                gradients.
        """
        if device not in ("cpu", "device", self.device.type, str(self.device)):
            msg = f"engine.to({device!r}): expected 'cpu' or 'device' ({self.device})"
            raise ValueError(msg)
        if model is not grad and any(p.grad is not None for p in self.trained().values()):
            msg = "engine.to: gradients lie where their weights lie; drop them or move both"
            raise ValueError(msg)
        kind = torch.device("cpu") if device == "cpu" else self.device
        self.prepare_weights()
        if model:
            for expert in self.denoiser.experts.values():
                expert.to(kind)
        if optimizer and self.optimizer is not None:
            for moments in self.optimizer.state.values():
                for name, value in moments.items():
                    if isinstance(value, Tensor) and name != "step":
                        moments[name] = value.to(kind)
