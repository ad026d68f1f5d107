"""Tensors in shared memory come out as they went in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_core import weight_buckets
from omni_core.device import DeviceError
from omni_core.weight_buckets import (
    BucketedWeights,
    BucketStore,
    DeviceStore,
    PackedBucket,
    PackedStore,
    bit_sums,
)


def test_tensors_come_out_as_they_went_in() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.arange(4),
        "scalar": torch.tensor(2.5),
    }
    store = BucketStore(bucket_bytes=1 << 20)
    (bucket,) = store.write(tensors)
    found = {name: value.clone() for name, value in bucket.read()}
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value)
    store.close()


def test_buckets_have_a_size_and_a_larger_tensor_is_alone() -> None:
    tensors = {name: torch.zeros(size) for name, size in (("a", 64), ("b", 64), ("c", 1000))}
    store = BucketStore(bucket_bytes=512)
    cut = [[slot.name for slot in bucket.slots] for bucket in store.write(tensors)]
    assert cut == [["a", "b"], ["c"]]
    store.close()


def test_a_new_update_lets_go_of_the_last_one() -> None:
    store = BucketStore(bucket_bytes=512)
    (first,) = store.write({"a": torch.zeros(4)})
    (second,) = store.write({"a": torch.ones(4)})
    assert not Path(first.path).exists()
    assert [value.tolist() for _, value in second.read()] == [[1.0] * 4]
    store.close()
    assert not Path(second.path).exists()


def test_sums_of_bits_tell_weights_apart() -> None:
    one = {"a": torch.randn(8), "b": torch.randn(8).to(torch.bfloat16)}
    other = {**one, "b": one["b"] * 2}
    assert bit_sums(list(one.items())) == bit_sums(list(one.items()))
    assert bit_sums(list(one.items())) != bit_sums(list(other.items()))


def test_weights_are_one_mapping_over_their_buckets() -> None:
    tensors = {name: torch.randn(40) for name in "abc"}
    store = BucketStore(bucket_bytes=256)
    found = BucketedWeights(store.write(tensors))
    assert len(found.buckets) == 3
    assert list(found) == ["a", "b", "c"]
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert "d" not in found
    store.close()


def test_packed_buckets_travel_and_are_written_where_they_arrive() -> None:
    tensors = {"a": torch.randn(5), "b": torch.randn(3, 3).to(torch.bfloat16), "n": torch.empty(0)}
    (packed,) = PackedStore(bucket_bytes=1 << 20).write(tensors)
    assert isinstance(packed, PackedBucket)
    rebuild, state = packed.__reduce__()
    there = BucketStore(bucket_bytes=1)
    bucket = there.copy(rebuild(*state))
    assert Path(bucket.path).stat().st_size == packed.block.numel() == 128
    found = BucketedWeights([bucket])
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in tensors.items()
    }
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    there.close()


def test_memory_of_the_host_is_shared_by_no_handle() -> None:
    with pytest.raises(DeviceError, match="memory of cpu cannot be shared by a handle"):
        list(DeviceStore(bucket_bytes=1 << 20).write({"a": torch.zeros(4)}))


def test_what_a_killed_owner_left_is_deleted_and_what_a_living_one_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_buckets, "SHARED_MEMORY", tmp_path)
    lost, begun = (tmp_path / f"{weight_buckets.PREFIX}{name}" for name in ("lost", "begun"))
    lost.mkdir()
    begun.mkdir()
    (lost / weight_buckets.LOCK).touch()
    (lost / "1").write_bytes(b"weights")
    alive = BucketStore(bucket_bytes=512)
    (bucket,) = alive.write({"a": torch.zeros(4)})
    other = BucketStore(bucket_bytes=512)

    assert not lost.exists()
    assert begun.exists(), "its owner has not locked it yet"
    assert Path(bucket.path).exists()
    alive.close()
    other.close()
