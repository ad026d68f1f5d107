"""The three things that are done with a run: train it (or go on), evaluate it, export it."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import structlog

from omni_core import config as core
from omni_trainer.assembly import Prompts, loaded, make_evaluator, read_prompts, started
from omni_trainer.checkpoints import Checkpoint
from omni_trainer.config import ResumeMode, RunConfig
from omni_trainer.evaluation import Evaluation, load_evaluation
from omni_trainer.export_card import write_card
from omni_trainer.group import WorkerError, WorkerGroup
from omni_trainer.run_directory import RunDirectory, with_absolute_paths, write_json
from omni_trainer.run_status import RunState, read_status, recorded
from omni_trainer.stopping import StopRequest
from omni_trainer.summary import EXPORTED, RunSummary, summarise

log = structlog.get_logger()


class RunMistakeError(ValueError):
    """What is asked for cannot be done with this run; says why."""


def run_training(
    config: RunConfig,
    *,
    run_dir: Path,
    resume: bool = False,
    resolved: core.Resolved | None = None,
) -> RunSummary:
    """Train a run to its last step.

    Args:
        config: A checked config.
        run_dir: Where everything is written; made if it is not there.
        resume: Go on with the run that is there, from its newest complete checkpoint.
        resolved: Where the config's values came from, for the record.

    Raises:
        RunDirectoryError: the directory holds a run already (or none, for a resume), or is in use.
        PromptFileError, FileNotFoundError: the prompts or the model are not there.
        WorkerError: a worker failed or died, and `trainer.max_restarts` is used up.
        CanaryError: training does not see what was sampled.
        StoppedError: Ctrl-C or SIGTERM; the run is saved, or the error says what is lost.
        NotSavedError: the same, and the checkpoint could not be written.
    """
    begun = time.perf_counter()
    run = RunDirectory(run_dir)
    resume = resume or (run.exists() and config.trainer.resume_mode is ResumeMode.AUTO)
    prompts = read_prompts(config)
    # Ranks on a cluster that was started elsewhere have another current directory.
    config = with_absolute_paths(config)
    run = RunDirectory.open(run_dir) if resume else run.free()
    with run.locked():
        if not resume:
            RunDirectory.create(run_dir, config, resolved)
        elif core.unstructure(config) != core.unstructure(run.config().config):
            run.write_config(config, resolved)
        checkpoint = run.checkpoints(config.checkpoint.keep).latest() if resume else None
        first = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None and first >= config.trainer.steps and _told(checkpoint):
            log.warning("run.finished_already", steps=first, run=str(run_dir))
            _finish(config, run, checkpoint)
        else:
            with recorded(run.path):
                _train(config, run, prompts, checkpoint)
        summary = summarise(config, run)
    return attrs.evolve(
        summary, trained=config.trainer.steps - first, seconds=time.perf_counter() - begun
    )


def _told(checkpoint: Checkpoint) -> bool:
    """Whether what came of a checkpoint's step was evaluated and told: it was, unless a signal stopped that."""
    return checkpoint.state().get("unreported") is None


def _finish(config: RunConfig, run: RunDirectory, checkpoint: Checkpoint) -> None:
    """Do what a run left undone that ended between its last save and its end."""
    exported = config.model.lora is None or (run.path / EXPORTED).exists()
    status = read_status(run.path)
    if exported and status is not None and status.state is RunState.FINISHED:
        return
    with recorded(run.path):
        if not exported:
            with loaded(attrs.evolve(config, reward=None), checkpoint) as (group, _):
                _export(config, run, group)


def _train(
    config: RunConfig, run: RunDirectory, prompts: Prompts, checkpoint: Checkpoint | None
) -> None:
    """Train to the end, rebuilding lost workers as often as the config allows."""
    restarts = 0
    stop = StopRequest()
    while True:
        try:
            with stop.listening(), started(config, run, prompts, checkpoint, stop) as parts:
                parts.trainer.fit()
                _export(config, run, parts.group)
        except WorkerError as exc:
            restarts += 1
            if not exc.died or restarts > config.trainer.max_restarts:
                raise
            checkpoint = run.checkpoints(config.checkpoint.keep).latest()
            log.warning(
                "run.restart",
                error=str(exc).partition("\n")[0],
                restart=restarts,
                of=config.trainer.max_restarts,
                step=0 if checkpoint is None else checkpoint.step,
            )
        else:
            return


def _export(config: RunConfig, run: RunDirectory, group: WorkerGroup) -> None:
    """Write the trained adapter, and where it is: a finished run that is resumed says it again."""
    if config.model.lora is not None:
        run.export.mkdir(exist_ok=True)
        policy = config.evaluation.policy
        written: Path = group.broadcast("export_adapter", run.export.absolute(), policy)[0]
        call = group.broadcast("stock_call", config.evaluation.sampling)[0]
        write_card(run.export, config, call, load_evaluation(run.evaluations, config.trainer.steps))
        place = str(written.relative_to(run.path.absolute()))
        write_json(run.path / EXPORTED, {"adapter": place})


def evaluate_run(run_dir: Path, *, step: int | None = None) -> Evaluation:
    """Score a checkpoint of a run on its held-out prompts; the run's own files stay as they are.

    Raises:
        CheckpointError: no such checkpoint.
        RunMistakeError: the run has no held-out prompts.
    """
    run = RunDirectory.open(run_dir)
    config = run.config().config
    checkpoint = run.checkpoints(config.checkpoint.keep).at(step)
    with loaded(config, checkpoint) as (group, pool):
        evaluator = make_evaluator(config, read_prompts(config), group, pool)
        if evaluator is None:
            msg = f"{run_dir}: nothing to evaluate: data.heldout is not set"
            raise RunMistakeError(msg)
        return evaluator.run(checkpoint.step, weight_version=None)[0]


def export_run(
    run_dir: Path,
    *,
    step: int | None = None,
    output: Path | None = None,
    merged: bool = False,
    policy: str | None = None,
) -> Path:
    """Write what a run's checkpoint holds for stock pipelines.

    Args:
        run_dir: Of the run.
        step: Of the checkpoint; None takes the newest.
        output: Where to; None is `export/` in the run, or `export/pipeline/`.
        merged: A whole pipeline instead of the adapter; a run that trained every weight has no other form.
        policy: `default` is the trained one, `ema` its moving average; None takes the evaluated one.

    Returns:
        The adapter's file, or the pipeline's directory.

    Raises:
        CheckpointError: no such checkpoint.
        ValueError: no such policy; lists those that the run kept.
    """
    run = RunDirectory.open(run_dir)
    config = run.config().config
    checkpoint = run.checkpoints(config.checkpoint.keep).at(step)
    whole = merged or config.model.lora is None
    target = output or (run.export / "pipeline" if whole else run.export)
    target.mkdir(parents=True, exist_ok=True)
    policy = policy or config.evaluation.policy
    export = "export_pipeline" if whole else "export_adapter"
    with loaded(attrs.evolve(config, reward=None), checkpoint) as (group, _):
        path: Path = group.broadcast(export, target.absolute(), policy)[0]
        call = group.broadcast("stock_call", config.evaluation.sampling)[0]
    scores = None
    if policy == config.evaluation.policy:
        scores = load_evaluation(run.evaluations, checkpoint.step)
    write_card(target, config, call, scores)
    return path


__all__ = ["RunSummary", "evaluate_run", "export_run", "run_training"]
