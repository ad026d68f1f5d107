"""Whole runs in one process, on toys."""

import math
import sys
import types

import attrs
import numpy as np
import pytest
import torch

from omni_core import plugins
from omni_core.metrics import Moments
from omni_core.plugins import Plugin
from omni_core.reward import RetryableRewardError, RewardResult
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing.toys import (
    ToyEngine,
    ToyEngineConfig,
    ToyReward,
    ToyRewardConfig,
    ToyRollout,
    ToyRolloutConfig,
)
from omni_trainer.canary import CanaryError
from omni_trainer.data import PromptFileError
from omni_trainer.group import WorkerError
from omni_trainer.reporting.metric_names import describe
from omni_trainer.run_directory import RunDirectory, RunDirectoryError
from omni_trainer.samples import UnscoredError
from omni_trainer.update_results import UpdateResult, update_metrics


@pytest.fixture
def variant(toys, monkeypatch):
    """Offer a class of this test as a plugin: `variant(ROLLOUTS, "toy_x", Class, Options)`."""
    made = []

    def offer(group, name, cls, options):
        module = f"variants_{name}"
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(cls=cls))
        registry = plugins.registry(group)
        registry.register(name, Plugin(api=1, options=options, target=f"{module}:cls"))
        made.append((registry, name))

    yield offer
    for registry, name in made:
        registry.unregister(name)


# -- what a run leaves ------------------------------------------------------------------------------


def test_case_36_every_metric_is_finite_has_a_meaning_and_belongs_to_something_switched_on(
    train, metrics
):
    summary = train("trainer.steps=3", "evaluation.every=2", "trainer.canary_every=2")
    lines = metrics(summary.run_dir, timings=True)

    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        for name, value in line.items():
            assert math.isfinite(value)
            assert name == "step" or describe(name) is not None, name
    assert [sorted(n for n in line if n.startswith("canary/")) for line in lines] == [
        [],
        ["canary/exact", "canary/floor"],
        [],
        ["canary/exact", "canary/floor"],
    ]
    assert not [name for line in lines for name in line if name == "actor/kl"]
    heldout = [any(name.startswith("heldout/") for name in line) for line in lines]
    assert heldout == [True, False, True, True]


def test_the_reference_is_measured_where_a_kl_is_asked_for(train, metrics):
    summary = train("algorithm.kl_coef=0.1")

    values = [line["actor/kl"] for line in metrics(summary.run_dir)[1:]]
    assert values[0] == 0.0
    assert values[1] > 0.0


def test_a_run_learns_and_says_what_it_gained(train, metrics):
    summary = train("trainer.steps=12", "optimizer.lr=0.05", "algorithm.updates_per_rollout=2")
    lines = metrics(summary.run_dir)

    assert lines[-1]["reward/mean"] > lines[1]["reward/mean"] + 0.02
    assert summary.gain is not None
    assert summary.before is not None
    assert summary.after is not None
    assert summary.gain.mean == pytest.approx(summary.after.mean - summary.before.mean)
    assert lines[-1]["actor/weight_version"] == 24
    assert (summary.trained, summary.steps) == (12, 12)


def test_everything_lies_in_the_run_directory(train):
    summary = train("trainer.grid_every=1")
    run = summary.run_dir
    found = {path.relative_to(run).as_posix() for path in run.rglob("*")}

    assert found >= {
        "config.yaml",
        "provenance.json",
        "environment.json",
        "metrics.jsonl",
        "reward.png",
        "evaluations/step-000000.json",
        "evaluations/step-000002.json",
        "grids/before_after.png",
        "grids/heldout-step-000002.png",
        "grids/train-step-000001.png",
        "checkpoints/step-000002/state.json",
        "exported.json",
    }
    assert summary.export is not None
    assert summary.export.is_file()
    pictures = np.load(run / "evaluations/step-000002.npy", allow_pickle=False)
    assert (pictures.shape, pictures.dtype) == ((3, 16, 16, 3), np.uint8)


def test_the_saved_config_is_the_run(train, toy_source):
    summary = train("optimizer.lr=0.02")
    loaded = RunDirectory.open(summary.run_dir).config()

    assert loaded.config.optimizer.lr == 0.02
    assert loaded.config.data.train.startswith("/")


def test_a_directory_that_holds_a_run_is_refused(train):
    train()
    with pytest.raises(RunDirectoryError, match=r"already holds a run; `omni resume"):
        train()


def test_one_run_is_one_process(train):
    run = RunDirectory.open(train().run_dir)
    with run.locked(), pytest.raises(RunDirectoryError, match="in use by another process"):
        train(resume=True)


# -- data and rewards -------------------------------------------------------------------------------


@pytest.mark.parametrize(("tail", "steps"), [("drop", 2), ("carry", 3)])
def test_case_19_the_end_of_an_epoch_is_carried_or_dropped(train, metrics, tail, steps):
    """7 rows in batches of 3; the batch of a carried tail belongs to the epoch that it starts in."""
    summary = train(f"data.tail={tail}", "trainer.steps=4", "evaluation.initial=false")
    epochs = [line["data/epoch"] for line in metrics(summary.run_dir)]

    assert epochs.count(0.0) == steps


def test_case_19_validation_counts_each_row_once(train, metrics):
    """3 prompts in waves of 2."""
    summary = train("evaluation.batch_size=4", "evaluation.samples_per_prompt=2")
    whole = train("evaluation.batch_size=64", "evaluation.samples_per_prompt=2", name="whole")

    assert summary.after is not None
    assert [prompt.row_id for prompt in summary.after.prompts] == ["1", "2", "3"]
    assert [len(prompt.rewards) for prompt in summary.after.prompts] == [2, 2, 2]
    assert metrics(summary.run_dir)[-1]["heldout/prompts"] == 3
    assert whole.before is not None
    assert summary.before is not None
    assert whole.before.prompts == summary.before.prompts


def test_case_19_an_empty_file_is_an_error(train, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(PromptFileError, match="the file is empty"):
        train(f"data.train={empty}")
    assert not (tmp_path / "run").exists()


class Flaky(ToyReward):
    """Cannot score the first picture of every batch."""

    def score(self, media, inputs):
        found = super().score(media, inputs)
        return [RewardResult.failed("the picture is upside down"), *found[1:]]


FLAKY = ("reward.name=flaky", "evaluation.initial=false", "data.heldout=null")


def test_a_sample_without_a_score_ends_the_run(train, variant):
    variant(plugins.REWARDS, "flaky", Flaky, ToyRewardConfig)
    with pytest.raises(UnscoredError, match=r"3 of 12 samples have no score; .* upside down"):
        train(*FLAKY)


@pytest.mark.parametrize(("policy", "counted"), [("mask", 9), ("drop_group", 0)])
def test_samples_without_a_score_count_for_nothing(train, variant, metrics, policy, counted):
    """4 samples a group, one of each without a score."""
    variant(plugins.REWARDS, "flaky", Flaky, ToyRewardConfig)
    summary = train(*FLAKY, f"reward.on_error={policy}")
    line = metrics(summary.run_dir)[0]

    assert line["reward/unscored"] == 3
    assert ("reward/mean" in line) == (counted > 0)
    assert ("actor/loss" in line) == (counted > 0)
    assert line["advantage/unscored_groups"] == (0 if counted else 3)
    assert line["actor/weight_version"] == (1 if counted else 0)


class Down(ToyReward):
    """Scores nothing at all."""

    def score(self, media, inputs):
        return [RewardResult.failed("no answer") for _ in inputs]


@pytest.mark.parametrize("policy", ["mask", "drop_group"])
def test_a_step_without_any_score_ends_the_run_whatever_the_policy(train, variant, policy):
    """Else a scorer that is down is a run that ends well and has learnt nothing."""
    variant(plugins.REWARDS, "down", Down, ToyRewardConfig)
    with pytest.raises(
        UnscoredError, match=r"none of the step's 12 samples has a score.*no answer"
    ):
        train("reward.name=down", *FLAKY[1:], f"reward.on_error={policy}")


def test_retries_are_counted(train, metrics):
    assert metrics(train().run_dir)[1]["reward/retries"] == 0


class Busy(ToyReward):
    """Is busy the first time that it is asked, and once more later."""

    asked = 0

    def score(self, media, inputs):
        Busy.asked += 1
        if Busy.asked in (1, 6):
            raise RetryableRewardError("busy")
        return super().score(media, inputs)


def test_retries_belong_to_what_was_scored(train, variant, metrics, monkeypatch):
    """3 held-out prompts are scored before the first step, one at a time."""
    monkeypatch.setattr("omni_trainer.rewards.scoring.FIRST_WAIT", 0.0)
    variant(plugins.REWARDS, "busy", Busy, ToyRewardConfig)
    summary = train("reward.name=busy", "trainer.steps=1", "trainer.overlap_rewards=false")
    first, second = metrics(summary.run_dir)

    assert first["heldout/retries"] == 1
    assert (second["reward/retries"], second["heldout/retries"]) == (1, 0)


# -- canaries ---------------------------------------------------------------------------------------


class Shorter(ToyRollout):
    """Samples with one step less than was asked for, and says so."""

    def submit(self, requests, *, decode=True):
        return super().submit([self.changed(request) for request in requests], decode=decode)

    def changed(self, request):
        sigmas = FlowMatchSchedule.linear(request.sampling.num_steps - 1).values()
        window = tuple(step for step in request.window if step < request.sampling.num_steps - 2)
        sampling = attrs.evolve(request.sampling, sigmas=sigmas)
        return attrs.evolve(request, sampling=sampling, window=window)


class Liar(Shorter):
    """Does the same, and says that it did what was asked for."""

    def poll(self, handle):
        self.asked = FlowMatchSchedule.linear(4, shift=3.0).values()
        found = super().poll(handle)
        return [
            attrs.evolve(t, effective=attrs.evolve(t.effective, sigmas=self.asked)) for t in found
        ]


STEPS = ("rollout.sampling.num_inference_steps=4", "rollout.sampling.guidance_scale=1.0")


def test_case_7_a_rollout_with_one_point_less_stops_the_run(train, variant):
    variant(plugins.ROLLOUTS, "shorter", Shorter, ToyRolloutConfig)
    with pytest.raises(CanaryError) as caught:
        train("rollout.name=shorter", *STEPS, "data.heldout=null")

    text = str(caught.value)
    assert "schedules differ: 4 steps and 3 steps" in text
    assert "asked" in text
    assert "used" in text


def test_case_7_a_rollout_that_hides_it_is_found_by_the_replay(train, variant, metrics, tmp_path):
    variant(plugins.ROLLOUTS, "liar", Liar, ToyRolloutConfig)
    with pytest.raises(CanaryError) as caught:
        train("rollout.name=liar", *STEPS, "data.heldout=null")

    text = str(caught.value)
    assert text.startswith("the exact canary is")
    assert "max |dlogp|" in text
    assert "schedule asked and used (4 steps): 1, 0.8999" in text
    assert metrics(tmp_path / "run") == []


class Coarse(ToyEngine):
    """Sees other log-probs in training than in replay, as a large bf16 model does."""

    def infer_batch(self, data, loss_function=None):
        found = super().infer_batch(data, loss_function)
        return attrs.evolve(found, log_probs=found.log_probs + 5e-7)


@pytest.mark.parametrize(("clip", "recomputed"), [(1e-3, 0.0), (1e-6, 1.0)])
def test_old_log_probs_come_from_training_where_the_floor_is_near_the_clip(
    train, variant, metrics, clip, recomputed
):
    variant(plugins.ENGINES, "diffusion.coarse", Coarse, ToyEngineConfig)
    summary = train("engine.name=coarse", f"algorithm.clip_ratio={clip}", "data.heldout=null")
    first = metrics(summary.run_dir)[0]

    assert first["canary/exact"] == 0.0
    assert first["canary/floor"] == pytest.approx(5e-7, rel=0.1)
    assert first["rollout/old_log_probs_recomputed"] == recomputed
    assert first["actor/ratio"] == pytest.approx(1.0 - 5e-7 * recomputed, abs=1e-7)


# -- failures ---------------------------------------------------------------------------------------


class NaNEngine(ToyEngine):
    """Its gradients are not finite from the second optimizer step on."""

    def optimizer_step(self):
        if self.weight_version == 1:
            for _, parameter in self._trained():
                parameter.grad.fill_(math.nan)
        return super().optimizer_step()


def test_case_30_steps_without_a_finite_gradient_are_counted_and_end_the_run(
    train, variant, metrics, tmp_path
):
    variant(plugins.ENGINES, "diffusion.nan", NaNEngine, ToyEngineConfig)
    with pytest.raises(WorkerError) as caught:
        train(
            "engine.name=nan",
            "optimizer.max_nonfinite_steps=2",
            "trainer.steps=9",
            "checkpoint.every=1",
            "data.heldout=null",
        )
    lines = metrics(tmp_path / "run")

    assert "NonFiniteGradientsError: 3 optimizer steps in a row" in str(caught.value)
    assert [line["actor/skipped_steps"] for line in lines] == [0, 1, 1]
    assert [line["actor/weight_version"] for line in lines] == [1, 1, 1]
    assert ["actor/grad_norm" in line for line in lines] == [True, False, False]
    checkpoints = RunDirectory(tmp_path / "run").checkpoints(2)
    assert [one.step for one in checkpoints.complete()] == [2, 3]


def test_a_number_that_is_not_finite_is_left_out():
    """What comes of it, a step that is not taken, is counted."""
    parts = {"loss": [math.nan, 1.0], "ratio": [1.0, math.inf], "kl": [0.5, 1.5], "unused": []}
    found = update_metrics(
        [
            UpdateResult(
                metrics={name: Moments.of(torch.tensor(values)) for name, values in parts.items()},
                lr=1e-3,
                skipped=1,
                weight_version=4,
            )
        ]
    )

    assert found == {
        "actor/ratio_min": 1.0,
        "actor/kl": 1.0,
        "actor/lr": 1e-3,
        "actor/skipped_steps": 1.0,
        "actor/weight_version": 4.0,
    }


class Broken(ToyRollout):
    def submit(self, requests, *, decode=True):
        raise ValueError("x")


def test_case_35_a_failing_worker_names_role_rank_and_error(train, variant):
    variant(plugins.ROLLOUTS, "broken", Broken, ToyRolloutConfig)
    with pytest.raises(WorkerError) as caught:
        train("rollout.name=broken")

    first, *rest = str(caught.value).splitlines()
    assert first == "actor rank 0: ValueError: x (in generate)"
    assert any("raise ValueError" in line for line in rest)


@pytest.mark.parametrize("placement", ["shared", "replica"])
def test_a_rollout_with_weights_of_its_own_samples_the_same(train, metrics, placement):
    shared = train("rollout.placement=shared", "trainer.steps=3", name="shared")
    other = train(f"rollout.placement={placement}", "trainer.steps=3", name="other")

    assert metrics(other.run_dir) == metrics(shared.run_dir)
