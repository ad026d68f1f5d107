"""Padding on and off: (values, lengths) and back."""

from __future__ import annotations

import pytest
import torch

from omni_core.padding import embeds_padding_2_no_padding, no_padding_2_padding

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])


def test_padding_is_dropped_row_after_row() -> None:
    embeds = torch.arange(24.0).reshape(3, 4, 2)
    values, lengths = embeds_padding_2_no_padding(embeds, MASK)
    assert lengths.tolist() == [2, 3, 0]
    assert lengths.dtype == torch.int64
    assert torch.equal(values, torch.cat([embeds[0, :2], embeds[1, :3]]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_inverse_gives_the_input_back(dtype: torch.dtype) -> None:
    embeds = torch.randn((3, 4, 2), generator=torch.Generator().manual_seed(0))
    embeds = embeds * MASK.unsqueeze(-1)
    values, lengths = embeds_padding_2_no_padding(embeds, MASK.to(dtype))
    back, mask = no_padding_2_padding(values, lengths, length=4)
    assert torch.equal(back, embeds)
    assert torch.equal(mask, MASK.bool())
    short, short_mask = no_padding_2_padding(values, lengths)
    assert torch.equal(short, embeds[:, :3])
    assert short_mask.shape == (3, 3)


def test_gradients_pass_both_ways() -> None:
    embeds = torch.ones(3, 4, 2, requires_grad=True)
    values, lengths = embeds_padding_2_no_padding(embeds, MASK)
    back, _ = no_padding_2_padding(values * 3, lengths)
    (grad,) = torch.autograd.grad(back.sum(), embeds)
    assert torch.equal(grad, 3.0 * MASK.unsqueeze(-1).expand(3, 4, 2))


@pytest.mark.parametrize(
    ("mask", "row"),
    [([[1, 0], [1, 1]], None), ([[1, 1], [0, 1]], 1), ([[0, 1], [1, 1]], 0)],
)
def test_holes_and_left_padding_are_refused_by_row(mask: list[list[int]], row: int | None) -> None:
    embeds = torch.zeros(2, 2, 3)
    if row is None:
        assert embeds_padding_2_no_padding(embeds, torch.tensor(mask))[1].tolist() == [1, 2]
        return
    with pytest.raises(ValueError, match=f"row {row} of the mask is not right-padded"):
        embeds_padding_2_no_padding(embeds, torch.tensor(mask))


def test_wrong_shapes_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(2, 3\)"):
        embeds_padding_2_no_padding(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        embeds_padding_2_no_padding(torch.zeros(2, 3, 1), torch.ones(2, 4))
    with pytest.raises(ValueError, match="only 0 and 1"):
        embeds_padding_2_no_padding(torch.zeros(1, 2, 1), torch.tensor([[0.5, 0.0]]))
    with pytest.raises(ValueError, match="sum to the 3 values"):
        no_padding_2_padding(torch.zeros(3, 2), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="at least 0"):
        no_padding_2_padding(torch.zeros(1, 2), torch.tensor([2, -1]))
    with pytest.raises(ValueError, match="row 1 has 2 values, more than the length 1"):
        no_padding_2_padding(torch.zeros(3, 2), torch.tensor([1, 2]), length=1)
    with pytest.raises(ValueError, match="integer"):
        no_padding_2_padding(torch.zeros(3, 2), torch.tensor([1.0, 2.0]))
