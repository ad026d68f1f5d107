"""AdamW with moments of 8 bits, which torchao keeps: in blocks of a rank's own shard, each with a scale.

The blocks are what a checkpoint holds, as they are. Each rank writes a file of its own, which says where
in each weight its part lies, so that parts can be dealt to other ranks. Where the blocks of the new parts
begin where the saved ones do they are taken as they are; else their values are rounded to blocks once more,
as each step of the optimizer rounds them. Moments of small parts stay in float32.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from omni_core.engine import CheckpointError
from omni_engine_fsdp import sharding

EXTRA = "omni-engine-fsdp[8bit]"
FOLDER = "optimizer_8bit"
MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(parameters: Sequence[nn.Parameter], **options: Any) -> Optimizer:
    """Build the optimizer.

    Raises:
        ImportError: torchao is not installed.
        ValueError: weights of float64, which it would round.
    """
    if any(parameter.dtype is torch.float64 for parameter in parameters):
        msg = "optimizer.kind adamw_8bit steps in float32, and model.dtype is float64; take adamw"
        raise ValueError(msg)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels for other devices than this machine's
            optim: Any = import_module("torchao.optim")
    except ImportError as error:
        msg = f"optimizer.kind adamw_8bit needs torchao: pip install '{EXTRA}'"
        raise ImportError(msg) from error
    built: Optimizer = optim.AdamW8bit(parameters, **options)
    return built


def is_eight_bit(optimizer: Optimizer | None) -> bool:
    """Whether moments are in blocks."""
    return optimizer is not None and hasattr(optimizer, "block_size")


@attrs.frozen
class _Span:
    """A part of a flattened weight: positions [start, stop)."""

    start: int
    stop: int

    def __and__(self, other: _Span) -> _Span:
        return _Span(max(self.start, other.start), min(self.stop, other.stop))

    def __bool__(self) -> bool:
        return self.start < self.stop

    def within(self, outer: _Span) -> slice:
        """Its positions, counted from the start of a span around it."""
        return slice(self.start - outer.start, self.stop - outer.start)


@attrs.frozen
class _Piece:
    """What a file holds of a weight's moments."""

    file: Path
    span: _Span


def _span(weight: Tensor) -> _Span:
    """Say where in the whole weight this rank's part lies."""
    start, own = sharding.first_row(weight), sharding.local(weight.detach())
    start *= weight[0].numel() if weight.ndim > 1 else 1
    return _Span(start, start + own.numel())


def _parts(moment: Tensor) -> dict[str, Tensor]:
    """This rank's part of a moment as plain tensors, sharing their memory."""
    own: Any = sharding.local(moment)
    return {"codes": own.codes, "scale": own.scale} if hasattr(own, "codes") else {"dense": own}


def _file(directory: Path, rank: int) -> Path:
    return directory / FOLDER / f"rank-{rank:05}.safetensors"


def save(
    moments: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, Tensor],
    directory: Path,
    *,
    rank: int,
) -> None:
    """Write this rank's moments of *weights* below *directory*."""
    path = _file(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{moment}.{part}": tensor.contiguous().cpu()
        for name, state in moments.items()
        for moment in MOMENTS
        for part, tensor in _parts(state[moment]).items()
    }
    spans = {name: attrs.astuple(_span(weights[name])) for name in moments}
    save_file(tensors, path, metadata={"format": "pt", "spans": json.dumps(spans)})


def check(weights: Mapping[str, Tensor], directory: Path, *, ranks: int) -> None:
    """Look for this rank's moments of *weights*, before anything is read.

    Args:
        weights: As they lie in this run.
        directory: Of the checkpoint.
        ranks: That saved it.

    Raises:
        CheckpointError: a file is missing or unreadable, or they lack some.
    """
    pieces = _pieces(directory, ranks)
    for name, weight in weights.items():
        left = _span(weight)
        for piece in pieces.get(name, ()):
            if piece.span.start <= left.start < piece.span.stop:
                left = _Span(piece.span.stop, left.stop)
        if left:
            msg = (
                f"checkpoint {directory / FOLDER} lacks moments of {name}, from value {left.start} to "
                f"{left.stop} of the flattened weight"
            )
            raise CheckpointError(msg)


def _pieces(directory: Path, ranks: int) -> dict[str, list[_Piece]]:
    """What the files of all ranks hold of each weight, in the order of their starts."""
    found: dict[str, dict[_Span, _Piece]] = {}
    for path in (_file(directory, rank) for rank in range(ranks)):
        try:
            with safe_open(path, framework="pt") as opened:
                spans = json.loads(opened.metadata()["spans"])
                there = {key.rpartition(".")[0] for key in opened.keys()}  # noqa: SIM118 -- no mapping
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            msg = f"checkpoint {path} cannot be read: {error}"
            raise CheckpointError(msg) from error
        for name, span in spans.items():
            if there.issuperset(f"{name}.{moment}" for moment in MOMENTS):
                # Ranks with copies of the same part hold the same moments.
                found.setdefault(name, {})[_Span(*span)] = _Piece(path, _Span(*span))
    return {
        name: sorted(pieces.values(), key=lambda piece: piece.span.start)
        for name, pieces in found.items()
    }


def load(
    optimizer: Any, weights: Mapping[str, nn.Parameter], directory: Path, *, ranks: int
) -> None:
    """Make this rank's moments of *weights*, and fill them with what the ranks of `save` wrote.

    Args:
        optimizer: Of `adamw`.
        weights: As they lie in this run; `check` found them.
        directory: Of the checkpoint.
        ranks: That saved it.

    Raises:
        CheckpointError: a file is missing, unreadable or of other weights.
    """
    pieces = _pieces(directory, ranks)
    for name, parameter in weights.items():
        own = _span(parameter)
        state = optimizer.state[parameter]
        for moment in MOMENTS:
            signed = moment == "exp_avg"
            state[moment] = optimizer._new_buffer(parameter, signed)
            values = _values_of(optimizer, signed)
            saved = [_Saved.read(p, f"{name}.{moment}") for p in pieces[name] if p.span & own]
            _fill(sharding.local(state[moment]), own, saved, values)


def _values_of(optimizer: Any, signed: bool) -> Tensor:
    """What each code stands for, at scale 1."""
    values: Tensor = optimizer._subclass_zeros(
        torch.empty(optimizer.block_size), signed, optimizer.block_size
    ).qmap
    return values


@attrs.frozen(eq=False)
class _Saved:
    """A piece's tensors, flat: codes and scales of blocks, or dense values."""

    span: _Span
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, piece: _Piece, name: str) -> _Saved:
        try:
            with safe_open(piece.file, framework="pt") as opened:
                keys = [key for key in opened.keys() if key.rpartition(".")[0] == name]  # noqa: SIM118 -- no mapping
                found = {key.rpartition(".")[2]: opened.get_tensor(key).flatten() for key in keys}
        except (OSError, SafetensorError) as error:
            msg = f"checkpoint {piece.file} cannot be read: {error}"
            raise CheckpointError(msg) from error
        length = len(found.get("codes", found.get("dense", ())))
        if length != piece.span.stop - piece.span.start:
            msg = f"checkpoint {piece.file}: {name} has {length} values, not those of {piece.span}"
            raise CheckpointError(msg)
        return cls(piece.span, found)

    @property
    def block(self) -> int:
        """Values of a block; 0 where they are dense."""
        if "codes" not in self.tensors:
            return 0
        return len(self.tensors["codes"]) // len(self.tensors["scale"])

    def dense(self, values: Tensor) -> Tensor:
        """Float32."""
        if not self.block:
            return self.tensors["dense"].float()
        blocks = values.cpu()[self.tensors["codes"].long()].view(-1, self.block)
        return (blocks * self.tensors["scale"][:, None]).flatten()


def _fill(own: Any, span: _Span, saved: Sequence[_Saved], values: Tensor) -> None:
    """Fill this rank's part of a moment, which is at *span*."""
    if hasattr(own, "codes"):
        size = own.codes.numel() // own.scale.numel()
        if all(each.block == size and (each.span.start - span.start) % size == 0 for each in saved):
            codes, scale = own.codes.view(-1), own.scale
            for each in saved:
                both = each.span & span
                to, start = both.within(span), both.within(each.span)
                codes[to] = each.tensors["codes"][start].to(codes.device)
                scale[_blocks(to, size)] = each.tensors["scale"][_blocks(start, size)].to(
                    scale.device
                )
            return
    dense = torch.empty(span.stop - span.start)
    for each in saved:
        both = each.span & span
        dense[both.within(span)] = each.dense(values)[both.within(each.span)]
    own.copy_(dense.view(own.shape).to(own.device))


def _blocks(values: slice, size: int) -> slice:
    """The blocks of some values, which begin and end with them."""
    return slice(values.start // size, values.stop // size)
