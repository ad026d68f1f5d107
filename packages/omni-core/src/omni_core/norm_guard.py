"""NormGuard: a velocity that grows beyond the reference's is pulled back, one that turns is not.

Training on a reward inflates ||v|| by 5 to 15 percent, and pictures pay for it. The penalty acts only
where a row's velocity is longer than the reference's:

    h = max(0, ||v|| / ||v_ref|| - 1 - margin).

It is added, weighted, to any loss with a velocity. Source: NormGuard arXiv 2606.27771; when it acts is
theirs, and measuring growth relative to the reference makes its weight independent of D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_core.reverse_step import Latents, working_dtype
from omni_core.row_mean import row_mean


def norm_growth(velocity: Latents, reference: Latents) -> Tensor:
    """||v|| / ||v_ref|| - 1 of every row over all its latent values: [M], differentiable in both.

    Raises:
        ValueError: modalities that differ.
    """
    if set(velocity) != set(reference):
        raise ValueError(f"modalities differ: {sorted(velocity)} and {sorted(reference)}")
    dtype = working_dtype(velocity, reference)
    smallest = torch.finfo(dtype).tiny
    ours, theirs = (
        row_mean({name: value.to(dtype).square() for name, value in each.items()}).clamp_min(
            smallest
        )
        for each in (velocity, reference)
    )
    return (ours / theirs).sqrt() - 1.0


def norm_guard(velocity: Latents, reference: Latents, *, margin: float = 0.0) -> Tensor:
    """The hinge h of every row: [M], differentiable in the velocity.

    Args:
        velocity: modality -> [M, ...], of the trained policy.
        reference: The same of the reference; a constant.
        margin: Growth that is free: 0.05 lets a velocity be 5 percent longer.

    Raises:
        ValueError: modalities that differ, or a margin below 0.
    """
    if not margin >= 0.0:
        raise ValueError(f"margin must be at least 0, got {margin}")
    constant = {name: value.detach() for name, value in reference.items()}
    return (norm_growth(velocity, constant) - margin).clamp_min(0.0)
