"""What every diffusers engine on FSDP2 shares, from loading to checkpoints.

A subclass says how a batch becomes forwards and gradients. Parameters are always reached through
`parameters`, the sharded ones: modules hold gathered copies between a forward and the next backward.
Here an engine is made, its modes are switched and it is moved; `adapter_setup` and `layout` make what
it holds, `weights` reads it and `update` changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import nn

from omni_core import device as devices
from omni_core.algorithm import ModelFacts
from omni_core.choices import Policy
from omni_core.engine import BaseEngine
from omni_core.model import Denoiser, ModelFamily
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionSamplingConfig,
    LoRAConfig,
    LoRAReference,
    OptimizerConfig,
)
from omni_core.prompt_length import PromptLength
from omni_engine_fsdp import (
    adapter_files,
    checkpoint,
    compilation,
    export,
    lora,
    pipeline_export,
    precision,
    sharding,
)
from omni_engine_fsdp.adapter_files import AdapterFiles
from omni_engine_fsdp.adapter_setup import AdapterSetup
from omni_engine_fsdp.frozen_parts import frozen_parts
from omni_engine_fsdp.kept_graphs import KeptGraphs
from omni_engine_fsdp.layout import ModelLayout, checkpoint_activations
from omni_engine_fsdp.lora import DEFAULT
from omni_engine_fsdp.model_index import find_family
from omni_engine_fsdp.optimizer import build_optimizer
from omni_engine_fsdp.options import SHARED_FORWARD, FSDPEngineConfig
from omni_engine_fsdp.policies import EMA, REFERENCE, PolicyModules
from omni_engine_fsdp.rank_mesh import DP, RankMesh
from omni_engine_fsdp.update import UpdateMixin

log = structlog.get_logger()


class DiffusersFSDPEngine(UpdateMixin, BaseEngine):
    """A diffusers denoiser with LoRA (or all weights trained) under `fully_shard`."""

    engine_config: FSDPEngineConfig
    family: ModelFamily
    denoiser: Denoiser
    """Over the sharded, adapted modules."""
    device: torch.device
    mesh: RankMesh

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
        self._rests = False
        """Whether the weights were moved to host memory."""
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
        self._layout = ModelLayout(
            model=config,
            engine=self.engine_config,
            family=self.family,
            device=self.device,
            mesh=self.mesh,
        )
        self.denoiser = self._layout.load()
        read = self._adapt()
        trained = self._layout.lay_out_trained(self.denoiser)
        self.denoiser = trained.denoiser
        self.parameters, self.units = trained.parameters, trained.units
        experts = self.denoiser.experts
        self.layers = tuple(
            layer for expert in experts.values() for layer in lora.layers_of(expert).values()
        )
        if config.lora is None:
            self.copies = {DEFAULT: trained}
            self.copies.update((name, self._layout.follower()) for name in self._more_adapters)
        for name in self._untrained:
            self.copy_adapter(DEFAULT, name)
        self._check_bases(read)
        if self.engine_config.keep_graph:
            self.graphs = KeptGraphs(self.device, self.mesh.group)
        if self.optimizer_config is not None:
            self.optimizer = build_optimizer(list(self.trained().values()), self.optimizer_config)
        self._log_made()

    def _adapt(self) -> dict[str, AdapterFiles]:
        """Make experts trainable, or inject adapters; returns the files that adapters start from."""
        config, experts = self.model_config, self.denoiser.experts
        setup = None if config.lora is None else self._adapter_setup(config.lora)
        read = {} if setup is None else setup.read(tuple(experts))
        for name, expert in experts.items():
            expert.requires_grad_(setup is None)
            if setup is not None:
                setup.inject(name, expert, self.lora_targets)
                setup.bind(name, expert, read)
            if self.engine_config.gradient_checkpointing:
                checkpoint_activations(name, expert)
        precision.check_masters(_trainable(experts), config.dtype)
        return read

    def _adapter_setup(self, config: LoRAConfig) -> AdapterSetup:
        return AdapterSetup(
            config=config,
            dtype=precision.master_dtype(self.model_config.dtype),
            seed=self.engine_config.seed,
            followers=self._untrained,
            teachers=self._teachers,
        )

    def _check_bases(self, read: Mapping[str, AdapterFiles]) -> None:
        """Check that adapters that were read are of this base, and note whose the teachers are."""
        config = self.model_config
        for files in read.values():
            adapter_files.check_base(files, self.base_hash, config.dtype.value)
        found = {name: read[lora.teacher_adapter(name)] for name in self._teachers}
        for files in found.values():
            adapter_files.check_parts(
                files, frozen_parts(config.path, tuple(self.denoiser.experts))
            )
        self.teachers = {name: files.digest() for name, files in found.items()}

    @property
    def _untrained(self) -> tuple[str, ...]:
        """Policies that start equal to the trained one, and are saved."""
        config = self.model_config.lora
        starts = config is not None and config.reference is LoRAReference.INITIAL_POLICY
        return (*self._more_adapters, *((REFERENCE,) if starts else ()))

    @property
    def compile_seconds(self) -> float:
        """What this process spent compiling so far: part of the time of the calls that waited for it."""
        return compilation.Compiled.so_far().seconds if self.engine_config.compile else 0.0

    def make_reference(self, seen: Callable[[Denoiser], None]) -> PolicyModules:
        """Load the weights that training began with, frozen, in the format of computation."""
        return self._layout.reference(seen)

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

    # -- files and places -------------------------------------------------------------------------

    @property
    def weights_device(self) -> torch.device:
        """Host memory with `offload: all` and after `to("cpu")`; else the engine's device."""
        rests = self._rests or self._layout.offloads
        return torch.device("cpu") if rests else self.device

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
                self._layout.move(denoiser, kind)
            self._rests = device == "cpu"
        if optimizer and not self._layout.offloads:
            self._move_moments(kind)
            if device != "cpu":
                self.rest_moments()


def _trainable(experts: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{key}": parameter
        for name, expert in experts.items()
        for key, parameter in expert.named_parameters()
        if parameter.requires_grad
    }
