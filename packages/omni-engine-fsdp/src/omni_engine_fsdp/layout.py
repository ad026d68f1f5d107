"""Where an engine's weights lie, and how experts are made to run there: sharded or whole, compiled, shared.

The trained modules, the frozen copies that follow them and the reference are all laid out here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from omni_core.model import Denoiser, ModelFamily
from omni_core.options import DiffusionModelConfig
from omni_engine_fsdp import compilation, lora, precision, sharding
from omni_engine_fsdp.branch_parallel import BranchParallelDenoiser
from omni_engine_fsdp.options import FSDPEngineConfig, Offload, ShardTrained
from omni_engine_fsdp.policies import PolicyModules
from omni_engine_fsdp.rank_mesh import CFG, ULYSSES, RankMesh
from omni_engine_fsdp.sequence_parallel import split_sequences


@attrs.frozen(kw_only=True, eq=False)
class ModelLayout:
    """How one engine loads denoisers of its family and lays them out over its ranks."""

    model: DiffusionModelConfig
    engine: FSDPEngineConfig
    family: ModelFamily
    device: torch.device
    mesh: RankMesh

    @property
    def offloads(self) -> bool:
        """Whether FSDP2 keeps shards in host memory."""
        return self.engine.offload is Offload.ALL

    # -- loading ----------------------------------------------------------------------------------

    def load(self) -> Denoiser:
        """Load the denoiser that is trained: a frozen base in the format of computation, or masters."""
        if self.model.lora is None:
            return self._load_masters()
        return self.family.load_denoiser(precision.compute_dtype(self.model.dtype))

    def _load_masters(self) -> Denoiser:
        """Load weights in the format that they are trained in."""
        compute = precision.compute_dtype(self.model.dtype)
        master = precision.master_dtype(self.model.dtype)
        denoiser = self.family.load_denoiser(master)
        if master != compute:
            stock = self.family.load_denoiser(compute).experts
            for name, expert in denoiser.experts.items():
                precision.take_buffers(expert, stock[name])
        return denoiser

    # -- laying out -------------------------------------------------------------------------------

    def lay_out_trained(self, denoiser: Denoiser) -> PolicyModules:
        """Compile, shard and share what is trained, adapters and their base included, in place.

        Raises:
            ValueError: an option does not fit this model.
        """
        self._compile(denoiser)
        experts = denoiser.experts.values()
        replicate = self.model.lora is not None and self._replicates(experts)
        free = not replicate and self.mesh.size > 1
        for expert in experts:
            base = lora.base_of(expert) if replicate else ()
            whole = [*base, *self._whole_trained(expert)]
            self._shard_expert(denoiser, expert, whole=whole, free=free)
        return _modules(self._parallelize(denoiser))

    def follower(self) -> PolicyModules:
        """Load a frozen copy that lies like the trained weights, where every weight is trained."""
        denoiser = self._load_masters()
        self._compile(denoiser)
        for expert in denoiser.experts.values():
            expert.requires_grad_(False).eval()
            whole = self._whole_trained(expert)
            self._shard_expert(denoiser, expert, whole=whole, free=self.mesh.size > 1)
        return _modules(self._parallelize(denoiser))

    def reference(self, seen: Callable[[Denoiser], None]) -> PolicyModules:
        """Load the weights that training began with, frozen, in the format of computation.

        Args:
            seen: Called with the whole weights, before they are sharded.
        """
        denoiser = self.family.load_denoiser(precision.compute_dtype(self.model.dtype))
        experts = denoiser.experts.values()
        for expert in experts:
            expert.requires_grad_(False).eval()
            precision.cast_weights(expert, self.model.dtype)
        seen(denoiser)
        self._compile(denoiser)
        replicate = self._replicates(experts)
        for expert in experts:
            if replicate:
                expert.to(self.device)
            else:
                self._shard_expert(denoiser, expert, free=self.mesh.size > 1)
        return _modules(self._parallelize(denoiser))

    def _compile(self, denoiser: Denoiser) -> None:
        if not self.engine.compile:
            return
        for expert in denoiser.experts.values():
            blocks = denoiser.shard_units(expert)
            compilation.compile_blocks(blocks, backend=self.engine.compile_backend)

    def _replicates(self, experts: Iterable[nn.Module]) -> bool:
        frozen = sharding.nbytes(p for e in experts for p in e.parameters() if not p.requires_grad)
        return sharding.replicates_base(
            self.engine, frozen, device=self.device, ranks=self.mesh.size
        )

    def _shard_expert(
        self,
        denoiser: Denoiser,
        expert: nn.Module,
        *,
        free: bool,
        whole: Collection[nn.Parameter] = (),
    ) -> None:
        wanted = self.engine.reshard_after_forward
        if self.offloads:
            for parameter in whole:  # the rest is moved unit by unit
                parameter.data = parameter.data.to(self.device)
        else:
            expert.to(self.device)
        sharding.shard(
            expert,
            denoiser.shard_units(expert),
            mesh=self.mesh.weights,
            policy=precision.mixed_precision(self.model.dtype, self.engine.reduce_dtype),
            whole=whole,
            reshard_after_forward=free if wanted is None else wanted,
            offload=self.offloads,
        )

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
        if self.engine.shard_trained is ShardTrained.SHARD:
            return []
        if self.model.lora is not None:
            return lora.adapters_of(expert)
        dtype = self.model.dtype
        if precision.compute_dtype(dtype) != precision.master_dtype(dtype):
            msg = (
                f"engine.shard_trained: replicate keeps {dtype.value} models' weights in float32, "
                "which FSDP alone casts for computation; take shard with engine.replicate, or a LoRA"
            )
            raise ValueError(msg)
        return list(expert.parameters())

    # -- moving -----------------------------------------------------------------------------------

    def move(self, denoiser: Denoiser, device: torch.device) -> None:
        """Move all experts, but for shards that FSDP2 keeps in host memory."""
        for expert in denoiser.experts.values():
            if not self.offloads:
                expert.to(device)
                continue
            for parameter in expert.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(device)


def checkpoint_activations(name: str, expert: nn.Module) -> None:
    """Let an expert compute activations again in the backward pass.

    Raises:
        ValueError: it cannot.
    """
    enable = getattr(expert, "enable_gradient_checkpointing", None)
    if enable is None:
        msg = f"engine.gradient_checkpointing: expert {name!r} ({type(expert).__name__}) has none"
        raise ValueError(msg)
    enable()


def _modules(denoiser: Denoiser) -> PolicyModules:
    experts = denoiser.experts
    return PolicyModules(
        denoiser=denoiser,
        parameters={name: dict(expert.named_parameters()) for name, expert in experts.items()},
        units={name: sharding.units_of(expert) for name, expert in experts.items()},
    )
