"""Every configuration class of the core: frozen, validated, and free of torch.

A plugin's options class derives from the base that its group expects (`EngineConfig`,
`DiffusionRolloutConfig`, `AlgorithmConfig`, `RewardConfig`), so that what every trainer needs to know
is there, and a config is checked without importing a backend.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import attrs

from omni_core.choices import RewardScale
from omni_core.reward_parts import Parts, check_parts, parts_with_paths

positive: Any = attrs.validators.gt(0)
not_negative: Any = attrs.validators.ge(0)
optional_positive: Any = attrs.validators.optional(positive)


def divisors(number: int) -> str:
    """List what divides a number, for messages."""
    return " or ".join(str(n) for n in range(1, number + 1) if number % n == 0)


class DType(enum.StrEnum):
    """Number format of weights or of computation."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"


class ScheduleSource(enum.StrEnum):
    """Where the sigmas of a sampling run come from."""

    STOCK = "stock"
    """What the family's own stock pipeline produces."""
    LINEAR = "linear"
    """Evenly spaced, then shifted by `shift`."""


class Source(enum.StrEnum):
    """What an algorithm learns from."""

    ROLLOUT = "rollout"
    PAIRS = "pairs"
    DATASET = "dataset"


# -- model ----------------------------------------------------------------------------------------


class LoRAReference(enum.StrEnum):
    """Which policy is the reference of a LoRA that does not start anew."""

    BASE = "base"
    """The frozen weights without an adapter."""
    INITIAL_POLICY = "initial_policy"
    """The base with the adapter that training starts from, kept as a frozen adapter."""


@attrs.frozen(kw_only=True)
class LoRAConfig:
    """Low-rank adapters beside frozen weights (arXiv 2106.09685)."""

    rank: int = attrs.field(default=32, validator=positive)
    alpha: float = attrs.field(default=64.0, validator=positive)
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Suffixes of module names; None takes the family's own list. Each must match a module."""
    init: str = attrs.field(
        default="gaussian", validator=attrs.validators.in_(("gaussian", "kaiming"))
    )
    """How A starts; B starts at zero."""
    path: str | None = None
    """Directory of an adapter to start from, as `omni export`, PEFT or diffusers writes it: of the same
    rank, alpha and targets. None starts anew."""
    reference: LoRAReference | None = attrs.field(
        default=None, converter=attrs.converters.optional(LoRAReference)
    )
    """With `path`, and only then: which policy a KL is taken to."""

    def __attrs_post_init__(self) -> None:
        known = " or ".join(LoRAReference)
        if self.path is not None and self.reference is None:
            msg = f"reference: a LoRA that starts from `path` has to say its reference: {known}"
            raise ValueError(msg)
        if self.path is None and self.reference is not None:
            msg = "reference: without `path` the policy starts as the base, which is the reference"
            raise ValueError(msg)


@attrs.frozen(kw_only=True)
class DiffusionPipelineConfig:
    """What the whole pipeline is run with, the same in training, evaluation and export."""

    height: int = attrs.field(default=512, validator=positive)
    """Pixels."""
    width: int = attrs.field(default=512, validator=positive)
    """Pixels."""
    max_sequence_length: int = attrs.field(default=256, validator=positive)
    """Text tokens; families that attend to their padding become another model at another length."""
    num_frames: int = attrs.field(default=1, validator=positive)
    """Video frames; 1 for images."""
    frame_rate: float = attrs.field(default=24.0, validator=positive)
    """Video frames a second; families of video with sound are conditioned on it."""
    input_image_area: int = attrs.field(default=1024 * 1024, validator=positive)
    """Pixels that an input image is brought to, in the proportions of `width` and `height`."""

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Return the keywords with which most stock pipelines draw what a sampling config means."""
        return {
            "height": self.height,
            "width": self.width,
            "max_sequence_length": self.max_sequence_length,
            "num_inference_steps": sampling.num_inference_steps,
            "guidance_scale": sampling.guidance_scale,
            "negative_prompt": sampling.negative_prompt,
        }


@attrs.frozen(kw_only=True)
class DiffusionModelConfig:
    """A pipeline in the standard diffusers folder layout, on a local disk."""

    path: str
    """The directory that holds model_index.json, or `package:NAME` for one that a recipe ships."""
    family: str | None = None
    """Plugin of `omni.models`; None finds it by the pipeline class in model_index.json."""
    dtype: DType = attrs.field(default=DType.FLOAT32, converter=DType)
    """Computation of the trained module (master weights and LoRA stay float32)."""
    lora: LoRAConfig | None = attrs.field(factory=LoRAConfig)
    """None trains every weight."""
    pipeline: DiffusionPipelineConfig = attrs.field(factory=DiffusionPipelineConfig)


# -- engine ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class EngineConfig:
    """What every training engine is told; a plugin's options derive from it."""

    micro_batch_size: int = attrs.field(default=8, validator=positive)
    """(sample, step) rows in one training forward of one rank."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    seed: int = 0
    """Of everything the engine draws: the start of the LoRA weights."""
    device: str = "auto"
    """Device type that it runs on (a trainer fills in its own)."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold the same rows and compute one forward together; they divide all ranks."""
        return 1

    def rank_mistakes(self, ranks: int) -> Mapping[str, str]:
        """Check against the number of ranks: option -> what is wrong, with values that fit."""
        together = self.model_parallel_size
        if ranks % together == 0:
            return {}
        text = f"{ranks} ranks do not divide into groups of {together} that hold the same rows"
        return {"model_parallel_size": f"{text}; groups of {divisors(ranks)} would"}

    @property
    def trains_sampling_graph(self) -> bool:
        """Whether the gradient is taken from the graph of sampling, so that the rollout's log-probs are
        training's own, whatever the canary's floor."""
        return False

    @property
    def rests_on_host(self) -> bool:
        """Whether the trainer moves the engine to host memory (`to`) while a rollout samples."""
        return False

    def mistakes(
        self, algorithm: AlgorithmConfig, rollout: DiffusionRolloutConfig
    ) -> Mapping[str, str]:
        """Check against the rest of the run: dotted path below `engine` -> what is wrong."""
        del algorithm, rollout
        return {}

    @property
    def keeps_policies(self) -> bool:
        """Whether policies beside the trained one are kept without LoRA too, as copies of every weight."""
        return False

    @property
    def optimizers(self) -> tuple[OptimizerKind, ...]:
        """Values of `optimizer.kind` that it takes."""
        return (OptimizerKind.ADAMW,)

    @property
    def averages_weights(self) -> bool:
        """Whether it keeps `optimizer.ema`."""
        return False


class LRSchedule(enum.StrEnum):
    """Learning rate over optimizer steps, after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerKind(enum.StrEnum):
    """Which optimizer steps."""

    ADAMW = "adamw"
    """AdamW (arXiv 1711.05101)."""
    ADAMW_8BIT = "adamw_8bit"
    """AdamW whose moments are kept in 8 bits, in blocks with a scale each (arXiv 2110.02861)."""


@attrs.frozen(kw_only=True)
class EMAConfig:
    """A moving average of what is trained, kept as the policy `ema`: ema <- d ema + (1 - d) new."""

    decay: float = attrs.field(default=0.999, validator=[not_negative, attrs.validators.lt(1)])
    every: int = attrs.field(default=1, validator=positive)
    """Optimizer steps between two updates."""
    warmup: bool = True
    """After n updates d is at most (1 + n) / (10 + n), so that a short run does not average its start."""

    def decay_after(self, updates: int) -> float:
        """d of the update that follows *updates* of them."""
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay


@attrs.frozen(kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    kind: OptimizerKind = attrs.field(default=OptimizerKind.ADAMW, converter=OptimizerKind)
    lr: float = attrs.field(default=3e-4, validator=positive)
    betas: tuple[float, ...] = attrs.field(default=(0.9, 0.999))
    eps: float = attrs.field(default=1e-8, validator=positive)
    weight_decay: float = attrs.field(default=1e-4, validator=not_negative)
    max_grad_norm: float | None = attrs.field(default=1.0, validator=optional_positive)
    """Global L2 norm over all ranks; None does not clip."""
    schedule: LRSchedule = attrs.field(default=LRSchedule.CONSTANT, converter=LRSchedule)
    warmup_steps: int = attrs.field(default=0, validator=not_negative)
    total_steps: int | None = attrs.field(default=None, validator=optional_positive)
    """Optimizer steps of the whole run; linear and cosine need it (a trainer fills it in)."""
    max_nonfinite_steps: int = attrs.field(default=3, validator=not_negative)
    """Updates skipped for a non-finite gradient, in a row, before the run ends."""
    ema: EMAConfig | None = None
    """None keeps no moving average."""

    def rate(self, step: int) -> float:
        """Learning rate of the optimizer step that follows *step* taken ones.

        Warm-up ends at `lr` with its last step; linear and cosine then reach 0 at `total_steps`.

        Raises:
            ValueError: linear or cosine without `total_steps`.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule is LRSchedule.CONSTANT:
            return self.lr
        if self.total_steps is None:
            msg = f"optimizer.total_steps: schedule {self.schedule.value!r} needs it"
            raise ValueError(msg)
        left = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / left, 1.0)
        if self.schedule is LRSchedule.LINEAR:
            return self.lr * (1.0 - progress)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))

    @betas.validator
    def _two_betas(self, _: Any, value: tuple[float, ...]) -> None:
        if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
            msg = f"expected two numbers in [0, 1), got {list(value)}"
            raise ValueError(msg)


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every: int = attrs.field(default=0, validator=not_negative)
    """Trained steps between checkpoints; 0 writes one at the end only."""
    keep: int = attrs.field(default=2, validator=positive)
    """Newest complete checkpoints that stay."""


# -- sampling and rollout -------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class DiffusionSamplingConfig:
    """How pictures are sampled, apart from the randomness that an algorithm asks for."""

    num_inference_steps: int = attrs.field(default=10, validator=positive)
    guidance_scale: float = attrs.field(default=4.5, validator=not_negative)
    """Classifier-free guidance; 1.0 means none, and is reported as 1.0."""
    guidance_scale_2: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(not_negative)
    )
    """Of the low-noise expert (Wan2.2) or of the audio (LTX-2); None takes `guidance_scale`."""
    negative_prompt: str = ""
    schedule: ScheduleSource = attrs.field(default=ScheduleSource.STOCK, converter=ScheduleSource)
    shift: float = attrs.field(default=1.0, validator=positive)
    """Of `schedule: linear` alone; the stock schedule takes the pipeline's own."""


@attrs.frozen(kw_only=True)
class DiffusionRolloutAlgoConfig:
    """What an algorithm asks of a rollout: derived from its options, never written by users."""

    kind: str
    """Reverse-step kind: sde, cps, dance_sde, ode."""
    noise_level: float
    """eta; 0 for ode."""
    window_size: int | None
    """Stochastic (and trained) steps; None takes all but the last."""
    window_range: tuple[int, ...] | None
    """`(first, stop)`: where a window may lie; None allows the whole schedule but the last step."""
    adapter: str = "default"
    """Named policy adapter that samples."""


class WeightTransport(enum.StrEnum):
    """The road of pushed weights from the trainer to what samples."""

    AUTO = "auto"
    """Shared memory where both are on one machine, else the object store."""
    SHARED_MEMORY = "shared_memory"
    """Files in shared memory, mapped by the receiver: nothing is copied on the way."""
    OBJECT_STORE = "object_store"
    """Objects of Ray's store, which it carries between machines."""
    CUDA_IPC = "cuda_ipc"
    """Handles of device memory, where both use the same CUDA device. Written and not tested."""


@attrs.frozen(kw_only=True)
class DiffusionRolloutConfig:
    """What every rollout is told; a plugin's options derive from it."""

    samples_per_prompt: int = attrs.field(default=8, validator=positive)
    """Group size: pictures of one prompt in one step."""
    batch_size: int = attrs.field(default=16, validator=positive)
    """Pictures denoised together."""
    servers: int = attrs.field(default=0, validator=not_negative)
    """Ray actors that hold the rollout and are shared by all ranks, each batch going to the one with the
    least to do; 0 makes a rollout in each rank's own process."""
    transport: WeightTransport = attrs.field(
        default=WeightTransport.AUTO, converter=WeightTransport
    )
    """How pushed weights travel."""
    bucket_mib: int = attrs.field(default=512, validator=positive)
    """Pushed weights travel in buckets of this size."""
    sampling: DiffusionSamplingConfig = attrs.field(factory=DiffusionSamplingConfig)

    @property
    def keeps_adapters(self) -> bool:
        """Whether adapters that were pushed are kept beside each other, or each push replaces the last."""
        return True


# -- algorithm ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RunFacts:
    """What an algorithm's cross-field checks may look at."""

    num_inference_steps: int
    samples_per_prompt: int
    prompts_per_step: int
    has_adapter: bool = True
    """A LoRA is trained, so that the base model is the reference and other policies are adapters."""
    keeps_copies: bool = False
    """The engine keeps other policies as copies of every weight where there is no adapter."""
    micro_batch_size: int | None = None
    """Rows that a loss may see together; None where that is not known."""

    @property
    def keeps_policies(self) -> bool:
        """Policies beside the trained one are kept: adapters, or copies of every weight."""
        return self.has_adapter or self.keeps_copies


@attrs.frozen(kw_only=True)
class RewardTerm:
    """One of several numbers that a sample is judged by."""

    name: str
    """`score`, or one of the details that the reward gives beside it."""
    weight: float = 1.0


@attrs.frozen(kw_only=True)
class AlgorithmConfig:
    """What every algorithm declares; a plugin's options derive from it and import no torch."""

    updates_per_rollout: int = attrs.field(default=1, validator=positive)
    """Optimizer steps that one rollout is cut into."""
    rewards: tuple[RewardTerm, ...] = ()
    """What a sample's reward is the weighted sum of; empty takes what the reward itself sums."""
    reward_scale: RewardScale = attrs.field(default=RewardScale.NONE, converter=RewardScale)
    """What each of them is centred and divided by first (`reward_sum`)."""

    @property
    def source(self) -> Source:
        """What it learns from."""
        return Source.ROLLOUT

    @property
    def model_type(self) -> str:
        """First half of the engine's name."""
        return "diffusion"

    @property
    def needs_reward(self) -> bool:
        """Whether samples are scored."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether the loss looks at the reference policy."""
        return False

    @property
    def clip(self) -> float | None:
        """How far a ratio may move from 1 before the loss stops it; None where it looks at no ratio.

        A trainer takes the rollout's log-probs only while they are exact to a tenth of this.
        """
        return None

    def rollout_algo(self) -> DiffusionRolloutAlgoConfig:
        """Say how its trajectories are sampled."""
        raise NotImplementedError

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Return the same options, each path of the file system in them changed."""
        del change
        return self

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """Check against the rest of the run: dotted path below `algorithm` -> what is wrong."""
        del facts
        return {}


@attrs.frozen(kw_only=True)
class DiffusionLossConfig:
    """An algorithm's resolved loss options, by name: `diffusion_loss` dispatches on it."""

    name: str
    """Plugin of `omni.algorithms`."""
    options: AlgorithmConfig


@attrs.frozen(kw_only=True)
class DiffusionActorConfig:
    """Everything that the trained policy needs: assembled by a trainer from the run's config."""

    model: DiffusionModelConfig
    engine: EngineConfig
    optimizer: OptimizerConfig = attrs.field(factory=OptimizerConfig)
    checkpoint: CheckpointConfig = attrs.field(factory=CheckpointConfig)
    loss: DiffusionLossConfig


# -- reward ---------------------------------------------------------------------------------------


class OnRewardError(enum.StrEnum):
    """What happens to a sample that could not be scored."""

    RAISE = "raise"
    DROP_GROUP = "drop_group"
    MASK = "mask"


@attrs.frozen(kw_only=True)
class RewardConfig:
    """What every reward is told; a plugin's options derive from it."""

    workers: int = attrs.field(default=1, validator=positive)
    """Processes (Ray) or threads (local) that score."""
    on_error: OnRewardError = attrs.field(default=OnRewardError.RAISE, converter=OnRewardError)
    retries: int = attrs.field(default=2, validator=not_negative)
    """Times that a failure which may pass is tried again."""
    target_rule: str | None = None
    """How a row's target is taken from its prompt; None lets the reward decide."""
    monitors: Parts = attrs.field(factory=dict, validator=check_parts)
    """Other rewards that are measured and never trained on: name in the metrics -> reward."""

    @property
    def summed(self) -> tuple[RewardTerm, ...]:
        """The numbers that the score is the weighted sum of; empty where it is one number."""
        return ()

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Return the same options, each path of the file system in them changed."""
        return attrs.evolve(self, monitors=parts_with_paths(self.monitors, change))
