"""AdamW over sharded weights, and one global gradient norm that every rank agrees on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from omni_core import device as devices
from omni_core.options import OptimizerConfig, OptimizerKind
from omni_engine_fsdp import eight_bit, sharding


def build_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """Build AdamW over the trained parameters, at the schedule's first rate.

    It is fused where the device of the parameters has such a kernel.

    Raises:
        ValueError: 8-bit moments of float64 weights.
        ImportError: 8-bit moments without the package that keeps them; says what to install.
    """
    first, second = config.betas
    options: dict[str, Any] = {
        "lr": config.rate(0),
        "betas": (first, second),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.kind is OptimizerKind.ADAMW_8BIT:
        return eight_bit.adamw(parameters, **options)
    fused = devices.fuses_optimizers(sharding.local(parameters[0].detach()).device)
    return AdamW(parameters, **options, foreach=not fused, fused=fused)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of the next step; optimizers that compile theirs hold it as a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> float:
    """Scale gradients so that their global L2 norm over all ranks is at most *max_norm*.

    Returns:
        The norm before clipping, the same on every rank; not finite as soon as one gradient of one
        rank is not (nothing is scaled then).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = sharding.whole(torch.nn.utils.get_total_norm(gradients))
    value = float(norm)
    if max_norm is not None and math.isfinite(value):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return value
