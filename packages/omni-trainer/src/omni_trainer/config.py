"""A run's whole configuration: its sections, how it is loaded, and the rules between sections.

Everything that can be wrong is found here, before anything starts and all at once; torch is not
imported. Where each value came from is kept beside it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import attrs

from omni_core import config as core
from omni_core import plugins
from omni_core.choices import StepKind
from omni_core.config import ConfigError, PluginChoice, Resolved
from omni_core.options import (
    AlgorithmConfig,
    CheckpointConfig,
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
    DiffusionSamplingConfig,
    EngineConfig,
    OnRewardError,
    OptimizerConfig,
    RewardConfig,
    RunFacts,
    not_negative,
    optional_positive,
    positive,
)
from omni_trainer.data import BadRowPolicy, Tail

DEFAULTS = core.Layer(
    source="default", values={"engine": {"name": "fsdp2"}, "rollout": {"name": "engine"}}
)
_LONG = 20
"""Values that fit are listed up to this many."""


class Backend(enum.StrEnum):
    """Where the workers live."""

    LOCAL = "local"
    """In the driver's own process: one rank."""
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
    """File of training prompts (.txt or .jsonl), or `package:MODULE/PATH`."""
    heldout: str | None = None
    """File of prompts that are only evaluated."""
    prompt_column: str = "prompt"
    """Key of the prompt in a JSONL row."""
    id_column: str | None = None
    """Key of a JSONL row's name; None takes the line number."""
    prompts_per_step: int = attrs.field(default=8, validator=positive)
    tail: Tail = Tail.CARRY
    on_bad_row: BadRowPolicy = BadRowPolicy.RAISE
    shuffle: bool = True
    """Each epoch in an order of its own."""


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
    max_prompts: int | None = attrs.field(default=None, validator=optional_positive)
    """Only the first so many prompts of the file; None takes all."""
    batch_size: int = attrs.field(default=256, validator=positive)
    """Pictures under way at once, on all ranks together: bounds the memory that media take."""
    grid_prompts: int = attrs.field(default=8, validator=not_negative)
    """Prompts shown in the grid (their first sample); 0 writes none."""


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
    trackers: tuple[str, ...] = ("jsonl",)
    """Plugins of `omni.trackers`."""
    grid_every: int = attrs.field(default=0, validator=not_negative)
    """Steps between grids of training samples; 0 writes none."""
    overlap_rewards: bool = True
    """Score samples while others are still being sampled."""
    cpus_per_rank: float = attrs.field(default=1.0, validator=not_negative)
    """Cores that the resource check counts for a rank."""
    cpus_per_scorer: float = attrs.field(default=0.0, validator=not_negative)
    """Cores that it counts for a scorer; 0 lets scorers share the ranks' cores."""
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
    """What a scorer draws."""
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
        options: RewardConfig | None = None if self.reward is None else self.reward.options
        return OnRewardError.RAISE if options is None else options.on_error

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


@attrs.frozen(kw_only=True)
class LoadedRun:
    """A checked config and where it came from."""

    config: RunConfig
    resolved: Resolved
    source: str
    """The recipe's name, or the file's path."""


# -- loading ----------------------------------------------------------------------------------------


def load_run(source: str, overrides: Sequence[str] = ()) -> LoadedRun:
    """Read a recipe or a YAML file, lay the overrides over it, and check all of it.

    Args:
        source: Name of a recipe, or path of a YAML file (anything with a `/` or ending in .yaml, .yml).
        overrides: `dotted.key=value`.

    Raises:
        ConfigError: every mistake, one a line, each with its path.
        PluginNotFoundError: no such recipe; lists those that are installed.
        FileNotFoundError: no such file.
    """
    added = {text[1:].partition("=")[0].strip() for text in overrides if text.startswith("+")}
    layers = [
        DEFAULTS,
        _read(source),
        core.parse_overrides([text.removeprefix("+") for text in overrides]),
    ]
    resolved = core.merge(layers, choices=_choices())
    return LoadedRun(config=check(resolved.values, added=added), resolved=resolved, source=source)


def _read(source: str) -> core.Layer:
    if "/" in source or source.endswith((".yaml", ".yml")):
        path = Path(source).expanduser()
        if not path.is_file():
            msg = f"config file {source!r} does not exist"
            raise FileNotFoundError(msg)
        return core.read_yaml(path.read_text(encoding="utf-8"), source=source)
    plugin = plugins.registry(plugins.RECIPES).get(source)
    recipe = plugin.build(plugin.options())
    return core.read_yaml(recipe.yaml, source=f"recipe {source}")


def check(values: Mapping[str, Any], *, added: Collection[str] = ()) -> RunConfig:
    """Build the config of plain values.

    Args:
        values: As YAML has them.
        added: Paths that were written as `+path`, which is a mistake whatever they are.

    Raises:
        ConfigError: every mistake at once: keys, types, choices, and what does not fit together.
    """
    attrs.resolve_types(RunConfig, include_extras=True)
    fields = {field.name: field for field in attrs.fields(RunConfig)}
    mistakes = [
        f"{key}: unknown key; known: {', '.join(fields)}" for key in values if key not in fields
    ]
    sections: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            sections[name], wrong = _section(name, field.type, values[name])
            mistakes += wrong
        elif field.default is attrs.NOTHING:
            mistakes.append(f"{name}: required and missing")
            sections[name] = None
        else:
            factory = getattr(field.default, "factory", None)
            sections[name] = field.default if factory is None else factory()
    mistakes += [f"{path}: {text}" for path, text in _between(sections, values)]
    for path in added:
        if not any(line.startswith(f"{path}:") for line in mistakes):
            mistakes.append(f"{path}: a key that exists is set without `+`: write {path}=...")
    if mistakes:
        raise ConfigError([_with_hint(line) for line in mistakes])
    return RunConfig(**sections)


def _section(name: str, cls: Any, raw: Any) -> tuple[Any, list[str]]:
    """Structure one section; unknown keys alone do not keep it from the rules between sections."""
    try:
        return core.converter.structure(raw, cls), []
    except ConfigError as exc:
        mistakes = [f"{name}.{line}" for line in exc.mistakes]
    except (ValueError, TypeError, plugins.PluginNotFoundError, plugins.PluginError) as exc:
        return None, [f"{name}: {exc.args[0] if exc.args else type(exc).__name__}"]
    unknown = [line.partition(": ")[0] for line in mistakes if ": unknown key; " in line]
    if len(unknown) < len(mistakes):
        return None, mistakes
    try:
        return core.converter.structure(_without(raw, unknown, name), cls), mistakes
    except (ConfigError, ValueError):
        return None, mistakes


def _without(values: Mapping[str, Any], paths: Collection[str], path: str) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        here = f"{path}.{key}"
        if here not in paths:
            kept[key] = _without(value, paths, here) if isinstance(value, Mapping) else value
    return kept


# -- rules between sections -------------------------------------------------------------------------


def _between(sections: Mapping[str, Any], raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, mistake) for each rule that the sections at hand break."""
    algorithm, rollout, data, trainer = (
        sections[name] for name in ("algorithm", "rollout", "data", "trainer")
    )
    yield from _plugin_bases(sections)
    if algorithm is not None and rollout is not None and data is not None:
        yield from _algorithm_rules(algorithm.options, rollout.options, data)
        if trainer is not None:
            yield from _divisibility(algorithm.options, rollout.options, data, trainer)
    if algorithm is not None:
        if algorithm.options.needs_reward and raw.get("reward") is None:
            yield "reward", f"algorithm {algorithm.name!r} needs one: reward.name=..."
        yield from _engine_rules(algorithm.options, sections["engine"])
    if trainer is not None:
        yield from _trainer_rules(trainer)
    if sections["evaluation"] is not None:
        yield from _evaluation_rules(sections["evaluation"], data)


def _plugin_bases(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    bases = {
        "engine": EngineConfig,
        "rollout": DiffusionRolloutConfig,
        "algorithm": AlgorithmConfig,
        "reward": RewardConfig,
    }
    for name, base in bases.items():
        choice = sections[name]
        if choice is not None and not isinstance(choice.options, base):
            yield (
                f"{name}.name",
                f"options of {choice.name!r} are {type(choice.options).__name__}, which does not "
                f"derive from omni_core.{base.__name__}",
            )


def _algorithm_rules(
    options: AlgorithmConfig, rollout: DiffusionRolloutConfig, data: DataConfig
) -> Iterator[tuple[str, str]]:
    facts = RunFacts(
        num_inference_steps=rollout.sampling.num_inference_steps,
        samples_per_prompt=rollout.samples_per_prompt,
        prompts_per_step=data.prompts_per_step,
    )
    for path, text in options.mistakes(facts).items():
        yield f"algorithm.{path}", text


def _divisibility(
    options: AlgorithmConfig,
    rollout: DiffusionRolloutConfig,
    data: DataConfig,
    trainer: TrainerConfig,
) -> Iterator[tuple[str, str]]:
    prompts, samples = data.prompts_per_step, rollout.samples_per_prompt
    parts = trainer.ranks * options.updates_per_rollout
    if (prompts * samples) % parts == 0:
        return
    near = [n for n in range(1, prompts + parts + 1) if (n * samples) % parts == 0]
    below, above = [n for n in near if n < prompts], [n for n in near if n > prompts]
    fits = " or ".join(str(n) for n in (*below[-1:], *above[:1]))
    ranks = [n for n in range(1, prompts * samples + 1) if _fits(prompts * samples, n, options)]
    some = ", ".join(str(n) for n in ranks[:_LONG]) + (", ..." if len(ranks) > _LONG else "")
    yield (
        "data.prompts_per_step",
        f"{prompts} prompts x rollout.samples_per_prompt {samples} = {prompts * samples} rows do not "
        f"divide evenly into trainer.ranks {trainer.ranks} x algorithm.updates_per_rollout "
        f"{options.updates_per_rollout} = {parts} parts; prompts_per_step {fits} would, and so would "
        f"trainer.ranks {some or 'with another updates_per_rollout'}",
    )


def _fits(rows: int, ranks: int, options: AlgorithmConfig) -> bool:
    return rows % (ranks * options.updates_per_rollout) == 0


def _engine_rules(
    options: AlgorithmConfig, engine: PluginChoice | None
) -> Iterator[tuple[str, str]]:
    if engine is None:
        return
    name = engine_name(options, engine)
    try:
        plugins.registry(plugins.ENGINES).get(name)
    except (plugins.PluginNotFoundError, plugins.PluginError) as exc:
        yield "engine.name", str(exc.args[0])
    defaults = EngineConfig()
    if getattr(engine.options, "seed", defaults.seed) != defaults.seed:
        yield "engine.seed", "set seeds.train instead: a run's seeds stand in one place"
    if getattr(engine.options, "device", defaults.device) != defaults.device:
        yield "engine.device", "set trainer.device instead: it is the device of the whole rank"


def engine_name(options: AlgorithmConfig, engine: PluginChoice) -> str:
    """Name the engine's plugin: `model_type.backend`."""
    return engine.name if "." in engine.name else f"{options.model_type}.{engine.name}"


def _trainer_rules(trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
    if trainer.backend is Backend.LOCAL and trainer.ranks != 1:
        yield (
            "trainer.ranks",
            f"{trainer.ranks} ranks need trainer.backend=ray; backend local has 1",
        )
    for tracker in trainer.trackers:
        try:
            plugins.registry(plugins.TRACKERS).get(tracker)
        except (plugins.PluginNotFoundError, plugins.PluginError) as exc:
            yield "trainer.trackers", str(exc.args[0])


def _evaluation_rules(
    evaluation: EvaluationConfig, data: DataConfig | None
) -> Iterator[tuple[str, str]]:
    stochastic = evaluation.kind is not StepKind.ODE
    if stochastic != (evaluation.noise_level > 0):
        wants = "above 0" if stochastic else "0"
        yield (
            "evaluation.noise_level",
            f"evaluation.kind {evaluation.kind.value} takes a noise level of {wants}, got "
            f"{evaluation.noise_level}",
        )
    if evaluation.every and data is not None and data.heldout is None:
        yield (
            "data.heldout",
            f"evaluation.every={evaluation.every} needs a file of held-out prompts",
        )


# -- hints and listings -----------------------------------------------------------------------------

ELSEWHERE: Mapping[str, str] = {
    "save_freq": "checkpoint.every",
    "save_every": "checkpoint.every",
    "max_ckpt_to_keep": "checkpoint.keep",
    "test_freq": "evaluation.every",
    "eval_freq": "evaluation.every",
    "val_before_train": "evaluation.initial",
    "total_training_steps": "trainer.steps",
    "max_steps": "trainer.steps",
    "n_gpus_per_node": "trainer.ranks",
    "num_gpus": "trainer.ranks",
    "experiment_name": "trainer.name",
    "default_local_dir": "trainer.run_dir",
    "logger": "trainer.trackers",
    "train_batch_size": "data.prompts_per_step",
    "learning_rate": "optimizer.lr",
    "seed": "seeds.rollout",
}
"""What other systems call a key of ours: for the hint of an unknown key."""


def _with_hint(line: str) -> str:
    """Name the nearest key of the whole config where the section itself has none."""
    found = re.match(r"(?P<path>[^:]*): unknown key; known: ", line)
    if not found:
        return line
    key = found["path"].rpartition(".")[2]
    names: dict[str, str] = dict(ELSEWHERE)
    for path in known_paths():
        names.setdefault(path.rpartition(".")[2], path)
    close = plugins.nearest(key, list(names))
    if close is None:
        return line
    return line.replace("unknown key; ", f"unknown key; did you mean {names[close]!r}? ", 1)


def known_paths() -> list[str]:
    """List every key of a run but the plugins' own options."""
    return list(_paths(RunConfig, ""))


def _paths(cls: Any, path: str) -> Iterator[str]:
    attrs.resolve_types(cls, include_extras=True)
    for field in attrs.fields(cls):
        here = f"{path}.{field.name}" if path else field.name
        inner = [arg for arg in (field.type, *get_args(field.type)) if attrs.has(arg)]
        if field.name in _choices() and not path:
            yield f"{here}.name"
        elif inner:
            yield from _paths(inner[0], here)
        else:
            yield here


def _choices() -> frozenset[str]:
    """Name the sections that pick a plugin."""
    return frozenset({"engine", "rollout", "algorithm", "reward"})


def show(loaded: LoadedRun) -> list[str]:
    """Write each value of the resolved config with where it came from, one a line."""
    values = core.unstructure(loaded.config)
    rows = [
        (f"{path}: {value}", core.source_of(path, loaded.resolved.sources))
        for path, value in core.leaves(values)
    ]
    width = min(max(len(text) for text, _ in rows), 80)
    return [f"{text:<{width}}  # {source}" for text, source in rows]
