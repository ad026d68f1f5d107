"""Ulysses sequence parallelism (arXiv 2309.14509): each rank has some positions of every row.

Everything but attention works on single positions. Around attention two all-to-alls exchange positions
for heads: a rank then sees all positions of some heads, padding left out, so the result is the one of a
single rank. Streams (text, image) are cut each by itself, padded to equal parts. Which modules make and
join them is the family's `SequencePlan`. Letters: B rows, S positions of a rank, D width, P ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from omni_core.model import SequencePlan
from omni_core.options import divisors
from omni_engine_fsdp import collectives


@attrs.define(eq=False)
class _Streams:
    """The sequences of the forward under way."""

    group: Any
    lengths: dict[str, int] = attrs.field(factory=dict)
    """Stream -> positions on all ranks together, as its module made them."""

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def part(self, stream: str) -> int:
        """Positions of each rank, padding included."""
        return -(-self.lengths[stream] // self.ranks)

    def cut(self, value: Tensor, stream: str) -> Tensor:
        """[B, all positions, D] -> [B, S, D]."""
        self.lengths[stream] = value.shape[1]
        size = self.part(stream)
        padded = F.pad(value, (0, 0, 0, size * self.ranks - value.shape[1]))
        return padded.narrow(1, size * dist.get_rank(self.group), size)

    def join(self, value: Tensor, stream: str) -> Tensor:
        """[B, S, D] -> [B, all positions, D]."""
        return collectives.gather(value, 1, self.group).narrow(1, 0, self.lengths[stream])

    def real(self, streams: Sequence[str]) -> Tensor | None:
        """int64: which of all ranks' positions are no padding; None if none is."""
        kept = [
            place < self.lengths[stream] - rank * self.part(stream)
            for rank in range(self.ranks)
            for stream in streams
            for place in range(self.part(stream))
        ]
        return None if all(kept) else torch.tensor(kept).nonzero()[:, 0]


class _Exchanging(TorchFunctionMode):
    """Inside, attention is over all ranks' positions."""

    def __init__(self, streams: _Streams, names: Sequence[str]) -> None:
        super().__init__()
        self.streams = streams
        self.names = names

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = self._attend if func is F.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if attn_mask is not None:
            msg = "engine.ulysses: attention with a mask is not exchanged between ranks"
            raise NotImplementedError(msg)
        streams, group = self.streams, self.streams.group
        here = sum(map(streams.part, self.names))
        if {query.shape[2], key.shape[2]} != {here}:
            msg = (
                f"engine.ulysses: attention over {query.shape[2]} and {key.shape[2]} positions, and the "
                f"family's plan says {here} (of {', '.join(self.names)})"
            )
            raise RuntimeError(msg)
        real = streams.real(self.names)
        if real is not None:
            real = real.to(query.device)
        whole = [collectives.positions_to_heads(x, group) for x in (query, key, value)]
        q, k, v = whole if real is None else [x.index_select(2, real) for x in whole]
        found = F.scaled_dot_product_attention(q, k, v, **options)
        if real is not None:
            found = torch.zeros_like(whole[0]).index_copy(2, real, found)
        return collectives.heads_to_positions(found, group)


def split_sequences(expert: nn.Module, plan: SequencePlan, group: Any, *, name: str) -> None:
    """Let the ranks of *group* share the sequences of an expert, in place.

    Args:
        expert: Adapted and sharded.
        plan: The family's, of this expert.
        group: At least two ranks.
        name: The expert's, for messages.

    Raises:
        ValueError: the heads do not divide, or the plan names no module of this expert.
    """
    ranks = dist.get_world_size(group)
    if plan.heads % ranks:
        msg = (
            f"engine.ulysses: {ranks} ranks do not divide the {plan.heads} attention heads of expert "
            f"{name!r}; {divisors(plan.heads)} would"
        )
        raise ValueError(msg)
    streams = _Streams(group)
    for module, stream in plan.cut.items():
        _after(expert.get_submodule(module), functools.partial(streams.cut, stream=stream))
    for module, stream in plan.join.items():
        _after(expert.get_submodule(module), functools.partial(streams.join, stream=stream))
    for suffix, order in plan.attention.items():
        found = [m for key, m in expert.named_modules() if key.endswith(f".{suffix}")]
        for module_ in found:
            _attend_together(module_, streams, order)


def _after(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda _, args, output: change(output))


def _attend_together(module: nn.Module, streams: _Streams, order: Sequence[str]) -> None:
    alone = module.forward

    @functools.wraps(alone)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Exchanging(streams, order):
            return alone(*args, **kwargs)

    module.forward = forward
