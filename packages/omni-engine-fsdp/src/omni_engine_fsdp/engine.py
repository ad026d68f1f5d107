"""What every diffusers engine on FSDP2 shares: loading, LoRA, sharding, modes, optimizer, checkpoints.

A subclass says how a batch becomes forwards and gradients. Parameters are always reached through
`parameters`, the sharded ones: modules hold gathered copies between a forward and the next backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from omni_core import device as devices
from omni_core import resources
from omni_core.algorithm import ModelFacts
from omni_core.choices import Policy
from omni_core.engine import BaseEngine, NonFiniteGradientsError, OptimizerReport
from omni_core.model import Denoiser, ModelFamily
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionSamplingConfig,
    EMAConfig,
    LoRAReference,
    OptimizerConfig,
)
from omni_core.prompt_length import PromptLength
from omni_core.seeds import derive_seed
from omni_engine_fsdp import (
    adapter_files,
    checkpoint,
    compilation,
    export,
    lora,
    merging,
    pipeline_export,
    precision,
    sharding,
)
from omni_engine_fsdp.adapter_files import AdapterFiles
from omni_engine_fsdp.branch_parallel import BranchParallelDenoiser
from omni_engine_fsdp.content_hash import content_hash
from omni_engine_fsdp.frozen_parts import frozen_parts
from omni_engine_fsdp.kept_graphs import KeptGraphs
from omni_engine_fsdp.lora import DEFAULT
from omni_engine_fsdp.model_index import find_family
from omni_engine_fsdp.optimizer import build_optimizer, clip_gradients, set_rate
from omni_engine_fsdp.options import SHARED_FORWARD, FSDPEngineConfig, Offload, ShardTrained
from omni_engine_fsdp.policies import EMA, REFERENCE, PolicyMixin, PolicyModules
from omni_engine_fsdp.rank_mesh import CFG, DP, ULYSSES, RankMesh
from omni_engine_fsdp.sequence_parallel import split_sequences

log = structlog.get_logger()


class DiffusersFSDPEngine(PolicyMixin, BaseEngine):
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
    optimizer: Optimizer | None
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
        self.copies = {}
        self.reference_hash = None
        self.optimizer = None
        self.schedule_steps = 0
        """How far the learning rate's schedule is."""
        self.weight_version = 0
        self.nonfinite_steps = 0
        """Updates skipped for a non-finite gradient since the last one that was taken."""
        self.ema_updates = 0
        """Times that the moving average was brought nearer to the trained policy."""
        self._more_adapters: list[str] = []
        if optimizer_config is not None and optimizer_config.ema is not None:
            self.add_adapter(EMA)
        self._teachers: dict[str, Path] = {}
        self.graphs: KeptGraphs | None = None
        """What `engine.keep_graph` keeps of sampling."""
        self.teachers: dict[str, str] = {}
        """Name -> content hash of the frozen adapters that others trained, in the order of `add_teacher`."""

    # -- making -----------------------------------------------------------------------------------

    def add_adapter(self, name: str) -> None:
        """Ask for another named policy, frozen and equal to `default` at first.

        With LoRA it is an adapter, else a copy of every weight (see `policies`).

        Raises:
            RuntimeError: the model is initialised: adapters are sharded together with it.
            ValueError: the name is taken, empty or holds a dot.
        """
        if self.parameters:
            msg = f"add_adapter({name!r}): adapters are added before initialize, which shards them"
            raise RuntimeError(msg)
        taken = (DEFAULT, REFERENCE, *self._more_adapters)
        if name in taken or not name or "." in name:
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
        return ModelFacts.of(self._asked_family, has_adapter=self.has_adapter, keeps_copies=True)

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
            ValueError: a LoRA target matches nothing, a config does not fit the model, or an adapter to
                start from or to learn from is of another base, family, rank, scale or set of targets.
            FileNotFoundError: such an adapter is not where it should be.
        """
        config = self.model_config
        if self.engine_config.keep_graph and self.engine_config.model_parallel_size > 1:
            msg = f"engine.keep_graph: {SHARED_FORWARD}; take keep_graph=false"
            raise ValueError(msg)
        self.device = devices.resolve(self.engine_config.device, local_rank=sharding.local_rank())
        sharding.ensure_process_group(self.device)
        self.mesh = RankMesh.of(self.engine_config, self.device)
        self.family = self._asked_family
        frozen = config.lora is not None
        compute = precision.compute_dtype(config.dtype)
        self.denoiser = self.family.load_denoiser(compute) if frozen else self._load_masters()
        experts = self.denoiser.experts
        read = self._read_adapters(tuple(experts))
        for name, expert in experts.items():
            expert.requires_grad_(not frozen)
            self._adapt(name, expert)
            self._bind(name, expert, read)
            self._checkpoint_activations(name, expert)
        precision.check_masters(_trainable(experts), config.dtype)
        self._compile(self.denoiser)
        self._shard()
        self.denoiser = self._parallelize(self.denoiser)
        trained = _modules(self.denoiser)
        self.parameters, self.units = trained.parameters, trained.units
        self.layers = tuple(
            layer for expert in experts.values() for layer in lora.layers_of(expert).values()
        )
        if not frozen:
            self.copies = {DEFAULT: trained}
            self.copies.update((name, self._follower()) for name in self._more_adapters)
        for name in self._untrained:
            self.copy_adapter(DEFAULT, name)
        for files in read.values():
            adapter_files.check_base(files, self.base_hash, config.dtype.value)
        found = {name: read[lora.teacher_adapter(name)] for name in self._teachers}
        for files in found.values():
            adapter_files.check_parts(files, frozen_parts(config.path, tuple(experts)))
        self.teachers = {name: files.digest() for name, files in found.items()}
        if self.engine_config.keep_graph:
            self.graphs = KeptGraphs(self.device, self.mesh.group)
        if self.optimizer_config is not None:
            self.optimizer = build_optimizer(list(self.trained().values()), self.optimizer_config)
        self._log_made()

    @property
    def _untrained(self) -> tuple[str, ...]:
        """Policies that start equal to the trained one, and are saved."""
        config = self.model_config.lora
        starts = config is not None and config.reference is LoRAReference.INITIAL_POLICY
        return (*self._more_adapters, *((REFERENCE,) if starts else ()))

    def _read_adapters(self, experts: tuple[str, ...]) -> dict[str, AdapterFiles]:
        """Read the files of the adapters that do not start from a seed or from `default`."""
        config = self.model_config.lora
        found = {}
        if config is not None and config.path is not None:
            path = resources.resolve(config.path)
            found[DEFAULT] = adapter_files.read_adapter("model.lora.path", path, experts)
        for name, directory in self._teachers.items():
            read = adapter_files.read_adapter(f"teacher {name!r}", directory, experts)
            found[lora.teacher_adapter(name)] = read
        for files in found.values():
            adapter_files.check_experts(files, experts)
        return found

    def _adapt(self, name: str, expert: nn.Module) -> None:
        config = self.model_config.lora
        if config is None:
            return
        targets = self.lora_targets
        counts = lora.check_targets(expert, targets, name=name)
        log.info("engine.lora_targets", expert=name, matched=counts)
        for adapter in (DEFAULT, *self._untrained, *map(lora.teacher_adapter, self._teachers)):
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

    def _bind(self, name: str, expert: nn.Module, read: Mapping[str, AdapterFiles]) -> None:
        config = self.model_config.lora
        for adapter, files in read.items():
            assert config is not None  # without one there is nothing to read
            wanted = lora.parameters_of(expert, adapter)
            adapter_files.check_adapter(files, name, wanted, config)
            dtype = precision.master_dtype(self.model_config.dtype)
            lora.bind(expert, files.tensors[name], adapter=adapter, dtype=dtype)

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

    def _compile(self, denoiser: Denoiser) -> None:
        config = self.engine_config
        if not config.compile:
            return
        for expert in denoiser.experts.values():
            blocks = denoiser.shard_units(expert)
            compilation.compile_blocks(blocks, backend=config.compile_backend)

    @property
    def compile_seconds(self) -> float:
        """What this process spent compiling so far: part of the time of the calls that waited for it."""
        return compilation.Compiled.so_far().seconds if self.engine_config.compile else 0.0

    def _shard(self) -> None:
        experts = self.denoiser.experts.values()
        replicate = self.model_config.lora is not None and self._replicates(experts)
        free = not replicate and self.mesh.size > 1
        for expert in experts:
            base = lora.base_of(expert) if replicate else ()
            whole = [*base, *self._whole_trained(expert)]
            self._shard_expert(self.denoiser, expert, whole=whole, free=free)

    def _replicates(self, experts: Iterable[nn.Module]) -> bool:
        frozen = sharding.nbytes(p for e in experts for p in e.parameters() if not p.requires_grad)
        return sharding.replicates_base(
            self.engine_config, frozen, device=self.device, ranks=self.mesh.size
        )

    def _shard_expert(
        self,
        denoiser: Denoiser,
        expert: nn.Module,
        *,
        free: bool,
        whole: Collection[nn.Parameter] = (),
    ) -> None:
        config = self.engine_config
        wanted = config.reshard_after_forward
        if self._offloads:
            for parameter in whole:  # the rest is moved unit by unit
                parameter.data = parameter.data.to(self.device)
        else:
            expert.to(self.device)
        sharding.shard(
            expert,
            denoiser.shard_units(expert),
            mesh=self.mesh.weights,
            policy=precision.mixed_precision(self.model_config.dtype, config.reduce_dtype),
            whole=whole,
            reshard_after_forward=free if wanted is None else wanted,
            offload=self._offloads,
        )

    @property
    def _offloads(self) -> bool:
        """Whether FSDP2 keeps shards in host memory."""
        return self.engine_config.offload is Offload.ALL

    def _load_masters(self) -> Denoiser:
        """Load weights in the format that they are trained in."""
        compute = precision.compute_dtype(self.model_config.dtype)
        master = precision.master_dtype(self.model_config.dtype)
        denoiser = self.family.load_denoiser(master)
        if master != compute:
            stock = self.family.load_denoiser(compute).experts
            for name, expert in denoiser.experts.items():
                precision.take_buffers(expert, stock[name])
        return denoiser

    def _follower(self) -> PolicyModules:
        denoiser = self._load_masters()
        self._compile(denoiser)
        for expert in denoiser.experts.values():
            expert.requires_grad_(False).eval()
            whole = self._whole_trained(expert)
            self._shard_expert(denoiser, expert, whole=whole, free=self.mesh.size > 1)
        return _modules(self._parallelize(denoiser))

    def make_reference(self, seen: Callable[[Denoiser], None]) -> PolicyModules:
        """Load the weights that training began with, frozen, in the format of computation."""
        denoiser = self.family.load_denoiser(precision.compute_dtype(self.model_config.dtype))
        experts = denoiser.experts.values()
        for expert in experts:
            expert.requires_grad_(False).eval()
            precision.cast_weights(expert, self.model_config.dtype)
        seen(denoiser)
        self._compile(denoiser)
        replicate = self._replicates(experts)
        for expert in experts:
            if replicate:
                expert.to(self.device)
            else:
                self._shard_expert(denoiser, expert, free=self.mesh.size > 1)
        return _modules(self._parallelize(denoiser))

    def _parallelize(self, denoiser: Denoiser) -> Denoiser:
        """Let ranks compute one forward together, where the options say so."""
        sequence, branches = self.mesh.axis_group(ULYSSES), self.mesh.axis_group(CFG)
        if sequence is not None:
            for name, expert in denoiser.experts.items():
                plan = denoiser.sequence_plan(expert)
                if plan is None:
                    kind = type(denoiser).__name__
                    msg = f"engine.ulysses: {kind} says no plan to share sequences; take 1"
                    raise ValueError(msg)
                split_sequences(expert, plan, sequence, name=name)
        return denoiser if branches is None else BranchParallelDenoiser(denoiser, branches)

    def _whole_trained(self, expert: nn.Module) -> list[nn.Parameter]:
        """Trained weights that every rank keeps whole, and what lies like them: the other adapters.

        Raises:
            ValueError: nobody would cast them for computation.
        """
        model = self.model_config
        if self.engine_config.shard_trained is ShardTrained.SHARD:
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

    def _optimizer(self) -> tuple[Optimizer, OptimizerConfig]:
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
            self._step(optimizer)
            self.weight_version += 1
            self._update_average(config.ema)
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

    def _step(self, optimizer: Optimizer) -> None:
        if self.engine_config.offload is Offload.OPTIMIZER:
            self._move_moments(self.device)
        optimizer.step()
        self.rest_moments()

    def rest_moments(self) -> None:
        """Put the optimizer's moments where they are between its steps."""
        if self.engine_config.offload is Offload.OPTIMIZER:
            self._move_moments(torch.device("cpu"))

    def _move_moments(self, device: torch.device) -> None:
        if self.optimizer is not None:
            for moments in self.optimizer.state.values():
                for name, value in moments.items():
                    if isinstance(value, Tensor) and name != "step":
                        moments[name] = value.to(device)

    def _update_average(self, config: EMAConfig | None) -> None:
        if config is not None and self.weight_version % config.every == 0:
            self.ema_update_adapter(DEFAULT, EMA, config.decay_after(self.ema_updates))
            self.ema_updates += 1

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
        set_rate(optimizer, rate)
        return rate

    @property
    def rate(self) -> float:
        """Learning rate at the schedule's present place."""
        _, config = self._optimizer()
        return config.rate(self.schedule_steps)

    def prepare_weights(self) -> None:
        """Free gathered copies, so that what modules hold are the sharded weights themselves."""
        for units in (self.units, *(copy.units for copy in self.copies.values())):
            for own in units.values():
                sharding.reshard(own)

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
        return content_hash(self.get_per_tensor_param(adapter=None))

    def get_per_tensor_param(
        self, *, adapter: str | None = DEFAULT, merged: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors one at a time, detached, on the engine's device; a collective.

        With `offload: all`, those that are sharded are in host memory.

        Names are the expert's, a dot, and the name that a stock module or LoRA file has:
        `transformer.blocks.0.to_q.lora_A.weight`, or `transformer.blocks.0.to_q.weight`.

        Args:
            adapter: Whose: with LoRA its tensors alone, else all weights of that policy. None is all
                weights but the adapters, which are not merged.
            merged: All weights, the adapter's product added to those that it adapts.

        Raises:
            ValueError: no such adapter.
        """
        self.prepare_weights()
        if adapter is not None and merged and self.has_adapter:
            yield from self._merged(adapter)
            return
        found = self.base_parameters() if adapter is None else self.adapter_parameters(adapter)
        for expert, parameters in found.items():
            for name, parameter in parameters.items():
                yield f"{expert}.{name}", sharding.whole(parameter.detach())

    def _merged(self, adapter: str) -> Iterator[tuple[str, Tensor]]:
        config = self.model_config.lora
        assert config is not None  # has_adapter
        adapters = self.adapter_parameters(adapter)
        for expert, parameters in self.base_parameters().items():
            for name, parameter in parameters.items():
                weight = sharding.whole(parameter.detach())
                factors = lora.factors_of(adapters[expert], name)
                if factors is not None:
                    down, up = (sharding.whole(factor.detach()) for factor in factors)
                    added = merging.added(down, up, scale=config.alpha / config.rank)
                    # In the adapter's precision, and rounded once.
                    weight = (weight + added.reshape(weight.shape)).to(weight.dtype)
                yield f"{expert}.{name}", weight

    def export_adapter(self, directory: Path, *, adapter: str = DEFAULT) -> Path:
        """Write a LoRA for stock diffusers and PEFT; see `export.write_adapter`."""
        return export.write_adapter(self, directory, adapter)

    def export_pipeline(self, directory: Path, *, adapter: str = DEFAULT) -> Path:
        """Write a whole pipeline for stock diffusers; see `pipeline_export.write_pipeline`."""
        return pipeline_export.write_pipeline(self, directory, adapter)

    def use_reference(self) -> AbstractContextManager[None]:
        """Predict with the reference policy."""
        return self.use_policy(Policy.REFERENCE)

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
            for denoiser in (self.denoiser, *(copy.denoiser for copy in self.copies.values())):
                for expert in denoiser.experts.values():
                    self._move(expert, kind)
        if optimizer and not self._offloads:
            self._move_moments(kind)
            if device != "cpu":
                self.rest_moments()

    def _move(self, expert: nn.Module, device: torch.device) -> None:
        if not self._offloads:
            expert.to(device)
            return
        for parameter in expert.parameters():  # shards stay in host memory
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)


def _trainable(experts: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{key}": parameter
        for name, expert in experts.items()
        for key, parameter in expert.named_parameters()
        if parameter.requires_grad
    }


def _modules(denoiser: Denoiser) -> PolicyModules:
    experts = denoiser.experts
    return PolicyModules(
        denoiser=denoiser,
        parameters={name: dict(expert.named_parameters()) for name, expert in experts.items()},
        units={name: sharding.units_of(expert) for name, expert in experts.items()},
    )
