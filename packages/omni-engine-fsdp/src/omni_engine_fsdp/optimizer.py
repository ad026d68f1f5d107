"""AdamW over sharded weights, and one global gradient norm that every rank agrees on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW

from omni_core.options import OptimizerConfig
from omni_engine_fsdp import sharding


def build_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> AdamW:
    """Build AdamW (arXiv 1711.05101) over the trained parameters, at the schedule's first rate."""
    first, second = config.betas
    return AdamW(
        parameters,
        lr=config.rate(0),
        betas=(first, second),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=True,
    )


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
