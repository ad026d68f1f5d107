"""Records of tensors: pickled as what they own, out of band, read without a copy."""

from __future__ import annotations

import copy
import gc
import pickle  # noqa: TID251 -- what Ray does to a record, in memory; no file is read
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.records import TensorRecord, join, map_tensors


@attrs.frozen(kw_only=True, eq=False)
class Inner(TensorRecord):
    values: Tensor


@attrs.frozen(kw_only=True, eq=False)
class Record(TensorRecord):
    values: Tensor
    named: Mapping[str, Tensor] = attrs.field(factory=dict)
    inner: Inner | None = None
    label: str = "x"


def record(rows: int = 4, dtype: torch.dtype = torch.float32) -> Record:
    values = torch.arange(rows * 3).reshape(rows, 3).to(dtype)
    return Record(
        values=values, named={"a": values + 1, "b": values + 2}, inner=Inner(values=values + 3)
    )


def same(ours: Record, theirs: Record) -> bool:
    assert ours.inner is not None
    assert theirs.inner is not None
    pairs = [
        (ours.values, theirs.values),
        (ours.inner.values, theirs.inner.values),
        *((ours.named[name], theirs.named[name]) for name in ours.named),
    ]
    return ours.label == theirs.label and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )


def out_of_band(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def read(data: bytes, buffers: Iterable[object] = ()) -> Any:
    return pickle.loads(data, buffers=buffers)  # noqa: S301 -- written by the line before


# -- pickling --------------------------------------------------------------------------------------


def test_a_one_row_view_of_a_large_batch_pickles_small() -> None:
    batch = torch.zeros(1000, 1000)
    assert len(pickle.dumps(batch[:1])) > 3_000_000, "torch alone sends the whole storage"
    assert len(pickle.dumps(Inner(values=batch[:1]))) < 6_000


def test_tensors_travel_out_of_band_and_are_read_without_a_copy() -> None:
    values = torch.randn(100, 100)
    data, buffers = out_of_band(Record(values=values, named={"a": values[:, ::2]}))
    assert len(data) < 2_000
    assert [buffer.raw().nbytes for buffer in buffers] == [40_000, 20_000]
    views = [memoryview(bytearray(buffer.raw())) for buffer in buffers]
    back: Record = read(data, views)
    assert torch.equal(back.values, values)
    assert torch.equal(back.named["a"], values[:, ::2])
    views[0][:4] = b"\0\0\0\0"
    assert back.values[0, 0] == 0.0, "the tensor is the buffer"


def test_read_only_buffers_are_read_in_silence() -> None:
    data, buffers = out_of_band(record())
    back: Record = read(data, [bytes(buffer.raw()) for buffer in buffers])
    assert same(back, record())


def test_a_record_outlives_the_buffers_it_was_read_from() -> None:
    back = read(pickle.dumps(record(), protocol=5))
    gc.collect()
    assert same(back, record())


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8],
)
def test_every_dtype_survives_bit_for_bit(dtype: torch.dtype) -> None:
    assert same(read(pickle.dumps(record(dtype=dtype))), record(dtype=dtype))


def test_bfloat16_keeps_the_bits_that_are_no_number() -> None:
    values = torch.tensor([1.0, -0.0, float("nan"), float("inf"), 1e-40], dtype=torch.bfloat16)
    back: Inner = read(pickle.dumps(Inner(values=values)))
    assert torch.equal(back.values.view(torch.int16), values.view(torch.int16))


def test_masks_scalars_and_empty_tensors_survive() -> None:
    for values in (torch.tensor([True, False]), torch.tensor(3.0), torch.zeros(0, 4)):
        back: Inner = read(pickle.dumps(Inner(values=values)))
        assert back.values.shape == values.shape
        assert torch.equal(back.values, values)


def test_a_graph_is_left_behind() -> None:
    values = torch.ones(2, requires_grad=True) * 2
    back: Inner = read(pickle.dumps(Inner(values=values)))
    assert not back.values.requires_grad
    assert same(copy.deepcopy(record()), record())


# -- methods ---------------------------------------------------------------------------------------


def test_select_takes_rows_in_any_order_and_repeats() -> None:
    rows = torch.tensor([2, 0, 2])
    found = record().select(rows)
    assert found.values.tolist() == [[6, 7, 8], [0, 1, 2], [6, 7, 8]]
    assert found.named["b"].tolist() == [[8, 9, 10], [2, 3, 4], [8, 9, 10]]
    assert found.inner is not None
    assert found.inner.values[1].tolist() == [3, 4, 5]
    assert found.label == "x"


def test_concat_undoes_select() -> None:
    whole = record()
    parts = [whole.select(torch.tensor([0])), whole.select(torch.tensor([1, 2, 3]))]
    assert same(Record.concat(parts), whole)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"values": torch.zeros(1, 2)}, r"Record\.values: cannot join shapes \(4, 3\)"),
        ({"values": torch.zeros(1, 3, dtype=torch.int64)}, r"Record\.values: .*torch\.int64"),
        ({"named": {"a": torch.zeros(1, 3)}}, r"Record\.named: cannot join keys"),
        ({"named": {"a": torch.zeros(1, 9), "b": torch.zeros(1, 3)}}, r"Record\.named\[a\]"),
        ({"inner": None}, r"Record\.inner: some parts have it"),
        ({"label": "y"}, r"Record\.label: parts differ: 'x', 'y'"),
    ],
)
def test_parts_that_do_not_fit_are_named(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Record.concat([record(), attrs.evolve(record(), **other)])
    with pytest.raises(ValueError, match=r"Record\."):
        Record.concat([attrs.evolve(record(), **other), record()])


def test_nothing_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match=r"Record\.concat: no parts"):
        Record.concat([])
    assert join([None, None], "x") is None


def test_owned_lets_go_of_the_batch() -> None:
    batch = torch.zeros(1000, 10)
    view = Inner(values=batch[:1])
    assert view.values.untyped_storage().nbytes() == 40_000
    assert view.owned().values.untyped_storage().nbytes() == 40
    assert view.nbytes() == 40


def test_to_moves_every_tensor_and_nbytes_counts_them() -> None:
    moved = record().to("meta")
    assert moved.inner is not None
    devices = {t.device.type for t in (moved.values, *moved.named.values(), moved.inner.values)}
    assert devices == {"meta"}
    assert record().nbytes() == 4 * 4 * 3 * 4


def test_map_leaves_what_is_no_tensor() -> None:
    assert map_tensors({"a": torch.ones(1), "b": "text"}, lambda t: t + 1) == {
        "a": torch.tensor([2.0]),
        "b": "text",
    }
