"""Weights travel in buckets: flat blocks of memory with a table of what lies where.

Three kinds, one for each road. `Bucket` is a file in shared memory: whoever is on the same machine maps
it, so that nothing is copied on the way. `PackedBucket` is the block itself, for a road that carries
objects between machines. `DeviceBucket` is a handle of memory on an accelerator, which another process on
the same device opens; it is written and not tested. A store keeps its buckets until its next `write`, so
that a receiver that was started again gets them without the sender.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import torch
from torch import Tensor

from omni_core import device as devices
from omni_core.records import TensorRecord

ALIGNMENT = 64
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "omni-weights-"
LOCK = "lock"


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


def views(block: Tensor, slots: Sequence[Slot]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor as a view of its block (uint8 [bytes])."""
    for slot in slots:
        dtype = getattr(torch, slot.dtype)
        flat = block[slot.offset : slot.offset + slot.nbytes].view(dtype)
        yield slot.name, flat.reshape(slot.shape)


@attrs.frozen
class Bucket:
    """A file with tensors: what travels instead of them."""

    path: str
    size: int
    """Bytes."""
    slots: tuple[Slot, ...]

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as a view of the mapped file: copy what is kept."""
        if self.size:
            yield from views(
                torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8),
                self.slots,
            )


@attrs.frozen(kw_only=True, eq=False)
class PackedBucket(TensorRecord):
    """The tensors themselves, as one block."""

    block: Tensor
    """uint8 [bytes]."""
    slots: tuple[Slot, ...]

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as a view of the block: copy what is kept."""
        return views(self.block, self.slots)


@attrs.frozen
class DeviceBucket:
    """Memory of an accelerator that another process may open (not tested: no test here has a device)."""

    handle: Any
    """Of `omni_core.device.share`."""
    slots: tuple[Slot, ...]

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as a view of the sender's memory: copy what is kept."""
        return views(devices.open_shared(self.handle), self.slots)


AnyBucket = Bucket | PackedBucket | DeviceBucket


class BucketedWeights(Mapping[str, Tensor]):
    """Tensors by name that lie in buckets: a receiver may pass the buckets on instead of copying them."""

    def __init__(self, buckets: Iterable[AnyBucket]) -> None:
        self.buckets = tuple(buckets)
        self._tensors = {name: value for bucket in self.buckets for name, value in bucket.read()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class WeightStore(ABC):
    """Owns the buckets of one sender; a new `write` lets go of the former ones."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes

    def write(self, tensors: Mapping[str, Tensor]) -> Iterator[AnyBucket]:
        """Fill buckets one after the other, yielding each as soon as it is full.

        Raises:
            OSError: there is no room for them.
        """
        self.clear()
        for names in cut(tensors, self.bucket_bytes):
            yield self.fill({name: tensors[name] for name in names})

    @abstractmethod
    def fill(self, tensors: Mapping[str, Tensor]) -> AnyBucket:
        """Put tensors into one bucket."""

    @abstractmethod
    def clear(self) -> None:
        """Let go of all buckets."""

    def close(self) -> None:
        """Let go of everything."""
        self.clear()


class BucketStore(WeightStore):
    """Buckets of shared memory.

    Their directory is locked while its owner lives; a new store deletes those of owners that were killed.
    """

    def __init__(self, *, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        shared = os.access(SHARED_MEMORY, os.W_OK)
        parent = SHARED_MEMORY if shared else Path(tempfile.gettempdir())
        remove_orphans(parent)
        self._directory = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
        self._lock = _locked(Path(self._directory.name))
        self._count = 0
        self.buckets: tuple[Bucket, ...] = ()

    def fill(self, tensors: Mapping[str, Tensor]) -> Bucket:
        """Write one file."""
        slots, size = place(tensors)
        bucket = Bucket(str(self._new_file(size)), size, slots)
        for name, target in bucket.read():
            target.copy_(tensors[name].detach())
        self.buckets = (*self.buckets, bucket)
        return bucket

    def copy(self, packed: PackedBucket) -> Bucket:
        """Write the block of a bucket that came from another machine."""
        size = packed.block.numel()
        bucket = Bucket(str(self._new_file(size)), size, packed.slots)
        if size:
            torch.from_file(bucket.path, shared=True, size=size, dtype=torch.uint8).copy_(
                packed.block
            )
        self.buckets = (*self.buckets, bucket)
        return bucket

    def _new_file(self, size: int) -> Path:
        self._count += 1
        path = Path(self._directory.name) / str(self._count)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        return path

    def clear(self) -> None:
        """Delete the files."""
        for bucket in self.buckets:
            Path(bucket.path).unlink(missing_ok=True)
        self.buckets = ()

    def close(self) -> None:
        """Delete everything."""
        self.buckets = ()
        self._directory.cleanup()
        self._lock.close()


def _locked(directory: Path) -> IO[bytes]:
    """Lock a directory for as long as the file that is returned is open."""
    new = directory / f"{LOCK}.new"
    lock = new.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(directory / LOCK)  # only now can others try it
    return lock


def remove_orphans(parent: Path) -> None:
    """Delete directories of buckets whose owners ended without doing so."""
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its owner lives, is another user, or has just deleted it
            continue
        shutil.rmtree(path.parent, ignore_errors=True)


class PackedStore(WeightStore):
    """Buckets that travel as they are; nothing is kept."""

    def fill(self, tensors: Mapping[str, Tensor]) -> PackedBucket:
        """Put tensors into one block of the host's memory."""
        slots, size = place(tensors)
        return PackedBucket(block=_block(tensors, slots, size), slots=slots)

    def clear(self) -> None:
        """Nothing is kept."""


class DeviceStore(WeightStore):
    """Buckets in the memory of the tensors' own accelerator (not tested: no test here has a device)."""

    def __init__(self, *, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        self._blocks: list[Tensor] = []

    def fill(self, tensors: Mapping[str, Tensor]) -> DeviceBucket:
        """Put tensors into one block of device memory, which lives until the next `write`.

        Raises:
            DeviceError: they are not on an accelerator whose memory can be shared.
        """
        slots, size = place(tensors)
        block = _block(tensors, slots, size, next(iter(tensors.values())).device)
        devices.synchronize(block.device)
        handle = devices.share(block)
        self._blocks.append(block)
        return DeviceBucket(handle, slots)

    def clear(self) -> None:
        """Free the device's memory."""
        self._blocks.clear()


def _block(
    tensors: Mapping[str, Tensor],
    slots: Sequence[Slot],
    size: int,
    device: torch.device | None = None,
) -> Tensor:
    block = torch.empty(size, dtype=torch.uint8, device=device)
    for name, target in views(block, slots):
        target.copy_(tensors[name].detach())
    return block


def cut(tensors: Mapping[str, Tensor], most: int) -> list[list[str]]:
    """Put names into buckets of at most *most* bytes (a larger tensor is alone), in order."""
    found: list[list[str]] = []
    filled = 0
    for name, value in tensors.items():
        size = _padded(value.nbytes)
        if not found or filled + size > most:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += size
    return found


def place(tensors: Mapping[str, Tensor]) -> tuple[tuple[Slot, ...], int]:
    """Give each tensor its place; returns the slots and the bytes of the whole."""
    slots: list[Slot] = []
    offset = 0
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        slots.append(Slot(name, dtype, tuple(value.shape), offset, value.nbytes))
        offset += _padded(value.nbytes)
    return tuple(slots), offset


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
