"""Moments add up over micro-batches and ranks as if all numbers had been there at once."""

from __future__ import annotations

import math

import pytest
import torch

from omni_core.metrics import Moments, merge


def test_moments_of_a_tensor() -> None:
    found = Moments.of(torch.tensor([1.0, 2.0, 6.0]))
    assert (found.count, found.total, found.low, found.high) == (3.0, 9.0, 1.0, 6.0)
    assert found.mean == 3.0
    assert found.std() == pytest.approx(math.sqrt(7.0))
    assert found.std(ddof=0) == pytest.approx(math.sqrt(14.0 / 3.0))


def test_a_mask_leaves_entries_out() -> None:
    values = torch.tensor([1.0, math.nan, 3.0])
    found = Moments.of(values, torch.tensor([True, False, True]))
    assert (found.count, found.mean, found.low, found.high) == (2.0, 2.0, 1.0, 3.0)


@pytest.mark.parametrize("cut", [1, 3, 7, 100])
def test_parts_add_up_to_the_whole(cut: int) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)) + 1e4
    whole = Moments.of(values)
    total = sum((Moments.of(part) for part in values.split(cut)), Moments())
    assert total.count == whole.count
    assert total.mean == pytest.approx(whole.mean, rel=1e-12)
    assert total.std() == pytest.approx(values.double().std().item(), rel=1e-9)
    assert (total.low, total.high) == (whole.low, whole.high)


def test_nothing_has_no_mean_and_changes_nothing() -> None:
    nothing = Moments.of(torch.zeros(0))
    assert nothing == Moments()
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.std())
    some = Moments.of(torch.tensor([2.0]))
    assert some + nothing == nothing + some == some
    assert math.isnan(some.std())
    assert some.std(ddof=0) == 0.0


def test_a_graph_and_a_low_precision_do_not_matter() -> None:
    values = torch.tensor([256.0, 1.0], dtype=torch.bfloat16, requires_grad=True)
    assert Moments.of(values).total == 257.0


def test_merge_adds_each_name() -> None:
    one, two = Moments.of(torch.tensor([1.0])), Moments.of(torch.tensor([3.0]))
    found = merge([{"a": one, "b": one}, {"a": two}])
    assert {name: moments.mean for name, moments in found.items()} == {"a": 2.0, "b": 1.0}
    assert merge([]) == {}
