"""Trained weights are float32 (or float64); a module computes in the model's own format.

FSDP2 casts gathered parameters, not inputs: timesteps and sigmas reach a module in float32, and the
Denoiser casts what it must.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from omni_core.options import DType

_TORCH = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT64: torch.float64,
}

FEW = 3
"""Names that a message lists."""


def compute_dtype(dtype: DType) -> torch.dtype:
    """Return the format that a module computes in."""
    return _TORCH[dtype]


def master_dtype(dtype: DType) -> torch.dtype:
    """Return the format of trained weights, their gradients and the optimizer."""
    return torch.float64 if dtype is DType.FLOAT64 else torch.float32


def mixed_precision(dtype: DType, reduce: DType | None = None) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: parameters are cast for computation; inputs and buffers are not.

    Args:
        dtype: Of computation.
        reduce: In which gradients are averaged over ranks; None takes the masters' format.
    """
    compute, master = compute_dtype(dtype), master_dtype(dtype)
    return MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute,
        reduce_dtype=master if reduce is None else compute_dtype(reduce),
        cast_forward_inputs=False,
    )


def check_masters(trained: Mapping[str, Tensor], dtype: DType) -> None:
    """Check that every trained weight has the masters' format: FSDP2 takes no mixture.

    Args:
        trained: By name, before they are sharded.
        dtype: Of computation.

    Raises:
        ValueError: some have another; names each format and the first weights of it.
    """
    master = master_dtype(dtype)
    others: dict[torch.dtype, list[str]] = {}
    for name, parameter in trained.items():
        if parameter.dtype != master:
            others.setdefault(parameter.dtype, []).append(name)
    if others:
        said = "; ".join(
            f"{len(names)} are {found} ({', '.join(names[:FEW])}{', ...' * (len(names) > FEW)})"
            for found, names in others.items()
        )
        msg = f"trained weights are kept in {master} beside model.dtype {dtype.value}, but {said}"
        raise ValueError(msg)


def take_buffers(module: nn.Module, other: nn.Module) -> None:
    """Hold the same buffers as *other*, the same module loaded in another format.

    FSDP2 casts parameters alone: where weights are kept in float32 and computed with in bf16, buffers
    are those that a stock pipeline loads in bf16, whatever it makes of each.
    """
    for (_, ours), (_, theirs) in zip(module.named_modules(), other.named_modules(), strict=True):
        for name, buffer in theirs.named_buffers(recurse=False):
            setattr(ours, name, buffer)


def cast_weights(module: nn.Module, dtype: DType) -> None:
    """Round weights to the format of computation, as FSDP2 does when it gathers them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(compute_dtype(dtype))
