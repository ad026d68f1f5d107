"""`fully_shard` at every world size, one included, over the axes of `RankMesh.weights`.

With a frozen base that is replicated, FSDP manages (gathers, reduces) the adapter alone: the base
stays a plain tensor on every rank, and nothing of it is ever copied. Trained weights that are
replicated are plain tensors too; their gradients are reduced here, all at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from omni_core import loopback
from omni_core.device import collective_backend, is_accelerator, total_memory
from omni_engine_fsdp.options import FSDPEngineConfig, ShardBase


def local_rank() -> int:
    """Return this process's place among those of its machine, as launchers tell it (0 if none did)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ensure_process_group(device: torch.device) -> None:
    """Make a process group of this process alone where there is none, on loopback.

    Raises:
        RuntimeError: a launcher started several processes, and torch.distributed was not initialised:
            each would train a model of its own.
    """
    if dist.is_initialized():
        return
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        msg = (
            f"this is one of {launched} processes (WORLD_SIZE) and torch.distributed is not "
            "initialised: call torch.distributed.init_process_group before engine.initialize"
        )
        raise RuntimeError(msg)
    store = dist.HashStore()  # type: ignore[attr-defined] # absent from the stub's exports
    with loopback.only():
        dist.init_process_group(collective_backend(device), store=store, rank=0, world_size=1)


def nbytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(p.numel() * p.element_size() for p in parameters)


def replicates_base(
    config: FSDPEngineConfig, frozen_bytes: int, *, device: torch.device, ranks: int
) -> bool:
    """Decide whether frozen weights are kept whole on every rank."""
    wanted = config.shard_base
    if wanted is not ShardBase.AUTO:
        return wanted is ShardBase.REPLICATE
    return ranks == 1 or frozen_bytes <= config.base_memory_share * total_memory(device)


def shard(
    expert: nn.Module,
    units: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    whole: Collection[nn.Parameter],
    reshard_after_forward: bool,
    offload: bool = False,
) -> None:
    """Shard an expert in place: each unit, then what is left in the root; nothing if all is whole.

    Args:
        expert: On the mesh's device (with *offload* its *whole* alone); what is frozen now stays frozen.
        units: Its blocks.
        mesh: Of all ranks: one axis, or copies x parts.
        policy: See `precision.mixed_precision`.
        whole: Parameters that are left alone: every rank keeps all of each.
        reshard_after_forward: Free gathered parameters after the forward of each of the units.
        offload: Shards, their gradients and moments rest in host memory.
    """
    kept = set(whole)
    if kept.issuperset(expert.parameters()):
        return
    offloading: OffloadPolicy = OffloadPolicy()
    if offload:
        offloading = CPUOffloadPolicy(pin_memory=is_accelerator(mesh.device_type))
    for module in (*units, expert):
        module.register_forward_hook(_owned_outputs)
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            # Backward starts at the root: what it frees would be gathered again at once.
            reshard_after_forward=reshard_after_forward and module is not expert,
            ignored_params=kept or None,
            offload_policy=offloading,
        )


def _owned_outputs(module: nn.Module, inputs: object, outputs: Any) -> Any:
    """Copy outputs that are views: FSDP2 hangs its backward hook on an output, which a view can lose."""
    if isinstance(outputs, Tensor):
        return outputs.clone() if outputs._is_view() else outputs
    if type(outputs) in (tuple, list):
        return type(outputs)(_owned_outputs(module, inputs, output) for output in outputs)
    return outputs


def units_of(expert: nn.Module) -> list[FSDPModule]:
    """Return every FSDP unit of a sharded expert, the root first. Walks all modules: keep the list."""
    return [module for module in expert.modules() if isinstance(module, FSDPModule)]


def sync_gradients(units: Sequence[FSDPModule], last: bool) -> None:
    """Reduce gradients over ranks (and free gathered weights) in the next backward only if *last*."""
    for unit in units:
        unit.set_requires_gradient_sync(last, recurse=False)
        unit.set_reshard_after_backward(last, recurse=False)


def average_gradients(parameters: Sequence[nn.Parameter], group: Any | None) -> None:
    """Average the gradients of parameters that every rank keeps whole: one all-reduce for all of them.

    A rank that has no gradient of a parameter counts as zero; where no rank has one, there is none.

    Args:
        parameters: Plain tensors of one format, the same on every rank.
        group: All ranks; None for one.
    """
    if group is None or not parameters:
        return
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([float(p.grad is not None) for p in parameters]).to(parts[0])
    flat = torch.cat([*(part.flatten() for part in parts), present])
    dist.all_reduce(flat, group=group)
    found = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
    anywhere = (found[-1] > 0).tolist()
    for parameter, gradient, there in zip(parameters, found[:-1], anywhere, strict=True):
        # A copy of its own: a view would keep all gradients alive as long as one of them.
        average = gradient.view_as(parameter) / dist.get_world_size(group)
        parameter.grad = average if there else None


def reshard(units: Sequence[FSDPModule]) -> None:
    """Free gathered parameters: what is registered on the modules are then the sharded ones."""
    for unit in units:
        unit.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank holds a part of it, or FSDP manages it."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Return where this rank's part begins along the first dimension, which `fully_shard` cuts."""
    if not isinstance(tensor, DTensor):
        return 0
    axes = [axis for axis, kind in enumerate(tensor.placements) if kind.is_shard()]
    assert [tensor.placements[axis].is_shard(0) for axis in axes] == [True], tensor.placements
    mesh, (axis,) = tensor.device_mesh, axes
    rows = -(-tensor.shape[0] // mesh.size(axis))
    return min(mesh.get_local_rank(axis) * rows, tensor.shape[0])


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Lay a whole tensor, which every rank has, out as *like* is; no collective."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
