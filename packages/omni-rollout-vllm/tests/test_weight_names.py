"""Names of both sides: what is mapped, and what is listed when it is not."""

from __future__ import annotations

import pytest

from omni_core.rollout import WeightMismatchError
from omni_rollout_vllm.weight_names import Packing, adapter_map, packings, weight_map

STACKED = [
    (".to_qkv", ".to_q", "q"),
    (".to_qkv", ".to_k", "k"),
    (".to_qkv", ".to_v", "v"),
]
PACKED = packings(STACKED)
A, B = ".lora_A.weight", ".lora_B.weight"


def test_packed_projections_are_read_off_the_model() -> None:
    assert (Packing("to_qkv", ("to_q", "to_k", "to_v")),) == PACKED


def test_case_25_an_output_projection_without_its_zero_is_mapped() -> None:
    """CASES 25: `to_out.0` against an engine's `to_out`."""
    found = adapter_map(["t.to_out.0" + A, "t.to_out.0" + B], {"t.to_out"}, PACKED)
    assert found == {"t.to_out.0" + A: "t.to_out" + A, "t.to_out.0" + B: "t.to_out" + B}


def test_case_25_what_an_engine_does_not_have_is_listed() -> None:
    """CASES 25: lost names, and those that were bound."""
    names = ["t.to_q" + A, "t.to_q" + B, "t.other" + A, "t.other" + B]
    with pytest.raises(WeightMismatchError) as error:
        adapter_map(names, {"t.to_qkv"}, PACKED)
    assert str(error.value) == (
        f"sent and not bound: t.other{A}, t.other{B}; bound (2): t.to_q{A}, t.to_q{B}"
    )


def test_parts_of_a_packed_projection_keep_their_names() -> None:
    names = ["t.to_q" + A, "t.to_q" + B]
    assert adapter_map(names, {"t.to_qkv"}, PACKED) == {name: name for name in names}


def test_half_an_adapter_is_no_adapter() -> None:
    with pytest.raises(WeightMismatchError, match=r"expected and not sent: t\.to_q\.lora_A"):
        adapter_map(["t.to_q" + B], {"t.to_qkv"}, PACKED)


def test_whole_weights_are_mapped_below_wrappers_and_into_packed_ones() -> None:
    parameters = ["t.to_qkv.base_layer.weight", "t.to_out.weight", "t.norm.weight"]
    names = [
        "t.to_q.weight",
        "t.to_k.weight",
        "t.to_v.weight",
        "t.to_out.0.weight",
        "t.norm.weight",
    ]
    assert weight_map(names, parameters, PACKED) == {
        "t.to_q.weight": "t.to_q.base_layer.weight",
        "t.to_k.weight": "t.to_k.base_layer.weight",
        "t.to_v.weight": "t.to_v.base_layer.weight",
        "t.to_out.0.weight": "t.to_out.weight",
        "t.norm.weight": "t.norm.weight",
    }


def test_a_part_of_a_packed_weight_that_is_missing_is_listed() -> None:
    with pytest.raises(WeightMismatchError) as error:
        weight_map(["t.to_q.weight", "t.to_v.weight", "t.x"], ["t.to_qkv.weight"], PACKED)
    assert str(error.value) == (
        "sent and not bound: t.x; expected and not sent: t.to_k.weight; "
        "bound (2): t.to_q.weight, t.to_v.weight"
    )
