"""Wan's two experts on two ranks whose rows lie at different noise, so that each starts on another expert."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

RunRanks = Callable[..., list[str]]
HIGH, LOW = "transformer", "transformer_2"


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all tensors."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours)
    size = sum(float(value.double().square().sum()) for value in theirs.values())
    return math.sqrt(apart / size)


@pytest.mark.timeout(240)
def test_case_27_ranks_that_start_on_different_experts_give_one_ranks_gradient(
    run_ranks: RunRanks, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """CASES 27: LoRA and all weights, sharded and whole; neither rank has a row of both experts."""
    model = tiny_path("wan")
    (alone,) = run_ranks("wan", model, tmp_path, ranks=1, seconds=120.0)
    both = run_ranks("wan", model, tmp_path, seconds=120.0)
    forms = {"sharded": 1e-12, "replicated": 1e-12, "full": 1e-5}
    assert json.loads(alone) == [[HIGH, HIGH, LOW, LOW]] * len(forms)
    assert [json.loads(needed) for needed in both] == [
        [[HIGH, HIGH]] * len(forms),
        [[LOW, LOW]] * len(forms),
    ]
    for form, bound in forms.items():
        expected = load_file(tmp_path / f"{form}.0-1.safetensors")
        for expert in (HIGH, LOW):
            own = [value for name, value in expected.items() if name.startswith(f"{expert}.")]
            assert any(bool(value.any()) for value in own)
        for rank in (0, 1):
            found = load_file(tmp_path / f"{form}.{rank}-2.safetensors")
            assert distance(found, expected) <= bound
