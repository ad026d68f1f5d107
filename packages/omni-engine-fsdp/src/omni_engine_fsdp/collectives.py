"""Collectives inside a forward, with their gradients.

Ranks that compute one forward together all form the same loss of the whole result. So a gathered
tensor's gradient is the same on each of them, and each keeps its own part of it; a rank's gradient of a
weight is then its part of the whole one, and gradients add up over the ranks. Letters: B rows, H heads,
S positions of a rank, D width of a head, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ranks = dist.get_world_size(group)
        plain = torch.contiguous_format
        parts = [torch.empty_like(part, memory_format=plain) for _ in range(ranks)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        parts = gradient.chunk(dist.get_world_size(ctx.group), dim=ctx.dim)
        return parts[dist.get_rank(ctx.group)], None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


class _HeadsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_heads(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_positions(gradient, ctx.group), None


class _HeadsIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _to_positions(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _to_heads(gradient, ctx.group), None


def gather(part: Tensor, dim: int, group: Any) -> Tensor:
    """Every rank's part, of equal shapes, joined along *dim* in the order of the ranks."""
    found: Tensor = _Gather.apply(part, dim, group)  # type: ignore[no-untyped-call]
    return found


def share(value: Tensor, ranks: int) -> Tensor:
    """Return what every rank computed whole: each takes an equal share of its gradient."""
    found: Tensor = _Share.apply(value, ranks)  # type: ignore[no-untyped-call]
    return found


def positions_to_heads(value: Tensor, group: Any) -> Tensor:
    """[B, H, S, D], all heads of own positions -> [B, H/P, P S, D], own heads of all positions."""
    found: Tensor = _HeadsOut.apply(value, group)  # type: ignore[no-untyped-call]
    return found


def heads_to_positions(value: Tensor, group: Any) -> Tensor:
    """[B, H/P, P S, D], own heads of all positions -> [B, H, S, D], all heads of own positions."""
    found: Tensor = _HeadsIn.apply(value, group)  # type: ignore[no-untyped-call]
    return found


def _to_heads(value: Tensor, group: Any) -> Tensor:
    return _exchange(_split(value, 1, group).movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


def _to_positions(value: Tensor, group: Any) -> Tensor:
    return _exchange(_split(value, 2, group).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def _split(value: Tensor, dim: int, group: Any) -> Tensor:
    """[..., P n, ...] -> [..., P, n, ...]."""
    shape = list(value.shape)
    ranks = dist.get_world_size(group)
    return value.reshape(*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :])


def _exchange(parts: Tensor, group: Any) -> Tensor:
    """parts[r] goes to rank r; what comes from rank r is at r."""
    found = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, parts.contiguous(), group=group)
    return found
