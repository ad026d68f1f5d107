"""Where this rank stands: who holds the same rows, and who holds the same weights.

Two views of the same ranks. For rows the axes are `dp` x `cfg` x `ulysses`: ranks that differ in the
last two hold the same rows and compute one forward together. For weights they are `replicate` x `shard`:
ranks that differ in `shard` hold parts of one copy. Neighbouring ranks, which usually share a machine,
talk most: `ulysses` and `shard` are the innermost axes.

Engines of one layout share its process groups: torch keeps a group, and gloo its threads, until all are
destroyed, so groups of their own would pile up in a process that makes several engines.
"""

from __future__ import annotations

import atexit
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omni_engine_fsdp.options import FSDPEngineConfig

DP, CFG, ULYSSES = "dp", "cfg", "ulysses"
REPLICATE, SHARD = "replicate", "shard"

Layout = tuple[str, tuple[int, int, int], int]
"""(device type, lengths of the axes of rows, copies of the weights)."""


@attrs.frozen(kw_only=True, eq=False)
class RankMesh:
    """The ranks of an engine."""

    rows: DeviceMesh
    """`dp` x `cfg` x `ulysses`."""
    weights: DeviceMesh
    """`shard`, or `replicate` x `shard` where there is more than one copy."""
    together: dist.ProcessGroup | None
    """The ranks that hold the same rows; None for one."""

    @classmethod
    def of(cls, config: FSDPEngineConfig, device: torch.device) -> RankMesh:
        """Lay all ranks of this process group out as the options say.

        Raises:
            ValueError: they do not divide; says which values would.
        """
        ranks = dist.get_world_size()
        mistakes = config.rank_mistakes(ranks)
        if mistakes:
            raise ValueError("; ".join(f"engine.{key}: {said}" for key, said in mistakes.items()))
        shape = (ranks // config.model_parallel_size, config.cfg_parallel, config.ulysses)
        layout = (device.type, shape, config.replicate)
        if layout not in (kept := _meshes()):
            kept[layout] = cls._made(layout)
        return kept[layout]

    @classmethod
    def _made(cls, layout: Layout) -> RankMesh:
        device_type, shape, replicate = layout
        dp, cfg, ulysses = shape
        rows = init_device_mesh(device_type, shape, mesh_dim_names=(DP, CFG, ULYSSES))
        copies = (replicate, dp * cfg * ulysses // replicate)
        whole = replicate == 1
        alone = cfg * ulysses == 1
        return cls(
            rows=rows,
            together=None if alone else rows[CFG, ULYSSES]._flatten("together").get_group(),
            weights=init_device_mesh(
                device_type,
                copies[1:] if whole else copies,
                mesh_dim_names=(SHARD,) if whole else (REPLICATE, SHARD),
            ),
        )

    @property
    def size(self) -> int:
        """All ranks."""
        return self.rows.size()

    @property
    def rank(self) -> int:
        """Among all of them."""
        return self.rows.get_rank()

    @property
    def group(self) -> Any | None:
        """Of all ranks: every forward of a sharded module is a collective of theirs. None for one."""
        return dist.group.WORLD if self.size > 1 else None

    def axis(self, name: str) -> tuple[int, int]:
        """This rank's place on an axis of the rows, and the axis' length."""
        return self.rows.get_local_rank(name), self.rows[name].size()

    def axis_group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks along an axis of the rows; None for one."""
        return self.rows.get_group(name) if self.rows[name].size() > 1 else None

    @property
    def first_of_rows(self) -> bool:
        """Whether it is the first of those that hold the same rows."""
        return self.axis(CFG)[0] == 0 and self.axis(ULYSSES)[0] == 0


_MESHES: dict[Layout, RankMesh] = {}
_OF: list[Any] = []
"""The process group that they are laid out in."""


def _meshes() -> dict[Layout, RankMesh]:
    """Layouts of the present process group: those of one that was destroyed are let go."""
    if not _OF or _OF[0] is not dist.group.WORLD:
        _forget()
        _OF.append(dist.group.WORLD)
    return _MESHES


@atexit.register  # a group that lives until the interpreter's end can take the process with it
def _forget() -> None:
    _MESHES.clear()
    _OF.clear()
