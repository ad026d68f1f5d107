"""The training loop: sample -> reward -> advantage -> update -> validate -> save.

The driver holds metadata: requests, scores, advantages and plans. Samples stay with the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import structlog

from omni_core.losses import algorithm
from omni_core.metrics import mean_by_name
from omni_core.resident import resident_bytes
from omni_core.trajectory import SamplingSpec
from omni_trainer.canary import check_echo, judge
from omni_trainer.checkpoints import Checkpoint, Checkpoints
from omni_trainer.config import RunConfig, changes, trained_with
from omni_trainer.data import PromptSampler
from omni_trainer.evaluation import Evaluator
from omni_trainer.group import WorkerGroup
from omni_trainer.observer import Observer
from omni_trainer.prompt_watch import PromptWatch
from omni_trainer.reward_pool import PoolCounts, RewardPool
from omni_trainer.rollout_plan import RolloutPlan, plan_rollout
from omni_trainer.samples import Samples, sample_and_score
from omni_trainer.scores import ScoredStep, score_step
from omni_trainer.stopping import NotSavedError, StopAskedError, StopRequest, told_by, what_is_lost
from omni_trainer.update_plan import plan_updates
from omni_trainer.update_results import update_metrics

GIB = 2**30
RESIDENT = "_rss"
"""How names of a rollout's metrics end that are GiB of a process: the largest counts, under `memory/`."""

log = structlog.get_logger()


class Trainer:
    """One run, from wherever it stands to its last step."""

    def __init__(
        self,
        config: RunConfig,
        *,
        group: WorkerGroup,
        pool: RewardPool,
        prompts: PromptSampler,
        sampling: SamplingSpec,
        evaluator: Evaluator | None,
        checkpoints: Checkpoints,
        observer: Observer,
        weight_version: int,
        stop: StopRequest | None = None,
    ) -> None:
        self.config = config
        self.group = group
        self.pool = pool
        self.prompts = prompts
        self.sampling = sampling
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.observer = observer
        self.stop = stop or StopRequest()
        self.stop.elsewhere = group.stop_asked
        self.algorithm = algorithm(config.actor().loss)
        self.step = 0
        """Trained steps."""
        self.weight_version = weight_version
        self.recompute = False
        """Old log-probs come from training micro-batches, as the last canary decided."""
        self.floors: dict[int, float] = {}
        """Sampling step -> noise floor, as the canaries measured it."""
        self.metrics: dict[str, float] = {}
        """Of the step under way."""
        self.counted = PoolCounts()
        """What the scorers had counted before this step."""
        self.prompt_watch = PromptWatch()
        self.unreported = config.evaluation.initial and evaluator is not None
        """What came of the last step is not evaluated and told yet; of step 0, what is there before it."""
        self.saved: int | None = None
        """Step of the newest checkpoint."""
        self._begun: dict[str, Any] | None = None
        """The state before a step under way, as a checkpoint holds it."""
        self._looked = False
        self._compiled = 0.0
        """Seconds that compiling took so far."""

    def fit(self) -> None:
        """Train to the last step; where it is asked to stop before, stop where the state is whole and save.

        Raises:
            StoppedError: it was asked to stop, by a signal.
            NotSavedError: it was, and the checkpoint could not be written.
            WorkerError: a worker failed or died.
            CanaryError: training does not see what was sampled.
            UnscoredError: a sample has no score, and the config says that it must.
        """
        with self.stop.deferred():
            try:
                if self._fit_or_save():
                    return
            except KeyboardInterrupt:
                raise self.stop.error(lost=self._lost()) from None
            except Exception as exc:
                if self.stop.asked is None:
                    raise
                raise self._not_saved(exc) from exc
        raise self.stop.error()

    def _fit_or_save(self) -> bool:
        """Train, and say whether to the end: otherwise the run was asked to stop, and is saved."""
        try:
            self._fit()
            self.stop.look()
        except StopAskedError:
            self._save_stopped()
            return False
        return True

    def _fit(self) -> None:
        if self.unreported:
            self._finish_step()
        while self.step < self.config.trainer.steps:
            self.stop.look()
            self.group.broadcast("rollout_metrics")  # what was done between steps is no step's
            self._begun = self._position()
            with self.timed("step"):
                self.train()
            self.measure()
            self.step += 1
            self._begun, self.unreported = None, True
            self._finish_step()

    def _finish_step(self) -> None:
        """Evaluate and save where that is due, and tell what came of the step."""
        if self.step == 0 or self.due(self.config.evaluation.every):
            self.validate()
        self.report()
        self.unreported = False
        if self.step > 0 and self.due(self.config.checkpoint.every):
            self.save()

    def train(self) -> None:
        """Take one step; its samples are let go when it is done."""
        samples = self.sample()
        with self.timed("advantages"):
            scored = score_step(
                samples, self.algorithm, self.config.reward_on_error, self.config.reward_summed
            )
        self.metrics |= scored.metrics
        self.stop.look()
        self.watch(samples)
        self.stop.look()
        self.update(samples, scored)

    def sample(self) -> Samples:
        """Sample the next prompts, scoring while sampling goes on."""
        samples = sample_and_score(self.group, self.pool, self.plan(), trained=True, stop=self.stop)
        check_echo(
            [source.info for source in samples.sources],
            asked=self.sampling,
            seeds=samples.plan.seeds,
            adapter=self.config.algorithm_options.rollout_algo().adapter,
            weight_version=self.weight_version,
        )
        counts = self.pool.counts()
        self.metrics["time/sample"] = samples.sampling_seconds
        if samples.decode_seconds is not None:
            self.metrics["time/decode"] = samples.decode_seconds
        if self.config.reward is not None:
            self.metrics |= {
                "reward/retries": float(counts.retries - self.counted.retries),
                "time/reward": counts.seconds - self.counted.seconds,
                "time/reward_wait": samples.waiting_seconds,
            }
        if counts.resident:
            self.metrics["memory/reward_rss"] = counts.resident / GIB
        self.counted = counts
        self.metrics |= self.prompt_watch.metrics(samples)
        self.observer.samples(self.step + 1, samples, self.group)
        return samples

    def plan(self) -> RolloutPlan:
        """Deal the next prompts, and make requests of them."""
        batch = self.prompts.next()
        self.metrics["data/epoch"] = float(batch.epoch)
        schedule = self.sampling.schedule()
        return plan_rollout(
            batch,
            purpose="rollout",
            step=self.step,
            samples_per_prompt=self.config.rollout.options.samples_per_prompt,
            base_seed=self.config.seeds.rollout,
            sampling=self.sampling,
            window=lambda seed: self.algorithm.window(schedule, seed=seed, iteration=self.step),
            ranks=self.group.size,
            adapter=self.config.algorithm_options.rollout_algo().adapter,
            weight_version=self.weight_version,
        )

    def watch(self, samples: Samples) -> None:
        """Run the canaries where they are due, and once after every start of the workers."""
        if not samples.stochastic:
            return  # no step has a log-prob
        every = self.config.trainer.canary_every
        due = self.step == 0 or (every > 0 and self.step % every == 0)
        if not due and self._looked:
            return
        with self.timed("canary"):
            refs = [samples.refs_of(rank) for rank in range(self.group.size)]
            reports = self.group.scatter("canary", [()] * self.group.size, refs)
        clip = self.config.algorithm_options.clip
        if self.config.actor().engine.trains_sampling_graph:
            clip = None  # the ratio is 1 exactly: no floor comes near a clip
        verdict = judge(
            reports,
            asked=self.sampling,
            dtype=self.config.model.dtype,
            bound=self.config.trainer.canary_bound,
            clip=clip,
        )
        self._looked = True
        if not due:
            # A resumed run looks once more than an undisturbed one, and must not differ by it.
            return
        self.metrics |= {"canary/exact": verdict.exact, "canary/floor": verdict.floor}
        if verdict.recompute != self.recompute:
            source = "training micro-batches" if verdict.recompute else "the rollout"
            log.warning("old_log_probs.source", now=source, floor=verdict.floor, clip=clip)
        self.recompute = verdict.recompute
        self.floors |= verdict.floors

    def update(self, samples: Samples, scored: ScoredStep) -> None:
        """Take the optimizer steps, and let the rollout sample with what came of them."""
        plans = plan_updates(
            scored.rows,
            updates=self.config.algorithm_options.updates_per_rollout,
            ranks=self.group.size,
            seed=self.config.seeds.train,
            iteration=self.step,
        )
        refs = [[samples.sources[source].ref for source in plan.sources] for plan in plans]
        with self.timed("update"):
            results = self.group.scatter(
                "update_actor",
                [(attrs.evolve(plan, floor=self.floors), self.recompute) for plan in plans],
                refs,
            )
        with self.timed("push"):
            self.weight_version = self.group.broadcast("update_weights")[0]
        self.metrics |= update_metrics(results)
        compiled = max(result.compile_seconds for result in results)
        if compiled > 0:
            # Warm-up, which is also in the time of whatever waited for it.
            self.metrics["time/compile"] = compiled - self._compiled
        self._compiled = compiled
        self.metrics["memory/driver_rss"] = resident_bytes() / GIB
        if not self.group.in_driver:
            self.metrics["memory/actor_rss"] = max(one.resident for one in results) / GIB
        if samples.stochastic:
            self.metrics["rollout/old_log_probs_recomputed"] = float(self.recompute)

    def measure(self) -> None:
        """Ask the ranks what their rollouts measured in this step, and what share pushing had."""
        measured = self.group.broadcast("rollout_metrics")
        for name, value in mean_by_name(measured).items():
            if name.endswith(RESIDENT):
                self.metrics[f"memory/{name}"] = max(one.get(name, 0.0) for one in measured)
            else:
                self.metrics[f"rollout/{name}"] = value
        self.metrics["time/push_share"] = self.metrics["time/push"] / self.metrics["time/step"]

    def validate(self) -> None:
        """Score the held-out prompts with the policy as it is."""
        if self.evaluator is None:
            return
        self.stop.look()
        with self.timed("validate"):
            found, pictures = self.evaluator.run(self.step, weight_version=self.weight_version)
            if self.step < self.config.trainer.steps:
                # A rollout that holds one policy at a time gets back the one that samples.
                self.group.broadcast("update_weights")
        counts = self.pool.counts()  # else the next step would have these seconds and retries
        retries = float(counts.retries - self.counted.retries)
        self.counted = counts
        self.metrics |= {**found.metrics(), "heldout/retries": retries}
        self.observer.evaluated(found, pictures)

    def report(self) -> None:
        """Hand the step's metrics to the trackers, and start the next step's."""
        self.observer.log(self.step, self.metrics)
        self.metrics = {}

    def due(self, every: int) -> bool:
        """Whether what happens every so many steps, and after the last, happens now."""
        last = self.step == self.config.trainer.steps
        return last or (every > 0 and self.step % every == 0)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure seconds under `time/NAME`, which no two runs share."""
        started = time.perf_counter()
        yield
        self.metrics[f"time/{name}"] = time.perf_counter() - started

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of everything that the next steps depend on."""
        with self.timed("save"):
            if self.saved == self.step:  # by a stop before its evaluation, and gone on from there
                self.checkpoints.amend(
                    self.step, {**self._told(), "config": trained_with(self.config)}
                )
            else:
                self.checkpoints.save(self.step, self._write)
        self.saved = self.step

    def _write(self, directory: Path) -> dict[str, Any]:
        return {
            **self._position(),
            **self._told(),
            "ranks": self.group.ranks,
            "config": trained_with(self.config),
            "workers": self.group.broadcast("save_checkpoint", directory),
        }

    def _position(self) -> dict[str, Any]:
        """Where the run is, as plain data."""
        return {
            "step": self.step,
            "weight_version": self.weight_version,
            "recompute": self.recompute,
            "floors": {str(step): floor for step, floor in self.floors.items()},
            "prompts": self.prompts.state(),
            "algorithm": self.algorithm.state(),
        }

    def _told(self) -> dict[str, Any]:
        """What the trackers have, and what they are still to be told of the step, as plain data."""
        return {
            "trackers": self.observer.positions(),
            "unreported": self.metrics if self.unreported else None,
        }

    def _save_stopped(self) -> None:
        """Go back to the last whole step, and save it.

        Raises:
            Exception: that failed; the checkpoints before are as they were.
        """
        if self._begun is not None:
            self.group.broadcast("abandon_rollout")
            self._go_to(self._begun)
            self._begun = None
        if self.saved != self.step:
            self.checkpoints.save(self.step, self._write)
            self.saved = self.step
        self.observer.stopped(self.step, self.checkpoints.place(self.step))

    def _not_saved(self, error: Exception) -> NotSavedError:
        said = told_by(self.stop.error().number)
        first = str(error).partition("\n")[0]
        return NotSavedError(f"{said}, and the run could not be saved: {first}; {self._lost()}")

    def _lost(self) -> str:
        return what_is_lost(step=self.step, saved=self.saved, under_way=self._begun is not None)

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on where *checkpoint* was written.

        Raises:
            CheckpointError: it does not fit this run.
        """
        state: Mapping[str, Any] = checkpoint.state()
        workers: Sequence[Any] = state["workers"]
        changed = changes(state.get("config", {}), trained_with(self.config))
        if changed:
            log.warning("resume.config_changed", step=state["step"], changed=changed)
        if len(workers) != self.group.ranks:
            log.warning("resume.other_ranks", saved=len(workers), now=self.group.ranks)
            workers = [workers[0]] * self.group.ranks
        per_rank = [(checkpoint.directory, own) for own in workers]
        versions = self.group.each("load_checkpoint", per_rank)
        self._go_to({**state, "weight_version": versions[0]})
        self.saved = self.step
        unreported = state.get("unreported")
        self.unreported, self.metrics = unreported is not None, dict(unreported or {})
        log.info("resume.from", step=self.step, directory=str(checkpoint.directory))

    def _go_to(self, position: Mapping[str, Any]) -> None:
        """Take up a state that `_position` gave."""
        self.prompts.load_state(position["prompts"])
        self.algorithm.load_state(dict(position["algorithm"]))
        self.step = int(position["step"])
        self.weight_version = int(position["weight_version"])
        self.recompute = bool(position["recompute"])
        floors = position.get("floors", {})
        self.floors = {int(step): float(value) for step, value in floors.items()}
