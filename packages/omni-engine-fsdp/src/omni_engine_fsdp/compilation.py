"""`torch.compile` of the repeated blocks alone: what is the same many times is compiled once.

The forward of a block is compiled, not its call: FSDP's hooks (gather, free) and activation checkpointing
stay outside. A graph with gradients and one without are two compiled functions, whose last bits may
differ, so whoever stands in for training (old log-probs, the canary's floor) predicts with gradients on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import nn

GRAPHS = 64
"""Graphs of one block's code before a run ends: blocks, adapters, shapes and modes have one each. The
default of 8 would make PyTorch fall back to another function without a word."""


@attrs.frozen(kw_only=True)
class Compiled:
    """What this process has compiled so far."""

    seconds: float
    graphs: int
    """Forwards; their backwards are not counted apart."""

    @classmethod
    def so_far(cls) -> Compiled:
        """Read PyTorch's own counts."""
        from torch._dynamo.utils import calculate_time_spent, counters

        return cls(
            seconds=calculate_time_spent()["total_wall_time"],
            graphs=counters["stats"]["unique_graphs"],
        )


def compile_blocks(blocks: Iterable[nn.Module], *, backend: str) -> None:
    """Compile the forward of each block in place, before it is sharded; nothing runs yet.

    Args:
        blocks: Adapted modules, the ones that `Denoiser.shard_units` names.
        backend: Of `torch.compile`, such as `inductor`.

    Raises:
        ValueError: there is no such backend; lists those that there are.
    """
    known = torch.compiler.list_backends(exclude_tags=None)
    if backend not in known:
        msg = f"engine.compile_backend: no backend {backend!r}; there are: {', '.join(known)}"
        raise ValueError(msg)
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    for block in blocks:
        # A whole graph or an error: a part that ran uncompiled would be another function each time.
        compiled: Any = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)
        block.forward = compiled
