"""A suite is worth what it catches: each plugin here is wrong in one way, and the suite says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from omni_core.advantages import GroupAdvantages
from omni_core.algorithms.flow_grpo import FlowGRPO
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import StepKind
from omni_core.engine import LossInputs, LossTerms, OptimizerReport
from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.reward import RewardInput, RewardResult
from omni_core.rollout import RolloutHandle, RolloutState, UpdateReport, WeightUpdate
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing import (
    AlgorithmSuite,
    EngineSuite,
    RewardSuite,
    RolloutSuite,
    loss_inputs,
    requests_for,
    train_batch,
)
from omni_core.testing.toys import (
    ToyEngine,
    ToyEngineConfig,
    ToyReward,
    ToyRewardConfig,
    ToyRollout,
    ToyRolloutConfig,
)
from omni_core.testing.toys.options import ToyPlacement
from omni_core.trajectory import Media, RolloutRequest, SamplingSpec, Trajectory

MODEL = DiffusionModelConfig(
    path="toy",
    lora=LoRAConfig(rank=4, alpha=8.0),
    pipeline=DiffusionPipelineConfig(height=16, width=12, max_sequence_length=8),
)
SPEC = SamplingSpec(
    sigmas=FlowMatchSchedule.linear(5, shift=3.0).values(),
    guidance_scale=1.5,
    height=16,
    width=12,
    max_sequence_length=8,
    kind=StepKind.SDE,
    noise_level=0.7,
)


# -- engines ---------------------------------------------------------------------------------------


class MeansOfItsOwn(ToyEngine):
    def forward_step(self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = float(len(micro_batch.index))
        return super().forward_step(attrs.evolve(micro_batch, denominator=rows), *args, **kwargs)


class IgnoresWeights(ToyEngine):
    def forward_step(self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        ones = torch.ones_like(micro_batch.weights)
        return super().forward_step(attrs.evolve(micro_batch, weights=ones), *args, **kwargs)


class StepsOnAnything(ToyEngine):
    def optimizer_step(self) -> OptimizerReport:
        assert self._optimizer is not None
        self._optimizer.step()
        return OptimizerReport(grad_norm=1.0, stepped=True, lr=1e-3)


class ForgetsMoments(ToyEngine):
    def _load_optimizer(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        super()._load_optimizer({}, steps)


class ForgetsTheSchedule(ToyEngine):
    def lr_scheduler_step(self) -> float:
        return 0.0


class FreezesAtTheReference(ToyEngine):
    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        with super().disable_adapter():
            yield
        self.module.requires_grad_(True)


class KeepsTheAdapter(ToyEngine):
    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        yield


class ReplaysInBF16(ToyEngine):
    def replay(self, trajectory: Trajectory) -> torch.Tensor:
        return super().replay(trajectory).bfloat16().float()


class ClipsAtOne(ToyEngine):
    def optimizer_step(self) -> OptimizerReport:
        torch.nn.utils.clip_grad_norm_([p for _, p in self._trained()], 1e-9)
        return super().optimizer_step()


class MovesTheBase(ToyEngine):
    def optimizer_step(self) -> OptimizerReport:
        with torch.no_grad():
            self.module.get_parameter("head.bias").add_(1e-3)
        return super().optimizer_step()


ENGINES: list[tuple[type[ToyEngine], str]] = [
    (MeansOfItsOwn, "test_case_8_the_gradient_does_not_depend_on_the_cut"),
    (MeansOfItsOwn, "test_the_denominator_is_the_callers"),
    (IgnoresWeights, "test_a_row_of_weight_zero_counts_for_nothing"),
    (StepsOnAnything, "test_case_30_a_non_finite_gradient_is_skipped_counted_and_ends_the_run"),
    (ForgetsMoments, "test_case_28_two_and_two_steps_are_four"),
    (ForgetsTheSchedule, "test_the_learning_rate_follows_its_schedule"),
    (FreezesAtTheReference, "test_case_24_the_reference_leaves_requires_grad_alone"),
    (KeepsTheAdapter, "test_case_24_the_kl_is_zero_at_first_and_positive_after_a_nudge"),
    (ReplaysInBF16, "test_case_7_replay_is_exact"),
    (ClipsAtOne, "test_gradients_are_clipped_to_the_global_norm"),
    (MovesTheBase, "test_training_moves_what_is_trained_and_nothing_else"),
]


@pytest.mark.parametrize(("broken", "method"), ENGINES)
def test_the_engine_suite_catches(broken: type[ToyEngine], method: str, tmp_path: Path) -> None:
    def factory(
        *, micro_batch_size: int = 8, optimizer: OptimizerConfig | None = None
    ) -> ToyEngine:
        options = ToyEngineConfig(micro_batch_size=micro_batch_size)
        engine = broken(MODEL, options, optimizer, CheckpointConfig())
        engine.initialize()
        return engine

    engine = factory(optimizer=EngineSuite.training)
    rollout = ToyRollout(ToyRolloutConfig(batch_size=4), engine=engine)
    trajectory = Trajectory.concat(rollout.generate(requests_for(SPEC, window=(0, 1))))
    given: dict[str, object] = {
        "make_engine": factory,
        "engine": engine,
        "trajectory": trajectory,
        "batch": train_batch(trajectory),
        "micro_batch_size": 4,
        "tmp_path": tmp_path,
    }
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        call(EngineSuite(), method, given)


def call(suite: object, method: str, given: Mapping[str, object]) -> None:
    """Run one test of a suite with the fixtures that it names."""
    function = getattr(suite, method)
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    function(**{name: given[name] for name in names})


# -- rollouts --------------------------------------------------------------------------------------


class NoiseByPosition(ToyRollout):
    def submit(self, requests: Sequence[RolloutRequest], *, decode: bool = True) -> RolloutHandle:
        moved = [
            attrs.evolve(
                request,
                samples=tuple(attrs.evolve(s, seed=place * 10 + s.k) for s in request.samples),
            )
            for place, request in enumerate(requests)
        ]
        return super().submit(moved, decode=decode)


class DropsGuidance(ToyRollout):
    def _trajectory(self, job: Any, place: int) -> Trajectory:
        found = super()._trajectory(job, place)
        return attrs.evolve(found, effective=attrs.evolve(found.effective, guidance_scale=4.5))


class ScoresBeforeRounding(ToyRollout):
    def _trajectory(self, job: Any, place: int) -> Trajectory:
        found = super()._trajectory(job, place)
        rounded = {name: value.bfloat16().float() for name, value in found.latents.items()}
        return attrs.evolve(found, latents=rounded)


class SendsTheWholeBatch(ToyRollout):
    def _trajectory(self, job: Any, place: int) -> Trajectory:
        found = super()._trajectory(job, place)
        wide = {n: torch.cat([v, v])[: len(v)] for n, v in found.latents.items()}
        return attrs.evolve(found, latents=wide)


class SamplesWhilePaused(ToyRollout):
    def poll(self, handle: RolloutHandle) -> list[Trajectory]:
        if self._queue:
            self._sample_batch()
        return super().poll(handle)


class TakesAnyWindow(ToyRollout):
    def _check(self, request: RolloutRequest) -> None:
        pass


class BindsWhatItKnows(ToyRollout):
    def update(self, update: WeightUpdate) -> UpdateReport:
        ours = self._named_weights("default")
        known = {n: v for n, v in update.tensors.items() if n in ours}
        return super().update(attrs.evolve(update, tensors={**ours, **known}))


class WakesReady(ToyRollout):
    def wake(self) -> None:
        self._state = RolloutState.READY


ROLLOUTS: list[tuple[type[ToyRollout], str]] = [
    (NoiseByPosition, "test_case_18_a_sample_is_the_same_alone_and_in_a_batch"),
    (NoiseByPosition, "test_every_request_gives_one_trajectory"),
    (DropsGuidance, "test_case_32_what_was_used_is_what_was_asked"),
    (ScoresBeforeRounding, "test_case_4_what_is_scored_is_what_is_stored"),
    (SendsTheWholeBatch, "test_a_trajectory_has_its_documented_form"),
    (SamplesWhilePaused, "test_a_paused_rollout_samples_nothing_until_it_resumes"),
    (TakesAnyWindow, "test_case_6_a_wrong_window_is_refused"),
    (TakesAnyWindow, "test_an_adapter_that_does_not_exist_is_refused"),
    (BindsWhatItKnows, "test_case_25_a_push_that_does_not_fit_by_name_fails"),
    (WakesReady, "test_case_31_a_sleeper_is_asked_nothing_before_its_weights_are_back"),
]


def push(engine: ToyEngine, version: int) -> WeightUpdate:
    tensors = {n: t.detach().clone() for n, t in engine.get_per_tensor_param()}
    return WeightUpdate(version=version, tensors=tensors)


class SleepyRolloutSuite(RolloutSuite):
    sleeps = True


@pytest.mark.parametrize(("broken", "method"), ROLLOUTS)
def test_the_rollout_suite_catches(broken: type[ToyRollout], method: str) -> None:
    engine = ToyEngine(MODEL, ToyEngineConfig(), None, CheckpointConfig())
    engine.initialize()
    options = ToyRolloutConfig(batch_size=4, placement=ToyPlacement.REPLICA)
    rollout = broken(options, engine=engine)
    rollout.update(push(engine, 0))
    rollout.resume()
    given: dict[str, object] = {
        "rollout": rollout,
        "sampling": SPEC,
        "asked": requests_for(SPEC),
        "velocity": engine.denoiser.velocity,
        "make_update": lambda version: push(engine, version),
        "guidance_scale": 1.0,
        "wrong": "more" if broken is BindsWhatItKnows else "order",
    }
    # An error where a refusal by ValueError was due (a KeyError of some inner table) is no refusal.
    with pytest.raises((AssertionError, pytest.fail.Exception, KeyError)):
        call(SleepyRolloutSuite(), method, given)


# -- algorithms ------------------------------------------------------------------------------------


class ScoresMissingAsZero(FlowGRPO):
    def advantages(
        self, rewards: torch.Tensor, group_ids: Sequence[str], valid: torch.Tensor
    ) -> GroupAdvantages:
        return super().advantages(rewards.nan_to_num(0.0), group_ids, torch.ones_like(valid))


class CentresTheMicroBatch(FlowGRPO):
    def loss(self, inputs: LossInputs) -> LossTerms:
        found = super().loss(inputs)
        return attrs.evolve(found, terms=found.terms - found.terms.mean())


class WeighsTwice(FlowGRPO):
    def loss(self, inputs: LossInputs) -> LossTerms:
        found = super().loss(inputs)
        return attrs.evolve(found, terms=found.terms * inputs.weights)


class TrainsTheLastStep(FlowGRPO):
    def window(self, schedule: FlowMatchSchedule, *, seed: int, iteration: int) -> tuple[int, ...]:
        return (*super().window(schedule, seed=seed, iteration=iteration), schedule.num_steps - 1)


class DrawsAnew(FlowGRPO):
    def window(self, schedule: FlowMatchSchedule, *, seed: int, iteration: int) -> tuple[int, ...]:
        return (int(torch.randint(9, ())),)


class ForgetsItsState(FlowGRPO):
    def state(self) -> dict[str, Any]:
        return {"object": id(self)}


ALGORITHMS: list[tuple[type[FlowGRPO], str]] = [
    (ScoresMissingAsZero, "test_case_11_an_unscored_row_counts_for_nothing"),
    (CentresTheMicroBatch, "test_case_8_a_row_does_not_see_the_rest_of_its_micro_batch"),
    (WeighsTwice, "test_weights_are_left_to_the_engine"),
    (TrainsTheLastStep, "test_case_6_a_window_never_holds_the_last_step"),
    (DrawsAnew, "test_equal_seeds_give_equal_windows"),
    (ForgetsItsState, "test_state_travels_as_json"),
]


@pytest.mark.parametrize(("broken", "method"), ALGORITHMS)
def test_the_algorithm_suite_catches(broken: type[FlowGRPO], method: str) -> None:
    given = {
        "algorithm": broken(FlowGRPOOptions(kl_coef=0.1)),
        "schedule": FlowMatchSchedule.linear(10),
        "inputs": loss_inputs(),
    }
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        call(AlgorithmSuite(), method, given)


# -- rewards ---------------------------------------------------------------------------------------


class SortsItsScores(ToyReward):
    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        return sorted(super().score(media, inputs), key=lambda result: result.value)


class NormalisesTheBatch(ToyReward):
    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        found = super().score(media, inputs)
        mean = sum(result.value for result in found) / len(found)
        return [attrs.evolve(result, value=result.value - mean) for result in found]


class ScoresFailuresAsZero(ToyReward):
    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        found = super().score(media, inputs)
        return [r if r.ok else RewardResult(value=0.0) for r in found]


class PadsItsScores(ToyReward):
    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        assert media.image is not None
        inputs = [*inputs, *inputs][: len(media.image)]
        return super().score(media, inputs)[: len(inputs) - 1]


REWARDS: list[tuple[type[ToyReward], str]] = [
    (SortsItsScores, "test_scores_come_in_the_order_of_the_rows"),
    (NormalisesTheBatch, "test_a_score_does_not_depend_on_the_rest_of_the_batch"),
    (ScoresFailuresAsZero, "test_a_failure_is_no_zero_and_does_not_stop_the_others"),
    (PadsItsScores, "test_case_13_a_row_too_few_is_refused"),
]


@pytest.mark.parametrize(("broken", "method"), REWARDS)
def test_the_reward_suite_catches(broken: type[ToyReward], method: str) -> None:
    image = (torch.arange(3, dtype=torch.uint8) * 100).reshape(3, 1, 1, 1).expand(3, 2, 2, 3)
    media = Media(image=image.contiguous())
    given: dict[str, object] = {
        "ready": broken(ToyRewardConfig()),
        "media": media,
        "inputs": [RewardInput(prompt=p) for p in ("a sign", "b", "very dark")],
        "failing": (media, [RewardInput(prompt=p) for p in ("a", " ", "b")]),
    }
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        call(RewardSuite(), method, given)
