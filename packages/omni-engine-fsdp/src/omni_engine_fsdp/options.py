"""Options of this package's plugins. Imports no torch."""

from __future__ import annotations

import enum

import attrs

from omni_core.options import (
    DiffusionActorConfig,
    DiffusionRolloutConfig,
    EngineConfig,
    positive,
)


class ShardBase(enum.StrEnum):
    """Where the frozen weights beside an adapter lie."""

    AUTO = "auto"
    """Replicated where they fit `base_memory_share`, else sharded."""
    SHARD = "shard"
    """Each rank keeps its part and gathers a block when it runs."""
    REPLICATE = "replicate"
    """Whole on every rank: nothing is gathered but the adapter."""


class RolloutPlacement(enum.StrEnum):
    """Whose weights an engine-side rollout samples with."""

    SHARED = "shared"
    """The trained module itself: synchronous, nothing is pushed, no second copy."""
    REPLICA = "replica"
    """Its own copy, which weights are pushed to."""


@attrs.frozen(kw_only=True)
class FSDPEngineConfig(EngineConfig):
    """Engines on PyTorch FSDP2 (`fully_shard`)."""

    shard_base: ShardBase = ShardBase.AUTO
    """Of the frozen weights; trained weights are always sharded over the data-parallel ranks."""
    base_memory_share: float = attrs.field(
        default=0.3, validator=[positive, attrs.validators.le(1)]
    )
    """With `shard_base: auto`: the share of a device's memory that replicated weights may take."""
    reshard_after_forward: bool | None = None
    """Free gathered weights between a block's forward and backward; None does where the base is
    sharded (and where every weight is trained)."""


@attrs.frozen(kw_only=True)
class FSDPDiffusionActorConfig(DiffusionActorConfig):
    """A trained policy whose engine is one of this package's."""

    engine: FSDPEngineConfig = attrs.field(factory=FSDPEngineConfig)


@attrs.frozen(kw_only=True)
class EngineRolloutConfig(DiffusionRolloutConfig):
    """Sampling in the training engine's own process."""

    placement: RolloutPlacement = RolloutPlacement.SHARED
