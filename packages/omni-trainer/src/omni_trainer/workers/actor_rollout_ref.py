"""One rank: the policy, the rollout that samples with it, and the reference (the policy's base).

With several ranks every method is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from omni_core import device as devices
from omni_core.algorithm import Algorithm
from omni_core.engine import BaseEngine
from omni_core.losses import ConfiguredLoss, algorithm
from omni_core.metrics import Moments, merge
from omni_core.options import DiffusionSamplingConfig
from omni_core.plugins import ROLLOUTS, registry
from omni_core.prompt_length import PromptLength
from omni_core.request_check import image_mistake
from omni_core.resident import resident_bytes
from omni_core.rollout import BaseRollout, WeightUpdate
from omni_core.seeds import derive_seed
from omni_core.trajectory import RolloutRequest, Trajectory, TrajectoryInfo
from omni_trainer.canary import CanaryReport, measure
from omni_trainer.reporting.clips import Clip, clip_of
from omni_trainer.update_plan import OptimizerStepPlan, UpdatePlan
from omni_trainer.update_results import UpdateResult
from omni_trainer.workers import process
from omni_trainer.workers.batches import (
    filled_up,
    first_sampling_batch,
    gather_rows,
    train_batch,
)
from omni_trainer.workers.correction import correction_of, with_old_log_probs
from omni_trainer.workers.rank import ActorRolloutRefConfig, RankFacts, RolloutAccess
from omni_trainer.workers.shown import media_of, picture_of
from omni_trainer.workers.training import TrainingWorker
from omni_trainer.workers.weight_push import alpha_over_rank, check_one_policy, push

log = structlog.get_logger()


class ActorRolloutRefWorker:
    """Built in its own process, then asked by the driver; knows nothing of how it is called."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        place: process.Place | None = None,
        store: Any = None,
    ) -> None:
        self.config = config
        self.place = place or process.Place()
        process.prepare(self.place)
        torch.manual_seed(derive_seed("worker", config.actor.engine.seed, self.place.rank))
        self.training = TrainingWorker(config.training(), local_rank=self.place.local_rank)
        self._made_group = process.join(self.place, self.training.device, store)
        self._rollout: BaseRollout | None = None
        self._generators: dict[str, Tensor] = {}
        """Their states before what `generate` made for an update; empty once that is done."""
        self._pushed: dict[str | None, int] = {}
        """Adapter that the rollout holds -> version of its last push; empty with a rollout that shares the
        trained module."""

    @property
    def rollout(self) -> BaseRollout:
        """What samples, once `init_model` has made it."""
        if self._rollout is None:
            msg = "the worker holds no model yet: call init_model first"
            raise RuntimeError(msg)
        return self._rollout

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm whose loss is trained."""
        return algorithm(self.config.actor.loss)

    def init_model(self, servers: RolloutAccess | None = None) -> RankFacts:
        """Load the model, make the optimizer and the rollout, and push the first weights.

        Args:
            servers: Who holds the rollout; None makes one here.

        Raises:
            ValueError: the algorithm cannot train this model (says why, before anything is loaded), or the
                rollout cannot make samples of the configured size.
        """
        self.training.set_loss_fn(ConfiguredLoss(self.config.actor.loss))
        self.training.reset(check=self._check_supported)
        engine = self.training.engine
        self._rollout = self._make_rollout(servers)
        return RankFacts(
            device=str(self.training.device),
            threads=torch.get_num_threads(),
            torch=str(torch.__version__),
            weight_version=self.update_weights(),
            data_parallel_rank=engine.get_data_parallel_rank(),
            has_outputs=engine.is_mp_src_rank_with_outputs(),
        )

    def _make_rollout(self, servers: RolloutAccess | None) -> BaseRollout:
        engine = self.training.engine
        if servers is not None:
            return servers.connect(engine=engine, rank=self.place.rank)
        plugin = registry(ROLLOUTS).get(self.config.rollout)
        made: BaseRollout = plugin.build(self.config.rollout_options, engine=engine)
        made.setup()
        return made

    def _check_supported(self, engine: BaseEngine) -> None:
        facts = engine.facts()
        if facts is None:
            return
        mistake = image_mistake(given=self.config.input_images, inputs=facts.inputs)
        if mistake is not None:
            msg = f"model.path: {self.config.actor.model.path!r}: {mistake}"
            raise ValueError(msg)
        reason = self.algorithm.unsupported(facts)
        if reason is not None:
            name, path = self.config.actor.loss.name, self.config.actor.model.path
            msg = f"algorithm.name: {name} cannot train {path!r}: {reason}"
            raise ValueError(msg)

    # -- sampling ----------------------------------------------------------------------------------

    def schedule(self, sampling: DiffusionSamplingConfig) -> tuple[float, ...]:
        """Return the float32 sigmas, T+1 of them, that a sampling config means for this model."""
        return self.rollout.schedule(sampling).values()

    def generate(
        self, requests: Sequence[RolloutRequest], trained: bool = False, *, decode: bool = True
    ) -> Iterator[tuple[TrajectoryInfo, Trajectory]]:
        """Sample, and yield each request's trajectory (on the CPU) as it is finished.

        Args:
            requests: This rank's.
            trained: Whether the next `update_actor` trains on them.
            decode: Whether there is media.
        """
        if trained:
            self._generators = devices.rng_state(self.training.device)
            self.training.engine.begin_rollout()
        lengths = self._prompt_lengths(requests)
        with self._engine_at_rest():
            last, decoded = time.perf_counter(), self.rollout.decode_seconds
            for trajectory in self.rollout.stream(requests, decode=decode):
                now, before = time.perf_counter(), decoded
                finished = trajectory.to("cpu")
                decoded = self.rollout.decode_seconds
                info = finished.info(
                    seconds=now - last,
                    decode_seconds=None if decoded is None else decoded - (before or 0.0),
                    prompt_length=lengths.get(finished.records[0].prompt),
                )
                yield info, finished
                last = time.perf_counter()

    @contextmanager
    def _engine_at_rest(self) -> Iterator[None]:
        """Free the device for the rollout, where the engine's options say so."""
        if not self.config.actor.engine.rests_on_host:
            yield
            return
        self.training.to("cpu")
        try:
            yield
        finally:
            self.training.to("device")

    def _prompt_lengths(self, requests: Sequence[RolloutRequest]) -> dict[str, PromptLength]:
        prompts = sorted({request.prompt for request in requests})
        lengths = self.training.engine.prompt_lengths(prompts) if prompts else None
        return {} if lengths is None else dict(zip(prompts, lengths, strict=True))

    def pick_images(self, rows: Sequence[int], *trajectories: Trajectory) -> Tensor:
        """Take one row of each trajectory's media: uint8 [N, H, W, 3]; a video gives its middle frame.

        Raises:
            ValueError: media without pictures.
        """
        return torch.stack([picture_of(t, row) for t, row in zip(trajectories, rows, strict=True)])

    def pick_clips(self, rows: Sequence[int], *trajectories: Trajectory) -> list[Clip]:
        """Take one row of each trajectory's media, as `pick_images`, as what a person sees and hears.

        Raises:
            ValueError: media without video and without sound.
        """
        pairs = zip(trajectories, rows, strict=True)
        return [clip_of(media_of(trajectory), row) for trajectory, row in pairs]

    def abandon_rollout(self) -> None:
        """Let go what was sampled for an update that will not be, as if nothing had been sampled."""
        self.training.engine.end_rollout()
        devices.set_rng_state(self._generators)

    # -- scoring -----------------------------------------------------------------------------------

    def infer_actor_batch(self, plan: OptimizerStepPlan, *trajectories: Trajectory) -> Tensor:
        """Log-probs of the rows through training micro-batches: float32 [B, W] on the CPU."""
        return _log_probs(self.training.infer_batch(train_batch(trajectories, plan)).log_probs)

    def infer_ref_batch(self, plan: OptimizerStepPlan, *trajectories: Trajectory) -> Tensor:
        """The same of the reference."""
        with self.training.engine.use_reference():
            return self.infer_actor_batch(plan, *trajectories)

    def canary(self, *trajectories: Trajectory) -> CanaryReport:
        """Score a batch of this rank's own samples again, both ways, before its weights change.

        Args:
            trajectories: All that this rank sampled in this step; at least one.
        """
        first = first_sampling_batch(trajectories)
        batch = gather_rows(trajectories, first)
        replayed = self.training.engine.replay(batch).cpu()
        size = self.config.actor.engine.micro_batch_size
        rows = gather_rows(trajectories, filled_up(trajectories, first, pairs=size))
        plan = OptimizerStepPlan(
            rows=tuple((0, row) for row in range(rows.rows)),
            advantages=(0.0,) * rows.rows,
            weights=(1.0,) * rows.rows,
            denominator=float(rows.log_probs.numel()),
            # Log-probs do not depend on it, but a loss that looks at several is asked for each row's.
            teachers=(0,) * rows.rows if len(self.algorithm.teachers) > 1 else None,
        )
        trained = self.infer_actor_batch(plan, rows)
        return measure(
            batch,
            rows,
            replayed=replayed,
            trained=trained,
            rank=self.place.rank,
            same_kernels=self.rollout.replays_exactly,
        )

    # -- training ----------------------------------------------------------------------------------

    def update_actor(
        self, plan: UpdatePlan, recompute: bool, *trajectories: Trajectory
    ) -> UpdateResult:
        """Take the optimizer steps of *plan*.

        Args:
            plan: This rank's rows of each step.
            recompute: Take the old log-probs from training micro-batches, before the first step,
                instead of the rollout's own.
            trajectories: Those that the plan names, in its order.

        Raises:
            NonFiniteGradientsError: too many steps in a row were skipped.
        """
        batches = [train_batch(trajectories, step) for step in plan.steps]
        correction = correction_of(self.config.actor.loss.options)
        parts: list[dict[str, Moments]] = [{} for _ in batches]
        if recompute or correction is not None:
            for i, batch in enumerate(batches):
                old = _log_probs(self.training.infer_batch(batch).log_probs)
                batches[i], parts[i] = with_old_log_probs(batch, old, correction, plan.floor)
        first = self.training.weight_version
        for batch, part in zip(batches, parts, strict=True):
            before = self.training.weight_version
            part.update(self.training.train_batch(batch).metrics)
            # Nothing follows a step that was skipped: a weight version names every policy.
            if self.training.weight_version > before:
                taken = self.training.optimizer_steps
                self.algorithm.after_update(self.training, optimizer_step=taken)
        if self.training.weight_version > first:
            taken = self.training.optimizer_steps
            self.algorithm.after_rollout(self.training, optimizer_step=taken)
        self.training.engine.end_rollout()
        self._generators = {}
        lr = parts[-1]["lr"].mean if parts else None
        skipped = round(sum(part["skipped"].total for part in parts))
        named = merge(parts)
        for name in ("lr", "skipped"):
            named.pop(name, None)
        return UpdateResult(
            metrics=named,
            lr=lr,
            skipped=skipped,
            weight_version=self.training.weight_version,
            compile_seconds=self.training.engine.compile_seconds,
            resident=resident_bytes(),
        )

    def update_weights(self, adapter: str | None = None) -> int:
        """Let the rollout sample with the weights as they now are; returns their version.

        A rollout that shares the trained module already does. Any other is paused, sent the adapter
        (or all weights) and resumed; what it bound must be what was sent.

        Args:
            adapter: The policy that is about to sample; None is the algorithm's. Of a version, each is
                sent once, unless the rollout holds one at a time. Where every weight is trained there
                is one policy.

        Raises:
            WeightMismatchError: it was not; lists the names on both sides.
        """
        version = self.training.weight_version
        if self.config.actor.model.lora is None:
            adapter = None
        elif adapter is None:
            adapter = self.config.actor.loss.options.rollout_algo().adapter
        shared = self.rollout.weight_version == version and not self._pushed
        if not shared and self._pushed.get(adapter) != version:
            self._push(adapter, version)
        return version

    def _push(self, adapter: str | None, version: int) -> None:
        config = self.config
        if config.actor.model.lora is None:
            check_one_policy(config.rollout, config.actor.loss.options.rollout_algo().adapter)
        push(
            self.rollout,
            WeightUpdate(
                version=version,
                tensors=dict(self.training.engine.get_per_tensor_param(adapter=adapter)),
                adapter=adapter,
                alpha_over_rank=alpha_over_rank(config.actor.model.lora),
            ),
        )
        if not config.rollout_options.keeps_adapters:
            self._pushed.clear()
        self._pushed[adapter] = version

    def rollout_metrics(self) -> dict[str, float]:
        """Ask the rollout what it measured since the last call."""
        return dict(self.rollout.metrics())

    def copy_adapter(self, source: str, target: str) -> None:
        """Make the adapter *target* equal to *source*."""
        self.training.copy_adapter(source, target)

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        """target <- decay * target + (1 - decay) * source."""
        self.training.ema_update_adapter(source, target, decay)

    # -- files -------------------------------------------------------------------------------------

    def save_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Write this rank's share below *directory*; returns plain data for the driver."""
        return {
            **self.training.save_checkpoint(directory),
            "algorithm": self.algorithm.state(),
        }

    def load_checkpoint(self, directory: Path, state: Mapping[str, Any]) -> int:
        """Restore what `save_checkpoint` wrote and returned; returns the weight version."""
        self.training.load_checkpoint(directory, state)
        self.algorithm.load_state(dict(state["algorithm"]))
        return self.update_weights()

    def stock_call(self, sampling: DiffusionSamplingConfig) -> dict[str, Any]:
        """Return the keywords with which a stock pipeline draws what a sampling config means."""
        return self.training.engine.stock_call(sampling)

    def export_adapter(self, directory: Path, adapter: str = "default") -> Path:
        """Write a LoRA for stock pipelines; returns the file."""
        return self.training.engine.export_adapter(directory, adapter=adapter)

    def export_pipeline(self, directory: Path, adapter: str = "default") -> Path:
        """Write a whole pipeline for stock diffusers, a LoRA merged; returns its directory."""
        return self.training.engine.export_pipeline(directory, adapter=adapter)

    def peak_memory(self) -> int:
        """Most bytes that the device held; 0 where that is not counted."""
        return devices.peak_memory(self.training.device)

    def close(self) -> None:
        """Free the rollout and the model, and leave the process group that this worker made."""
        if self._rollout is not None:
            self._rollout.close()
            self._rollout = None
        self.training.close()
        if self._made_group:
            process.leave()
            self._made_group = False


def _log_probs(found: Tensor | None) -> Tensor:
    if found is None:
        msg = "the engine's infer_batch returned no log-probs"
        raise ValueError(msg)
    return found
