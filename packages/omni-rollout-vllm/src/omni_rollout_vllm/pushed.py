"""What was pushed to the engines, and whether the next push has to change what they sample."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from omni_core.rollout import WeightUpdate
from omni_core.weight_buckets import AnyBucket, bit_sums


@attrs.frozen(kw_only=True)
class Pushed:
    """What the engines sample with: tensors are held by the buckets, which a fresh engine gets again."""

    version: int
    names: tuple[str, ...]
    adapter: str | None
    alpha_over_rank: float
    digest: dict[str, int]
    """Of the tensors' bits; empty for an adapter that adds nothing."""
    buckets: tuple[AnyBucket, ...] = ()


def replaced_by(
    pushed: Pushed, held: Mapping[str | None, Pushed], *, one_adapter: bool
) -> Pushed | None:
    """Return what *pushed* takes the place of; None if nothing.

    Args:
        pushed: About to be bound.
        held: Adapter -> its last push; None for whole weights.
        one_adapter: Adapters are merged, so that one replaces another whatever their names.
    """
    if one_adapter and pushed.adapter is not None:
        return next((one for name, one in held.items() if name is not None), None)
    return held.get(pushed.adapter)


def expects_change(pushed: Pushed, before: Pushed | None) -> bool:
    """Whether samples have to differ from those before the push.

    What is in the model's folder is not known here, so the first whole weights may be the same.
    """
    if before is None:
        return pushed.adapter is not None and bool(pushed.digest)
    return before.digest != pushed.digest


def digest_of(update: WeightUpdate, dtype: torch.dtype) -> dict[str, int]:
    """Of what an engine computes with, in its *dtype*; empty where an adapter's B factors are all 0."""
    if update.adapter is not None:
        ups = [value for name, value in update.tensors.items() if ".lora_B." in name]
        if not any(bool(value.any()) for value in ups):
            return {}
    return bit_sums([(name, value.to(dtype)) for name, value in update.tensors.items()])
