"""Options of this package's plugins. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from omni_core.options import (
    AlgorithmConfig,
    DiffusionActorConfig,
    DiffusionRolloutConfig,
    DType,
    EngineConfig,
    OptimizerKind,
    divisors,
    positive,
)

SHARED_FORWARD = (
    "ranks that share a forward (ulysses, cfg_parallel) are not tested with kept graphs"
)
"""Why such ranks take no `keep_graph`."""


class ShardBase(enum.StrEnum):
    """Where the frozen weights beside an adapter lie."""

    AUTO = "auto"
    """Replicated where they fit `base_memory_share`, else sharded."""
    SHARD = "shard"
    """Each rank keeps its part and gathers a block when it runs."""
    REPLICATE = "replicate"
    """Whole on every rank: nothing is gathered but the adapter."""


class ShardTrained(enum.StrEnum):
    """Where trained weights, their gradients and the optimizer's moments lie."""

    SHARD = "shard"
    """Each rank keeps its part; a block's are gathered when it runs."""
    REPLICATE = "replicate"
    """Whole on every rank: nothing is gathered, and an update has one all-reduce of all gradients."""


class RolloutPlacement(enum.StrEnum):
    """Whose weights an engine-side rollout samples with."""

    SHARED = "shared"
    """The trained module itself: synchronous, nothing is pushed, no second copy."""
    REPLICA = "replica"
    """Its own copy, which weights are pushed to."""


class Offload(enum.StrEnum):
    """What rests in host memory while it does not work."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    """The optimizer's moments, between two of its steps."""
    ALL = "all"
    """FSDP2's CPU policy: trained weights, gradients and moments, and a base that is sharded. The
    optimizer steps in host memory; a block is on the device while it runs."""


@attrs.frozen(kw_only=True)
class FSDPEngineConfig(EngineConfig):
    """Engines on PyTorch FSDP2 (`fully_shard`)."""

    shard_base: ShardBase = attrs.field(default=ShardBase.AUTO, converter=ShardBase)
    """Of the frozen weights: the base beside an adapter, or the reference where every weight is trained."""
    shard_trained: ShardTrained = attrs.field(default=ShardTrained.SHARD, converter=ShardTrained)
    """Of the trained weights and every named adapter. `replicate` is the fastest for a LoRA whose base is
    replicated too."""
    replicate: int = attrs.field(default=1, validator=positive)
    """Copies of what is sharded (HSDP): so many groups of ranks hold one each. Divides the ranks."""
    ulysses: int = attrs.field(default=1, validator=positive)
    """Ranks that share each row's sequence in one forward (arXiv 2309.14509). Divides the ranks and the
    attention heads; lengths are padded to it."""
    cfg_parallel: int = attrs.field(default=1, validator=attrs.validators.in_((1, 2)))
    """2: the branches of classifier-free guidance run on two ranks, in sampling and in training."""
    base_memory_share: float = attrs.field(
        default=0.3, validator=[positive, attrs.validators.le(1)]
    )
    """With `shard_base: auto`: the share of a device's memory that replicated weights may take."""
    reshard_after_forward: bool | None = None
    """Free gathered weights between a block's forward and backward; None does where the base is
    sharded (and where every weight is trained)."""
    reduce_dtype: DType | None = attrs.field(
        default=None, converter=attrs.converters.optional(DType)
    )
    """Format that gradients are averaged over ranks in; None takes that of the trained weights."""
    offload: Offload = attrs.field(default=Offload.NONE, converter=Offload)
    rest_on_host: bool = False
    """Weights, gradients and moments are in host memory while a rollout samples that has weights of its
    own, so that the two may share a device. Each sampling moves them there and back."""

    keep_graph: bool = False
    """Take the gradient from the graph of sampling, and run no training forward: for one update per
    rollout of this engine's own, where the activations of every trained step fit into memory."""
    compile: bool = False
    """Compile the denoiser's blocks (`torch.compile`, whole graphs): the first steps take minutes."""
    compile_backend: str = "inductor"
    """Of `torch.compile`."""

    @property
    def trains_sampling_graph(self) -> bool:
        """With `keep_graph`."""
        return self.keep_graph

    @property
    def rests_on_host(self) -> bool:
        """With `rest_on_host`."""
        return self.rest_on_host

    def mistakes(
        self, algorithm: AlgorithmConfig, rollout: DiffusionRolloutConfig
    ) -> Mapping[str, str]:
        """Say why graphs of sampling cannot be kept, or why weights cannot rest meanwhile."""
        found = {}
        reason = self._no_graph(algorithm, rollout) if self.keep_graph else None
        if reason is not None:
            found["keep_graph"] = f"{reason}; take keep_graph=false"
        if (
            self.rest_on_host
            and isinstance(rollout, EngineRolloutConfig)
            and rollout.shares_weights
        ):
            found["rest_on_host"] = (
                "the rollout samples with the trained weights themselves; take rest_on_host=false, "
                "rollout.placement=replica or a rollout in another process"
            )
        return found

    def _no_graph(self, algorithm: AlgorithmConfig, rollout: DiffusionRolloutConfig) -> str | None:
        if algorithm.model_type != "diffusion":
            return "the algorithm trains on samples that are noised again, not on the steps of sampling"
        if algorithm.updates_per_rollout != 1:
            return (
                f"algorithm.updates_per_rollout is {algorithm.updates_per_rollout}, and after the first "
                "update the graph is one of other weights"
            )
        if not isinstance(rollout, EngineRolloutConfig) or not rollout.shares_weights:
            return "the rollout samples with weights that are pushed to it, so its graph is not trained"
        if algorithm.rollout_algo().adapter != "default":
            return f"adapter {algorithm.rollout_algo().adapter!r} samples, and it is not the trained one"
        if self.model_parallel_size > 1:
            return SHARED_FORWARD
        if rollout.merge_lora:
            return "rollout.merge_lora samples without the adapter's own weights in the graph"
        if getattr(algorithm, "rollout_correction", None) is not None:
            return "algorithm.rollout_correction compares with log-probs of a training forward"
        if len(getattr(algorithm, "teachers", ())) > 1:
            return "a sampling batch holds rows of several teachers"
        return None

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold the same rows: those of one sequence and of both guidance branches."""
        return self.ulysses * self.cfg_parallel

    def rank_mistakes(self, ranks: int) -> Mapping[str, str]:
        """Check the number of ranks against `ulysses`, `cfg_parallel` and `replicate`."""
        together = super().rank_mistakes(ranks).values()
        name = "ulysses" if self.ulysses > 1 else "cfg_parallel"
        found = dict.fromkeys([name] * len(together), "".join(together))
        if ranks % self.replicate:
            found["replicate"] = (
                f"{ranks} ranks do not divide into {self.replicate} copies; {divisors(ranks)} would"
            )
        if self.compile and self.ulysses > 1:
            found["ulysses"] = (
                "compiled blocks do not exchange positions between ranks; take compile=false, or 1"
            )
        return found

    @property
    def optimizers(self) -> tuple[OptimizerKind, ...]:
        """8-bit moments need the extra `omni-engine-fsdp[8bit]`."""
        return (OptimizerKind.ADAMW, OptimizerKind.ADAMW_8BIT)

    @property
    def keeps_policies(self) -> bool:
        """Frozen copies of every weight, made where something needs them."""
        return True

    @property
    def averages_weights(self) -> bool:
        """As a frozen adapter, or a copy of every weight."""
        return True


@attrs.frozen(kw_only=True)
class FSDPDiffusionActorConfig(DiffusionActorConfig):
    """A trained policy whose engine is one of this package's."""

    engine: FSDPEngineConfig = attrs.field(factory=FSDPEngineConfig)


@attrs.frozen(kw_only=True)
class EngineRolloutConfig(DiffusionRolloutConfig):
    """Sampling in the training engine's own process."""

    placement: RolloutPlacement = attrs.field(
        default=RolloutPlacement.SHARED, converter=RolloutPlacement
    )
    merge_lora: bool = False
    """Sample with the adapter merged into the weights (a copy of the adapted ones is held meanwhile).
    Training keeps it apart, so the two differ by rounding, which the canary measures."""
    offload_encoders: bool = False
    """Text encoders rest in host memory, and are on the device while they encode."""
    offload_codec: bool = False
    """The same of the codec, while it decodes."""

    @property
    def shares_weights(self) -> bool:
        """Whether it samples with the trained modules themselves."""
        return self.placement is RolloutPlacement.SHARED
