"""Records of tensors travel as numpy buffers: pickled out of band, read without a copy.

A torch tensor pickles its whole storage, so a one-row view of a batch costs the batch; `TensorRecord`
writes only what it owns, as contiguous numpy arrays (bfloat16 as its bits), which Ray's object store
hands to readers on the same machine without copying.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor

R = TypeVar("R", bound="TensorRecord")


@attrs.frozen
class _Packed:
    array: np.ndarray[Any, Any]
    dtype: str


def _pack(value: Any) -> Any:
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.view(torch.int16)
        return _Packed(tensor.numpy(), name)
    if isinstance(value, Mapping):
        return {key: _pack(inner) for key, inner in value.items()}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, _Packed):
        with warnings.catch_warnings():
            # A buffer of the object store is read-only; records are never written to in place.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(value.array)
        return tensor.view(torch.bfloat16) if value.dtype == "bfloat16" else tensor
    if isinstance(value, dict):
        return {key: _unpack(inner) for key, inner in value.items()}
    return value


def _rebuild(cls: type[Any], state: dict[str, Any]) -> Any:
    record = object.__new__(cls)
    for name, value in state.items():
        object.__setattr__(record, name, _unpack(value))
    return record


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply *change* to a tensor, to the tensors of a mapping or of a `TensorRecord`; else return *value*."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(inner, change) for key, inner in value.items()}
    if isinstance(value, TensorRecord):
        return value.map(change)
    return value


def join(values: Sequence[Any], name: str) -> Any:
    """Concatenate tensors, mappings of tensors or records along their first axis.

    Plain data is kept where it is the same in all parts.

    Raises:
        ValueError: the parts differ in kind, keys, dtype, shape beyond the first axis or plain data;
            names *name*.
    """
    first = values[0]
    if any((value is None) != (first is None) for value in values):
        msg = f"{name}: some parts have it and some do not"
        raise ValueError(msg)
    if isinstance(first, Tensor):
        kinds = [(tuple(value.shape[1:]), value.dtype) for value in values]
        if any(kind != kinds[0] for kind in kinds):
            shapes = ", ".join(f"{tuple(value.shape)} {value.dtype}" for value in values)
            msg = f"{name}: cannot join shapes {shapes}"
            raise ValueError(msg)
        return torch.cat(list(values))
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            msg = f"{name}: cannot join keys {[sorted(value) for value in values]}"
            raise ValueError(msg)
        return {key: join([value[key] for value in values], f"{name}[{key}]") for key in first}
    if isinstance(first, TensorRecord):
        return type(first).concat(values)
    if any(value != first for value in values):
        msg = f"{name}: parts differ: {', '.join(repr(value) for value in values)}"
        raise ValueError(msg)
    return first


@attrs.frozen(kw_only=True, eq=False)
class TensorRecord:
    """Base of attrs classes whose fields are tensors, mappings of tensors, None or plain data.

    Every tensor's first axis is the record's rows unless a subclass says otherwise and overrides
    `select` and `concat`.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Not __getstate__: attrs gives every slotted subclass one of its own, which would win.
        state = {f.name: _pack(getattr(self, f.name)) for f in attrs.fields(type(self))}
        return _rebuild, (type(self), state)

    def map(self: R, change: Callable[[Tensor], Tensor]) -> R:
        """Return a copy with *change* applied to every tensor."""
        changed = {
            f.name: map_tensors(getattr(self, f.name), change) for f in attrs.fields(type(self))
        }
        return attrs.evolve(self, **changed)

    def to(self: R, device: torch.device | str) -> R:
        """Move every tensor."""
        return self.map(lambda tensor: tensor.to(device))

    def owned(self: R) -> R:
        """Clone every tensor: no view of a larger batch is kept alive or sent."""
        return self.map(lambda tensor: tensor.detach().clone())

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        total = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        self.map(count)
        return total

    def select(self: R, rows: Tensor) -> R:
        """Take rows (int64 [n], any order, repeats allowed)."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    @classmethod
    def concat(cls: type[R], parts: Sequence[R]) -> R:
        """Join records along their rows.

        Raises:
            ValueError: no parts, or parts whose shapes or keys do not fit; names the field.
        """
        if not parts:
            msg = f"{cls.__name__}.concat: no parts"
            raise ValueError(msg)
        fields = [f.name for f in attrs.fields(type(parts[0]))]
        joined = {n: join([getattr(p, n) for p in parts], f"{cls.__name__}.{n}") for n in fields}
        return attrs.evolve(parts[0], **joined)
