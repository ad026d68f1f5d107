"""Ulysses sequence parallelism (arXiv 2309.14509): each rank has some positions of every row.

Everything but attention works on single positions. Around attention two all-to-alls exchange positions
for heads: a rank then sees all positions of some heads, padding left out, so the result is the one of a
single rank. Streams (text, image) are cut each by itself, padded to equal parts. Which modules make and
join them is the family's `SequencePlan`. Letters: B rows, S positions of a rank, D width, P ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from omni_core.model import PositionFactors, SequencePlan
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
        """[B, all positions, ...] -> [B, S, ...]."""
        self.lengths[stream] = value.shape[1]
        return self.own_part(value, 1)

    def own_part(self, value: Tensor, dim: int) -> Tensor:
        """Take this rank's part of one stream, padded with zeros to equal parts."""
        length = value.shape[dim]
        size = -(-length // self.ranks)
        shape = [*value.shape]
        shape[dim] = size * self.ranks - length
        padded = torch.cat([value, value.new_zeros(shape)], dim) if shape[dim] else value
        return padded.narrow(dim, size * dist.get_rank(self.group), size)

    def cut_factors(self, value: Tensor, factors: PositionFactors) -> Tensor:
        """Take what is said of this rank's positions, of each stream."""
        dim = factors.dim
        if not factors.streams:
            return self.own_part(value, dim)
        lengths = [self.lengths[stream] for stream in factors.streams]
        parts = torch.split(value, lengths, dim)
        return torch.cat([self.own_part(part, dim) for part in parts], dim)

    def lengthen(self, value: Tensor, stream: str) -> Tensor:
        """Give a stream that lies first, and is about to be dropped, the length of all ranks together."""
        rest = value[:, self.part(stream) :]
        filler = rest.new_zeros(rest.shape[0], self.lengths[stream], *rest.shape[2:])
        return torch.cat([filler, rest], 1)

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
        mask = None if attn_mask is None else _all_keys(attn_mask, here, real, group)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        if real is not None:
            found = torch.zeros_like(whole[0]).index_copy(2, real, found)
        return collectives.heads_to_positions(found, group)


def _all_keys(mask: Tensor, here: int, real: Tensor | None, group: Any) -> Tensor:
    """Join the masks of all ranks' keys: bool [B, 1, 1, S] -> [B, 1, 1, all positions].

    Raises:
        NotImplementedError: it says something else of each head, or of each query.
    """
    if mask.dtype != torch.bool or tuple(mask.shape[1:]) != (1, 1, here):
        msg = (
            f"engine.ulysses: a mask {mask.dtype} {[*mask.shape]} is not exchanged between ranks; those "
            f"of keys alone are, torch.bool [rows, 1, 1, {here}]"
        )
        raise NotImplementedError(msg)
    whole = collectives.gather(mask.to(torch.uint8), 3, group).bool()
    return whole if real is None else whole.index_select(3, real)


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
    for module, arguments in plan.inputs.items():
        _before(expert.get_submodule(module), streams, arguments)
    for module, factors in plan.factors.items():
        cut = functools.partial(streams.cut_factors, factors=factors)
        _after(expert.get_submodule(module), functools.partial(_each, cut))
    for module, stream in plan.left_out.items():
        _after(expert.get_submodule(module), functools.partial(streams.lengthen, stream=stream))
    for module, stream in plan.join.items():
        _after(expert.get_submodule(module), functools.partial(streams.join, stream=stream))
    for suffix, order in plan.attention.items():
        found = [m for key, m in expert.named_modules() if key.endswith(f".{suffix}")]
        for module_ in found:
            _attend_together(module_, streams, order)


def _after(module: nn.Module, change: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda _, args, output: change(output))


def _each(cut: Callable[[Tensor], Tensor], outputs: Tensor | tuple[Tensor, ...]) -> Any:
    return cut(outputs) if isinstance(outputs, Tensor) else tuple(map(cut, outputs))


def _before(module: nn.Module, streams: _Streams, arguments: Mapping[str, str]) -> None:
    """Cut arguments, by name however they are passed: checkpointed blocks are called by position."""
    signature = inspect.signature(module.forward)

    def cut(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = signature.bind(*args, **kwargs)
        for name, stream in arguments.items():
            if given.arguments.get(name) is not None:
                given.arguments[name] = streams.cut(given.arguments[name], stream)
        return given.args, given.kwargs

    module.register_forward_pre_hook(cut, with_kwargs=True)


def _attend_together(module: nn.Module, streams: _Streams, order: Sequence[str]) -> None:
    alone = module.forward

    @functools.wraps(alone)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Exchanging(streams, order):
            return alone(*args, **kwargs)

    module.forward = forward
