"""The mean over a row's latent values, with the same bits in every batch.

A library reduction orders its additions by batch size, thread count and device: the mean of 40000
float32 values alone and in a batch of two differ in the last bits as soon as two threads share the
work. Log-probs are compared at 1e-6 and clipped at 1e-5, so here the order is fixed: halves are
added to each other, element by element, until one value is left (also the accurate order).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor


class _RowSum(torch.autograd.Function):
    """Sum of a float [B, N] over N by halving; its gradient is one per value."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.shape = values.shape
        while values.shape[1] > 1:
            half, odd = divmod(values.shape[1], 2)
            halved = values[:, :half] + values[:, half : 2 * half]
            if odd:
                halved[:, 0] += values[:, -1]
            values = halved
        return values[:, 0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return cast(Tensor, grads[0].unsqueeze(1).expand(ctx.shape))


def row_mean(values: Mapping[str, Tensor]) -> Tensor:
    """Mean of every row over all values of all modalities.

    Args:
        values: modality -> float [B, ...]; a modality may have the batch axis alone.

    Returns:
        [B], the sum over the modalities divided by D, the number of values that a row has in all
        of them. On one device a row's bits depend on the row alone, not on the batch, the memory
        layout or the threads. Differentiable.

    Raises:
        ValueError: no modality, a modality without a batch axis, without a value per row, or with
            another batch size than the first.
    """
    if not values:
        raise ValueError("there is no modality to take the mean of")
    total: Tensor | None = None
    count = 0
    for name, value in values.items():
        if value.ndim == 0:
            raise ValueError(f"modality {name!r} has no batch axis")
        per_row = math.prod(value.shape[1:])
        if not per_row or (total is not None and value.shape[0] != total.shape[0]):
            raise ValueError(
                f"modality {name!r} of shape {tuple(value.shape)} does not give every row of the "
                "batch at least one value"
            )
        row = cast(Tensor, cast(Any, _RowSum).apply(value.reshape(value.shape[0], per_row)))
        total = row if total is None else total + row
        count += per_row
    assert total is not None
    return total / count
