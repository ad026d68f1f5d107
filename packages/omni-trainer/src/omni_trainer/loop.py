"""The training loop: sample -> reward -> advantage -> update -> validate -> save.

The driver holds metadata: requests, scores, advantages and plans. Samples stay with the ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import structlog

from omni_core.losses import algorithm
from omni_core.metrics import mean_by_name, merge
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
from omni_trainer.update_plan import plan_updates
from omni_trainer.workers.actor_rollout_ref import UpdateResult
from omni_trainer.workers.process import resident_bytes

GIB = 2**30

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
    ) -> None:
        self.config = config
        self.group = group
        self.pool = pool
        self.prompts = prompts
        self.sampling = sampling
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.observer = observer
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
        self._looked = False
        self._compiled = 0.0
        """Seconds that compiling took so far."""

    def fit(self) -> None:
        """Train to the last step.

        Raises:
            WorkerError: a worker failed or died.
            CanaryError: training does not see what was sampled.
            UnscoredError: a sample has no score, and the config says that it must.
        """
        if self.step == 0 and self.evaluator is not None and self.config.evaluation.initial:
            self.validate()
            self.report()
        while self.step < self.config.trainer.steps:
            self.group.broadcast("rollout_metrics")  # what was done between steps is no step's
            with self.timed("step"):
                self.train()
            self.measure()
            self.step += 1
            if self.due(self.config.evaluation.every):
                self.validate()
            self.report()
            if self.due(self.config.checkpoint.every):
                self.save()

    def train(self) -> None:
        """Take one step; its samples are let go when it is done."""
        samples = self.sample()
        with self.timed("advantages"):
            scored = score_step(
                samples, self.algorithm, self.config.reward_on_error, self.config.reward_summed
            )
        self.metrics |= scored.metrics
        self.watch(samples)
        self.update(samples, scored)

    def sample(self) -> Samples:
        """Sample the next prompts, scoring while sampling goes on."""
        samples = sample_and_score(self.group, self.pool, self.plan(), trained=True)
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
        measured = mean_by_name(self.group.broadcast("rollout_metrics"))
        self.metrics |= {f"rollout/{name}": value for name, value in measured.items()}
        self.metrics["time/push_share"] = self.metrics["time/push"] / self.metrics["time/step"]

    def validate(self) -> None:
        """Score the held-out prompts with the policy as it is."""
        if self.evaluator is None:
            return
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

    def save(self) -> Checkpoint:
        """Write a checkpoint of everything that the next steps depend on."""
        with self.timed("save"):
            return self.checkpoints.save(self.step, self._write)

    def _write(self, directory: Path) -> dict[str, Any]:
        return {
            "step": self.step,
            "ranks": self.group.ranks,
            "weight_version": self.weight_version,
            "recompute": self.recompute,
            "floors": {str(step): floor for step, floor in self.floors.items()},
            "config": trained_with(self.config),
            "prompts": self.prompts.state(),
            "algorithm": self.algorithm.state(),
            "trackers": self.observer.positions(),
            "workers": self.group.broadcast("save_checkpoint", directory),
        }

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
        self.prompts.load_state(state["prompts"])
        self.algorithm.load_state(dict(state["algorithm"]))
        self.step = int(state["step"])
        self.weight_version = versions[0]
        self.recompute = bool(state["recompute"])
        self.floors = {int(step): float(value) for step, value in state.get("floors", {}).items()}
        log.info("resume.from", step=self.step, directory=str(checkpoint.directory))


def update_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Name what the ranks measured in an update.

    A metric without a value is left out, and so is one that is not finite: `actor/skipped_steps` counts
    the steps that come of it.
    """
    found: dict[str, float] = {}
    for name, moments in merge(result.metrics for result in results).items():
        if not moments.count:
            continue
        found[f"actor/{name}"] = moments.mean
        if name == "ratio":
            found |= {"actor/ratio_min": moments.low, "actor/ratio_max": moments.high}
    found = {name: value for name, value in found.items() if math.isfinite(value)}
    if results[0].lr is not None:
        found["actor/lr"] = results[0].lr
    found["actor/skipped_steps"] = float(results[0].skipped)
    found["actor/weight_version"] = float(results[0].weight_version)
    return found
