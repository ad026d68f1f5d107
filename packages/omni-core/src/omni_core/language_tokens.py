"""Token tensors [B, L] under a mask: what is masked has no influence, not even as NaN.

Letters: B sequences, L token positions. The mask is bool [B, L], True for the tokens that count
(the response, without padding and without what the policy did not write).
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_core.reverse_step import working_dtype


def masked_tokens(mask: Tensor, **values: Tensor) -> list[Tensor]:
    """Check tensors of one batch, and set their masked positions to 0.

    Args:
        mask: bool [B, L].
        values: float [B, L] by the name that an error gives them.

    Returns:
        The values in their order, float64 where one of them is, else float32. Differentiable; the
        gradient of a masked position is 0.

    Raises:
        ValueError: a mask that is not bool, a shape that differs, or values that are not floats.
    """
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ValueError(
            f"mask must be bool [B, L], got {mask.dtype} {tuple(mask.shape)}; `mask.bool()` makes one "
            "of zeros and ones"
        )
    for name, value in values.items():
        if value.shape != mask.shape or not value.is_floating_point():
            raise ValueError(
                f"{name} must be float {tuple(mask.shape)} like the mask, got {value.dtype} "
                f"{tuple(value.shape)}"
            )
    dtype = working_dtype(values)
    return [value.to(dtype).masked_fill(~mask, 0.0) for value in values.values()]
