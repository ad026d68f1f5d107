"""row_mean: a row's mean has the same bits in every batch and on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_core.row_mean import row_mean


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 7, 5), (16, 64, 64)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(threads: int, shape: tuple[int, ...]) -> None:
    # flatten(1).mean(1) fails this at 65536 values and two threads.
    values = torch.randn((5, *shape), generator=torch.Generator().manual_seed(3))
    together = row_mean({"x": values})
    alone = torch.cat([row_mean({"x": values[row : row + 1].clone()}) for row in range(5)])
    assert torch.equal(together, alone)
    assert torch.equal(row_mean({"x": values.flip(0)}).flip(0), together)


def test_the_bits_do_not_depend_on_the_memory_layout() -> None:
    values = torch.randn((4, 3, 6, 5), generator=torch.Generator().manual_seed(3))
    channels_last = values.contiguous(memory_format=torch.channels_last)
    assert torch.equal(row_mean({"x": values}), row_mean({"x": channels_last}))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64, 65, 1000])
def test_the_mean_is_right_for_every_count(count: int) -> None:
    values = torch.randn((3, count), generator=torch.Generator().manual_seed(count)).double()
    torch.testing.assert_close(row_mean({"x": values}), values.mean(1), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(
        row_mean({"x": values.float()}).double(), values.mean(1), rtol=1e-6, atol=1e-7
    )


def test_modalities_weigh_by_their_values() -> None:
    values = {"image": torch.full((2, 3, 2), 1.0), "audio": torch.full((2, 2), 9.0)}
    assert row_mean(values).tolist() == [3.0, 3.0]  # (6 * 1 + 2 * 9) / 8


def test_a_modality_may_have_the_batch_axis_alone() -> None:
    # A mean over no dimensions would reduce the batch as well.
    assert row_mean({"x": torch.tensor([1.0, 2.0, 4.0])}).tolist() == [1.0, 2.0, 4.0]


def test_the_input_is_left_alone_and_the_gradient_is_one_over_d() -> None:
    values = torch.arange(10.0).reshape(2, 5).requires_grad_()
    row_mean({"x": values, "y": values}).sum().backward()
    assert torch.equal(values.detach(), torch.arange(10.0).reshape(2, 5))
    assert values.grad is not None
    assert values.grad.flatten().tolist() == pytest.approx([0.2] * 10)


def test_malformed_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no modality"):
        row_mean({})
    with pytest.raises(ValueError, match="'x' has no batch axis"):
        row_mean({"x": torch.tensor(1.0)})
    with pytest.raises(ValueError, match=r"'y' of shape \(3, 2\)"):
        row_mean({"x": torch.zeros(2, 2), "y": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match="at least one value"):
        row_mean({"x": torch.zeros(2, 0)})
