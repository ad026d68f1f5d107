"""AdamW with warm-up and schedule, and one global gradient norm that every rank agrees on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from omni_core.options import LRSchedule, OptimizerConfig
from omni_engine_fsdp import sharding


def build_optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> AdamW:
    """Build AdamW (arXiv 1711.05101) over the trained parameters."""
    first, second = config.betas
    return AdamW(
        parameters,
        lr=config.lr,
        betas=(first, second),
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=True,
    )


def build_schedule(optimizer: AdamW, config: OptimizerConfig) -> LambdaLR:
    """Build the learning-rate schedule, advanced once for each optimizer step.

    Raises:
        ValueError: linear or cosine without `total_steps`, or a warm-up as long as the run.
    """
    return LambdaLR(optimizer, lr_factor(config))


def lr_factor(config: OptimizerConfig) -> Callable[[int], float]:
    """Return what `lr` is multiplied by at each optimizer step (0-based).

    Warm-up rises evenly and reaches 1 at its last step; then constant, or down to 0 at `total_steps`
    by a line or half a cosine.

    Raises:
        ValueError: as `build_schedule`.
    """
    warmup, total, schedule = config.warmup_steps, config.total_steps, config.schedule
    if schedule is not LRSchedule.CONSTANT and total is None:
        msg = f"optimizer.total_steps: schedule {schedule.value!r} needs the steps of the run"
        raise ValueError(msg)
    if total is not None and warmup >= total:
        msg = f"optimizer.warmup_steps: {warmup} leaves none of the run's {total} steps"
        raise ValueError(msg)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule is LRSchedule.CONSTANT or total is None:
            return 1.0
        progress = min((step - warmup) / (total - warmup), 1.0)
        if schedule is LRSchedule.LINEAR:
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


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
