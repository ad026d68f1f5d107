"""Trained weights are float32 (or float64); a module computes in the model's own format.

FSDP2 casts gathered parameters, not inputs: timesteps and sigmas reach a module in float32, and the
Denoiser casts what it must.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from omni_core.options import DType

_TORCH = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
}


def compute_dtype(dtype: DType) -> torch.dtype:
    """Return the format that a module computes in."""
    return _TORCH[dtype]


def master_dtype(dtype: DType) -> torch.dtype:
    """Return the format of trained weights, their gradients and the optimizer."""
    return torch.float64 if dtype is DType.FLOAT64 else torch.float32


def mixed_precision(dtype: DType) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: parameters are cast for computation, gradients are reduced in float32."""
    compute, master = compute_dtype(dtype), master_dtype(dtype)
    return MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute,
        reduce_dtype=master,
        cast_forward_inputs=False,
    )
