"""Weights go to an engine on the same machine through files in shared memory, a bucket at a time.

A bucket is one mapped file: the sender fills it, receivers (one or several worker processes) map it
and copy out. Buckets stay until the next update, so that an engine that was started again gets them
without the trainer. Across machines the trainer's own transport brings tensors to the sender.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

ALIGNMENT = 64
SHARED_MEMORY = Path("/dev/shm")


@attrs.frozen
class Slot:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    """Such as `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes."""
    nbytes: int


@attrs.frozen
class Bucket:
    """A file with tensors: what travels instead of them."""

    path: str
    size: int
    """Bytes."""
    slots: tuple[Slot, ...]

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as a view of the mapped file: copy what is kept."""
        if not self.size:
            return
        raw = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        for slot in self.slots:
            dtype = getattr(torch, slot.dtype)
            flat = raw[slot.offset : slot.offset + slot.nbytes].view(dtype)
            yield slot.name, flat.reshape(slot.shape)


class BucketStore:
    """Owns the files of one sender; a new `write` lets go of the former ones."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self._directory = tempfile.TemporaryDirectory(prefix="omni-weights-", dir=parent)
        self._writes = 0
        self.buckets: tuple[Bucket, ...] = ()

    def write(self, tensors: Mapping[str, Tensor]) -> Iterator[Bucket]:
        """Fill buckets one after the other, yielding each as soon as it is full.

        Raises:
            OSError: shared memory has no room for them.
        """
        self.clear()
        self._writes += 1
        for number, names in enumerate(_cut(tensors, self.bucket_bytes)):
            path = Path(self._directory.name) / f"{self._writes}-{number}"
            bucket = _fill(path, {name: tensors[name] for name in names})
            self.buckets = (*self.buckets, bucket)
            yield bucket

    def clear(self) -> None:
        """Delete the files."""
        for bucket in self.buckets:
            Path(bucket.path).unlink(missing_ok=True)
        self.buckets = ()

    def close(self) -> None:
        """Delete everything."""
        self.buckets = ()
        self._directory.cleanup()


def _cut(tensors: Mapping[str, Tensor], most: int) -> list[list[str]]:
    """Names in buckets of at most *most* bytes (a larger tensor is alone), in order."""
    cut: list[list[str]] = []
    filled = 0
    for name, value in tensors.items():
        size = _padded(_nbytes(value))
        if not cut or filled + size > most:
            cut.append([])
            filled = 0
        cut[-1].append(name)
        filled += size
    return cut


def _fill(path: Path, tensors: Mapping[str, Tensor]) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        slots.append(Slot(name, dtype, tuple(value.shape), offset, _nbytes(value)))
        offset += _padded(_nbytes(value))
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(offset, 1))
    bucket = Bucket(str(path), offset, tuple(slots))
    for name, target in bucket.read():
        target.copy_(tensors[name].detach())
    return bucket


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bit_sums(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, int]:
    """Sum each tensor's bits as integers: cheap, and different for different weights."""
    found = {}
    for name, value in tensors:
        size = value.element_size()
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        flat = value.detach().contiguous().view(-1).view(kind)
        found[name] = int(flat.sum(dtype=torch.int64))
    return found
