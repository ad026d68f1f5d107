"""What has to fit together: rules between the sections of a run's config, each with the values that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omni_core import plugins
from omni_core.algorithms.base_options import cps_mistake
from omni_core.choices import Policy, StepKind
from omni_core.config import PluginChoice
from omni_core.options import (
    AlgorithmConfig,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
    EngineConfig,
    LRSchedule,
    OptimizerConfig,
    RewardConfig,
    RunFacts,
    WeightTransport,
)
from omni_trainer.launched import launched_ranks
from omni_trainer.run_config import Backend, DataConfig, EvaluationConfig, TrainerConfig

EMA = Policy.EMA.value
_LONG = 20
"""Values that fit are listed up to this many."""


def broken_rules(sections: Mapping[str, Any], raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, mistake) for each rule that the sections at hand break."""
    algorithm, rollout, data, trainer = (
        sections[name] for name in ("algorithm", "rollout", "data", "trainer")
    )
    yield from _plugin_bases(sections)
    if algorithm is not None and rollout is not None and data is not None:
        yield from _algorithm_rules(
            algorithm.options, rollout.options, data, sections["model"], sections["engine"]
        )
        if trainer is not None:
            together = _together(sections["engine"])
            yield from _divisibility(algorithm.options, rollout.options, data, trainer, together)
    if algorithm is not None:
        if algorithm.options.needs_reward and raw.get("reward") is None:
            yield "reward", f"algorithm {algorithm.name!r} needs one: reward.name=..."
        yield from _engine_rules(algorithm.options, sections["engine"], rollout)
    if trainer is not None:
        yield from _trainer_rules(trainer)
        yield from _rank_rules(sections["engine"], trainer)
    if rollout is not None and trainer is not None:
        yield from _server_rules(rollout, trainer)
    if sections["optimizer"] is not None and algorithm is not None and trainer is not None:
        yield from _schedule_rules(sections["optimizer"], algorithm.options, trainer)
    if sections["optimizer"] is not None and algorithm is not None:
        yield from _optimizer_rules(sections["optimizer"], algorithm, sections["engine"])
    if sections["evaluation"] is not None:
        yield from _evaluation_rules(sections["evaluation"], data)
        if algorithm is not None and sections["optimizer"] is not None:
            yield from _policy_rules(
                sections["evaluation"], algorithm.options, sections["optimizer"]
            )


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
    options: AlgorithmConfig,
    rollout: DiffusionRolloutConfig,
    data: DataConfig,
    model: DiffusionModelConfig | None,
    engine: PluginChoice | None,
) -> Iterator[tuple[str, str]]:
    has_adapter = model is None or model.lora is not None
    facts = RunFacts(
        num_inference_steps=rollout.sampling.num_inference_steps,
        samples_per_prompt=rollout.samples_per_prompt,
        prompts_per_step=data.prompts_per_step,
        has_adapter=has_adapter,
        keeps_copies=getattr(engine and engine.options, "keeps_policies", False),
        micro_batch_size=getattr(engine and engine.options, "micro_batch_size", None),
    )
    for path, text in options.mistakes(facts).items():
        yield f"algorithm.{path}", text


def _together(engine: PluginChoice | None) -> int:
    """Ranks that hold the same rows."""
    return int(getattr(engine and engine.options, "model_parallel_size", 1))


def _rank_rules(engine: PluginChoice | None, trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
    if engine is not None and isinstance(engine.options, EngineConfig):
        for name, text in engine.options.rank_mistakes(trainer.ranks).items():
            yield f"engine.{name}", text


def _divisibility(
    options: AlgorithmConfig,
    rollout: DiffusionRolloutConfig,
    data: DataConfig,
    trainer: TrainerConfig,
    together: int,
) -> Iterator[tuple[str, str]]:
    prompts, samples = data.prompts_per_step, rollout.samples_per_prompt
    if trainer.ranks % together:
        return  # told already, and nothing fits
    places = trainer.ranks // together
    parts = places * options.updates_per_rollout
    if (prompts * samples) % parts == 0:
        return
    near = [n for n in range(1, prompts + parts + 1) if (n * samples) % parts == 0]
    below, above = [n for n in near if n < prompts], [n for n in near if n > prompts]
    fits = " or ".join(str(n) for n in (*below[-1:], *above[:1]))
    ranks = [
        n * together
        for n in range(1, prompts * samples + 1)
        if _fits(prompts * samples, n, options)
    ]
    some = ", ".join(str(n) for n in ranks[:_LONG]) + (", ..." if len(ranks) > _LONG else "")
    shared = f" (of which {together} hold the same rows)" if together > 1 else ""
    yield (
        "data.prompts_per_step",
        f"{prompts} prompts x rollout.samples_per_prompt {samples} = {prompts * samples} rows do not "
        f"divide evenly into trainer.ranks {trainer.ranks}{shared} x algorithm.updates_per_rollout "
        f"{options.updates_per_rollout} = {parts} parts; prompts_per_step {fits} would, and so would "
        f"trainer.ranks {some or 'with another updates_per_rollout'}",
    )


def _fits(rows: int, ranks: int, options: AlgorithmConfig) -> bool:
    return rows % (ranks * options.updates_per_rollout) == 0


def _engine_rules(
    options: AlgorithmConfig, engine: PluginChoice | None, rollout: PluginChoice | None
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
    if isinstance(engine.options, EngineConfig) and rollout is not None:
        for path, text in engine.options.mistakes(options, rollout.options).items():
            yield f"engine.{path}", text


def engine_name(options: AlgorithmConfig, engine: PluginChoice) -> str:
    """Name the engine's plugin: `model_type.backend`."""
    return engine.name if "." in engine.name else f"{options.model_type}.{engine.name}"


def _trainer_rules(trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
    here = launched_ranks()
    if trainer.backend is Backend.LOCAL and trainer.ranks != here:
        n = trainer.ranks
        yield (
            "trainer.ranks",
            f"{n} ranks need trainer.backend=ray; backend local has {here}, and {n} if it is started by "
            f"torchrun --nproc-per-node {n} -m omni_trainer train ...",
        )
    names = [tracker.name for tracker in trainer.trackers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield "trainer.trackers", f"{', '.join(twice)} twice: both would write the same files"


def _server_rules(rollout: PluginChoice, trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
    options: DiffusionRolloutConfig = rollout.options
    if options.servers:
        if trainer.backend is not Backend.RAY:
            yield (
                "rollout.servers",
                f"{options.servers} servers are Ray actors: set trainer.backend=ray",
            )
        if not plugins.registry(plugins.ROLLOUTS).get(rollout.name).standalone:
            yield (
                "rollout.servers",
                f"rollout {rollout.name!r} samples in the process of the training engine; take 0",
            )
    elif options.transport is WeightTransport.OBJECT_STORE:
        yield (
            "rollout.transport",
            "object_store leads to rollout servers, and rollout.servers is 0; take auto",
        )


def _schedule_rules(
    optimizer: OptimizerConfig, options: AlgorithmConfig, trainer: TrainerConfig
) -> Iterator[tuple[str, str]]:
    steps = trainer.steps * options.updates_per_rollout
    falls = optimizer.schedule is not LRSchedule.CONSTANT
    if falls and optimizer.total_steps is not None and optimizer.total_steps < steps:
        yield (
            "optimizer.total_steps",
            f"the {optimizer.schedule.value} schedule ends after {optimizer.total_steps} optimizer "
            f"steps, and the run has {steps}: the rest would train with a rate of 0; leave it out, or "
            f"take at least {steps}",
        )


def _optimizer_rules(
    optimizer: OptimizerConfig, algorithm: PluginChoice, engine: PluginChoice | None
) -> Iterator[tuple[str, str]]:
    known = () if engine is None else getattr(engine.options, "optimizers", ())
    if engine is not None and known and optimizer.kind not in known:
        yield (
            "optimizer.kind",
            f"engine {engine.name!r} has no {optimizer.kind.value}; it has {', '.join(known)}",
        )
    if optimizer.ema is None:
        return
    if engine is not None and not getattr(engine.options, "averages_weights", False):
        yield "optimizer.ema", f"engine {engine.name!r} keeps no moving average; leave it out"
    if EMA in _policies(algorithm.options):
        yield (
            "optimizer.ema",
            f"algorithm {algorithm.name!r} keeps a moving average of its own by that name; leave it out",
        )


def _policies(options: AlgorithmConfig) -> tuple[str, ...]:
    """Policies beside the trained one that an algorithm keeps."""
    others: tuple[str, ...] = getattr(options, "other_policies", ())
    kept = (*others, options.rollout_algo().adapter)
    return tuple(name for name in kept if name not in ("default", "reference"))


def _policy_rules(
    evaluation: EvaluationConfig, options: AlgorithmConfig, optimizer: OptimizerConfig
) -> Iterator[tuple[str, str]]:
    average = () if optimizer.ema is None else (EMA,)
    known = tuple(dict.fromkeys(("default", *_policies(options), *average)))
    if evaluation.policy not in known:
        hint = "; optimizer.ema={} keeps one" if evaluation.policy == EMA else ""
        yield (
            "evaluation.policy",
            f"{evaluation.policy!r} is no policy of this run: {', '.join(known)}{hint}",
        )


def _evaluation_rules(
    evaluation: EvaluationConfig, data: DataConfig | None
) -> Iterator[tuple[str, str]]:
    if evaluation.kind is StepKind.CPS and evaluation.noise_level > 1:
        yield "evaluation.noise_level", cps_mistake(evaluation.noise_level)
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
