"""The sections of a run's config: plain attrs classes, free of torch."""

from __future__ import annotations

import enum
from typing import Annotated

import attrs

from omni_core import plugins
from omni_core.choices import StepKind
from omni_core.config import BY_NAME, PluginChoice
from omni_core.options import (
    AlgorithmConfig,
    CheckpointConfig,
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionSamplingConfig,
    EngineConfig,
    OnRewardError,
    OptimizerConfig,
    RewardConfig,
    RewardTerm,
    not_negative,
    optional_positive,
    positive,
)
from omni_trainer.data import BadRowPolicy, Columns, Tail


class Backend(enum.StrEnum):
    """Where the workers live."""

    LOCAL = "local"
    """In the driver's own process, or the processes of torchrun."""
    RAY = "ray"
    """Ray actors: one for each rank, and scorers beside them."""


class ResumeMode(enum.StrEnum):
    """What `omni train` does with a run directory that holds a run."""

    NEVER = "never"
    """Refuses it; `omni resume` goes on."""
    AUTO = "auto"
    """Goes on from the newest complete checkpoint."""


@attrs.frozen(kw_only=True)
class DataConfig:
    """Prompts."""

    train: str
    """Training prompts: a .txt, .jsonl, .json, .csv or .parquet file, the directory of a HF dataset, or
    `package:MODULE/PATH`."""
    heldout: str | None = None
    """Prompts that are only evaluated."""
    prompt_column: str = "prompt"
    """Column of the prompt."""
    id_column: str | None = None
    """Column of a row's name; None takes the line number."""
    target_column: str | None = None
    """Column of the target, then required; None takes `target` where a row has it, and else the reward's
    rule."""
    image_column: str | None = None
    """Column of the picture that the prompt edits, then required: a path from the file's own folder, or the
    picture itself. For models that edit images."""
    prompts_per_step: int = attrs.field(default=8, validator=positive)
    tail: Tail = Tail.CARRY
    on_bad_row: BadRowPolicy = BadRowPolicy.RAISE
    shuffle: bool = True
    """Each epoch in an order of its own."""

    @property
    def columns(self) -> Columns:
        """The columns that are read; all others are a row's metadata."""
        return Columns(
            prompt=self.prompt_column,
            id=self.id_column,
            target=self.target_column,
            image=self.image_column,
        )


@attrs.frozen(kw_only=True)
class EvaluationConfig:
    """Held-out prompts, with a sampler and seeds of their own."""

    every: int = attrs.field(default=0, validator=not_negative)
    """Steps between evaluations; 0 evaluates before the first and after the last alone."""
    initial: bool = True
    """Evaluate before the first step: what a gain is measured from."""
    samples_per_prompt: int = attrs.field(default=4, validator=positive)
    sampling: DiffusionSamplingConfig = attrs.field(factory=DiffusionSamplingConfig)
    kind: StepKind = StepKind.ODE
    noise_level: float = attrs.field(default=0.0, validator=not_negative)
    policy: str = "default"
    """Which policy is scored, and exported at the end: the trained one (`default`), the moving average
    `ema`, or the one that samples for training."""
    max_prompts: int | None = attrs.field(default=None, validator=optional_positive)
    """Only the first so many prompts of the file; None takes all."""
    batch_size: int = attrs.field(default=256, validator=positive)
    """Pictures under way at once, on all ranks together: bounds the memory that media take."""
    grid_prompts: int = attrs.field(default=8, validator=not_negative)
    """Prompts shown in the grid (their first sample); 0 writes none."""


def _tensorboard() -> PluginChoice:
    options = plugins.registry(plugins.TRACKERS).get("tensorboard").options()
    return PluginChoice(group=plugins.TRACKERS, name="tensorboard", options=options)


@attrs.frozen(kw_only=True)
class TrainerConfig:
    """How long, on what, and what is written."""

    steps: int = attrs.field(default=100, validator=positive)
    backend: Backend = Backend.LOCAL
    ranks: int = attrs.field(default=1, validator=positive)
    """Processes that hold the policy, each with rows of its own."""
    device: str = "auto"
    """Device type of the ranks; `auto` takes the best that this machine has."""
    threads: int = attrs.field(default=1, validator=positive)
    """CPU threads of one rank."""
    run_dir: str = "runs"
    """Where run directories are made."""
    name: str | None = None
    """Of the run's directory; None makes one of recipe and time."""
    resume_mode: ResumeMode = ResumeMode.NEVER
    canary_every: int = attrs.field(default=20, validator=not_negative)
    """Steps between canaries; 0 keeps only the one before the first update."""
    canary_bound: float | None = attrs.field(default=None, validator=optional_positive)
    """Largest |ratio - 1| that training micro-batches may show for unchanged weights, else the run
    stops; None is 1e-6 in float32, and no bound in lower precision."""
    max_restarts: int = attrs.field(default=0, validator=not_negative)
    """Times that lost workers are rebuilt from the last checkpoint within one command."""
    start_timeout: float = attrs.field(default=120.0, validator=positive)
    """Seconds to wait for the devices that the run asks for."""
    trackers: tuple[Annotated[PluginChoice, plugins.TRACKERS, BY_NAME], ...] = attrs.field(
        factory=lambda: (_tensorboard(),)
    )
    """Plugins of `omni.trackers` beside metrics.jsonl, which is always written: names, or mappings of
    `name` and the tracker's own options."""
    grid_every: int = attrs.field(default=0, validator=not_negative)
    """Steps between grids of training samples; 0 writes none."""
    overlap_rewards: bool = True
    """Score samples while others are still being sampled."""
    cpus_per_rank: float = attrs.field(default=1.0, validator=not_negative)
    """Cores that the resource check counts for a rank."""
    cpus_per_scorer: float = attrs.field(default=0.0, validator=not_negative)
    """Cores that it counts for a scorer; 0 lets scorers share the ranks' cores."""
    cpus_per_server: float = attrs.field(default=1.0, validator=not_negative)
    """Cores that it counts for a rollout server."""
    devices_per_server: float = attrs.field(default=1.0, validator=not_negative)
    """Devices of a rollout server, of the kind that ranks use."""
    ray_address: str | None = None
    """A running Ray cluster; None takes RAY_ADDRESS, or starts Ray on this machine alone."""


@attrs.frozen(kw_only=True)
class SeedsConfig:
    """Everything random in a run follows from these."""

    data: int = 0
    """Order of prompts."""
    rollout: int = 0
    """Noise and windows of training samples, and noise of held-out ones."""
    reward: int = 0
    """What a scorer draws, where it has a process of its own (`trainer.backend: ray`)."""
    train: int = 0
    """Start of the adapters, and how rows are cut into optimizer steps."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """One run."""

    model: DiffusionModelConfig
    engine: Annotated[PluginChoice, plugins.ENGINES]
    optimizer: OptimizerConfig = attrs.field(factory=OptimizerConfig)
    checkpoint: CheckpointConfig = attrs.field(factory=CheckpointConfig)
    rollout: Annotated[PluginChoice, plugins.ROLLOUTS]
    algorithm: Annotated[PluginChoice, plugins.ALGORITHMS]
    reward: Annotated[PluginChoice, plugins.REWARDS] | None = None
    data: DataConfig
    evaluation: EvaluationConfig = attrs.field(factory=EvaluationConfig)
    trainer: TrainerConfig = attrs.field(factory=TrainerConfig)
    seeds: SeedsConfig = attrs.field(factory=SeedsConfig)

    @property
    def rows_per_step(self) -> int:
        """Samples of one step, on all ranks together."""
        samples: int = self.rollout.options.samples_per_prompt
        return self.data.prompts_per_step * samples

    @property
    def algorithm_options(self) -> AlgorithmConfig:
        """The algorithm's options as what every algorithm declares."""
        options: AlgorithmConfig = self.algorithm.options
        return options

    @property
    def reward_on_error(self) -> OnRewardError:
        """What happens to a sample that has no score."""
        options = self._reward_options
        return OnRewardError.RAISE if options is None else options.on_error

    @property
    def reward_summed(self) -> tuple[RewardTerm, ...]:
        """What the reward's score is the weighted sum of, where it is one."""
        options = self._reward_options
        return () if options is None else options.summed

    @property
    def _reward_options(self) -> RewardConfig | None:
        return None if self.reward is None else self.reward.options

    def actor(self) -> DiffusionActorConfig:
        """Everything that the trained policy needs, with what other sections decide filled in."""
        updates = self.trainer.steps * self.algorithm_options.updates_per_rollout
        engine: EngineConfig = attrs.evolve(
            self.engine.options, seed=self.seeds.train, device=self.trainer.device
        )
        total = self.optimizer.total_steps or updates
        return DiffusionActorConfig(
            model=self.model,
            engine=engine,
            optimizer=attrs.evolve(self.optimizer, total_steps=total),
            checkpoint=self.checkpoint,
            loss=DiffusionLossConfig(name=self.algorithm.name, options=self.algorithm_options),
        )
