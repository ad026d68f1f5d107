"""Where this rank stands: who holds the same rows, and who holds the same weights.

Two views of the same ranks. For rows the axes are `dp` x `cfg` x `ulysses`: ranks that differ in the
last two hold the same rows and compute one forward together. For weights they are `replicate` x `shard`:
ranks that differ in `shard` hold parts of one copy. Neighbouring ranks, which usually share a machine,
talk most: `ulysses` and `shard` are the innermost axes.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from omni_engine_fsdp.options import FSDPEngineConfig

DP, CFG, ULYSSES = "dp", "cfg", "ulysses"
REPLICATE, SHARD = "replicate", "shard"


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
        copies = (config.replicate, ranks // config.replicate)
        whole = config.replicate == 1
        rows = init_device_mesh(device.type, shape, mesh_dim_names=(DP, CFG, ULYSSES))
        alone = config.model_parallel_size == 1
        return cls(
            rows=rows,
            together=None if alone else rows[CFG, ULYSSES]._flatten("together").get_group(),
            weights=init_device_mesh(
                device.type,
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
