"""Tensors in shared memory come out as they went in."""

from __future__ import annotations

from pathlib import Path

import torch

from omni_rollout_vllm.buckets import BucketStore, bit_sums


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
