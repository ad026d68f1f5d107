"""The parts of a run, put together from its config: ranks, scorers, prompts, trackers, the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext

import attrs
import structlog

from omni_core import resources
from omni_core.losses import algorithm
from omni_core.reward import RewardFunction
from omni_core.trajectory import SamplingSpec
from omni_trainer.checkpoints import Checkpoint
from omni_trainer.config import Backend, RunConfig, engine_name
from omni_trainer.data import PromptFileError, PromptRow, PromptSampler, load_prompts
from omni_trainer.evaluation import Evaluator
from omni_trainer.group import LocalGroup, WorkerGroup
from omni_trainer.launched import launched_ranks
from omni_trainer.loop import Trainer
from omni_trainer.observer import Observer, make_trackers, positions_of
from omni_trainer.reporting.progress import Progress
from omni_trainer.reward_pool import LocalRewardPool, NoRewards, RewardPool
from omni_trainer.rewards.build import build_reward
from omni_trainer.rollout_plan import sampling_spec
from omni_trainer.row_group import by_rows
from omni_trainer.run_directory import RANKS, RunDirectory, write_json
from omni_trainer.run_workers import RunWorkers
from omni_trainer.stopping import StopRequest
from omni_trainer.workers.actor_rollout_ref import ActorRolloutRefWorker
from omni_trainer.workers.process import Place
from omni_trainer.workers.rank import ActorRolloutRefConfig, RankFacts
from omni_trainer.workers.reward import RewardWorker

log = structlog.get_logger()


@attrs.frozen(kw_only=True)
class Prompts:
    """The rows of a run's files."""

    train: tuple[PromptRow, ...]
    heldout: tuple[PromptRow, ...]


@attrs.frozen(kw_only=True)
class Parts:
    """A started run."""

    trainer: Trainer
    evaluator: Evaluator | None
    group: WorkerGroup
    observer: Observer


@contextmanager
def workers(config: RunConfig) -> Iterator[tuple[WorkerGroup, RewardPool, list[RankFacts]]]:
    """Start ranks and scorers, which load their models at the same time, and end them."""
    with ExitStack() as stack:
        made = make_workers(config)
        group, pool, servers = made.group, made.pool, made.servers
        stack.enter_context(made.session)
        if servers is not None:
            stack.callback(servers.close)
        stack.callback(group.shutdown)
        stack.callback(pool.close)
        with ThreadPoolExecutor(2) as beside:
            scorers = beside.submit(pool.start)
            rollout = None if servers is None else beside.submit(servers.start)
            group.start()
            reached = None if rollout is None else rollout.result()
            facts: list[RankFacts] = group.broadcast("init_model", reached)
            scorers.result()
        yield by_rows(group, facts), pool, facts


@contextmanager
def started(
    config: RunConfig,
    run: RunDirectory,
    prompts: Prompts,
    checkpoint: Checkpoint | None,
    stop: StopRequest,
) -> Iterator[Parts]:
    """Start workers, scorers and trackers of a run, and end them."""
    trackers = make_trackers(config)
    with ExitStack() as stack:
        group, pool, facts = stack.enter_context(workers(config))
        write_json(run.path / RANKS, {"ranks": [attrs.asdict(one) for one in facts]})
        evaluator = make_evaluator(config, prompts, group, pool, stop)
        done = 0 if checkpoint is None else checkpoint.step
        progress = stack.enter_context(Progress(config.trainer.steps, done=done))
        observer = Observer(config, run, progress)
        stack.push(lambda kind, *_: observer.close(failed=kind is not None))
        trainer = Trainer(
            config,
            group=group,
            pool=pool,
            prompts=make_sampler(config, prompts),
            sampling=rollout_sampling(config, group),
            evaluator=evaluator,
            checkpoints=run.checkpoints(config.checkpoint.keep),
            observer=observer,
            weight_version=facts[0].weight_version,
            stop=stop,
        )
        if checkpoint is not None:
            trainer.load(checkpoint)
        positions = None if checkpoint is None else positions_of(checkpoint.state())
        observer.open(trackers, positions)
        yield Parts(trainer=trainer, evaluator=evaluator, group=group, observer=observer)


def read_prompts(config: RunConfig) -> Prompts:
    """Read the run's prompt files, with the reward's targets."""
    reward: RewardFunction | None = None
    if config.reward is not None:
        reward = build_reward(config.reward.name, config.reward.options)
    data = config.data

    def rows(path: str) -> tuple[PromptRow, ...]:
        found = load_prompts(
            resources.resolve(path),
            reward=reward,
            on_bad_row=data.on_bad_row,
            columns=data.columns,
        )
        for message in found.skipped:
            log.warning("data.row_skipped", row=message)
        return found.rows

    prompts = Prompts(
        train=rows(data.train), heldout=() if data.heldout is None else rows(data.heldout)
    )
    check_teachers(config, prompts.train)
    return prompts


def check_teachers(config: RunConfig, rows: Sequence[PromptRow]) -> None:
    """Check that the algorithm's teachers are there, and that every row that is trained on has one.

    Raises:
        FileNotFoundError: no such directory.
        PromptFileError: rows name none of them; lists them by line.
    """
    method = algorithm(config.actor().loss)
    for name, path in method.teachers.items():
        if not resources.resolve(path).is_dir():
            msg = f"algorithm.teachers: {name!r} is at {path!r}, where there is no directory"
            raise FileNotFoundError(msg)
    mistakes = []
    for row in rows:
        try:
            method.teacher_of(row.metadata)
        except ValueError as exc:
            mistakes.append(f"{config.data.train}:{row.line}: {exc}")
    if mistakes:
        msg = f"{len(mistakes)} of {len(rows)} rows of data.train have no teacher:"
        raise PromptFileError(msg, mistakes)


def make_sampler(config: RunConfig, prompts: Prompts) -> PromptSampler:
    """Make what deals the training prompts."""
    sampler = PromptSampler(
        prompts.train,
        batch_size=config.data.prompts_per_step,
        seed=config.seeds.data,
        tail=config.data.tail,
        shuffle=config.data.shuffle,
    )
    log.info(
        "data.train",
        rows=len(prompts.train),
        steps_per_epoch=sampler.steps_per_epoch,
        tail=config.data.tail.value,
    )
    return sampler


def make_evaluator(
    config: RunConfig,
    prompts: Prompts,
    group: WorkerGroup,
    pool: RewardPool,
    stop: StopRequest | None = None,
) -> Evaluator | None:
    """Make what scores the held-out prompts; None where there are none."""
    if not prompts.heldout or config.reward is None:
        return None
    evaluation = config.evaluation
    sigmas = group.broadcast("schedule", evaluation.sampling)[0]
    sampling = sampling_spec(
        evaluation.sampling,
        config.model.pipeline,
        sigmas=sigmas,
        kind=evaluation.kind,
        noise_level=evaluation.noise_level,
    )
    return Evaluator(
        evaluation,
        prompts.heldout,
        sampling=sampling,
        seed=config.seeds.rollout,
        on_error=config.reward_on_error,
        group=group,
        pool=pool,
        stop=stop,
    )


def rollout_sampling(config: RunConfig, group: WorkerGroup) -> SamplingSpec:
    """Ask the ranks for the schedule, and put together how training samples are drawn."""
    sampling = config.rollout.options.sampling
    algo = config.algorithm_options.rollout_algo()
    return sampling_spec(
        sampling,
        config.model.pipeline,
        sigmas=group.broadcast("schedule", sampling)[0],
        kind=algo.kind,
        noise_level=algo.noise_level,
    )


def worker_config(config: RunConfig) -> ActorRolloutRefConfig:
    """Put together what a rank is built from."""
    full = engine_name(config.algorithm_options, config.engine)
    return ActorRolloutRefConfig(
        actor=config.actor(),
        backend=full.partition(".")[2],
        rollout=config.rollout.name,
        rollout_options=config.rollout.options,
        device=config.trainer.device,
        input_images=config.data.image_column is not None,
    )


def make_workers(config: RunConfig) -> RunWorkers:
    """Make ranks, scorers and servers where the config puts them, and the session that they live in."""
    if config.trainer.backend is Backend.RAY:
        from omni_trainer.rpc import ray_workers

        return ray_workers(config, worker_config(config))
    if launched_ranks() > 1:
        return _launched_workers(config)
    place = Place(threads=config.trainer.threads)
    group = LocalGroup(lambda: ActorRolloutRefWorker(worker_config(config), place=place))
    if config.reward is None:
        return RunWorkers(session=nullcontext(), group=group, pool=NoRewards())
    name, options = config.reward.name, config.reward.options
    pool = LocalRewardPool(
        lambda: RewardWorker(name, options),
        workers=options.workers,
        overlap=config.trainer.overlap_rewards,
    )
    return RunWorkers(session=nullcontext(), group=group, pool=pool)


def _launched_workers(config: RunConfig) -> RunWorkers:
    """Describe ranks and scorers in the processes of a launcher."""
    from omni_trainer.launched.group import LaunchedGroup, LaunchedRewardPool

    reward = config.reward
    group = LaunchedGroup(
        ActorRolloutRefWorker,
        worker_config(config),
        device=config.trainer.device,
        threads=config.trainer.threads,
        reward=None if reward is None else (reward.name, reward.options),
    )
    pool: RewardPool = NoRewards() if reward is None else LaunchedRewardPool(group)
    return RunWorkers(session=nullcontext(), group=group, pool=pool)


@contextmanager
def loaded(config: RunConfig, checkpoint: Checkpoint) -> Iterator[tuple[WorkerGroup, RewardPool]]:
    """Start the workers of a run with the weights of a checkpoint."""
    with workers(config) as (group, pool, _):
        saved = checkpoint.state()["workers"]
        states = saved if len(saved) == group.ranks else [saved[0]] * group.ranks
        group.each("load_checkpoint", [(checkpoint.directory, own) for own in states])
        yield group, pool
