"""Workers are plain classes: used here without any group."""

import pickle  # noqa: TID251 -- what Ray does to a request, in memory; no file is read
import subprocess
import sys

import attrs
import pytest
import torch

from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import StepKind
from omni_core.engine import BaseEngine
from omni_core.input_image import InputImage
from omni_core.losses import ConfiguredLoss
from omni_core.options import DiffusionSamplingConfig, ScheduleSource
from omni_core.rollout import (
    RolloutState,
    RolloutStateError,
    UpdateReport,
    WeightMismatchError,
    WeightUpdate,
)
from omni_core.testing.toys import ToyEngine, ToyRollout
from omni_core.testing.toys.family import ToyFamily
from omni_core.trajectory import RolloutRequest, SampleRecord
from omni_trainer import ActorRolloutRefWorker, ServerAdapter, TrainingWorker
from omni_trainer.assembly import worker_config
from omni_trainer.config import load_run
from omni_trainer.rollout_plan import sampling_spec
from omni_trainer.update_plan import OptimizerStepPlan, UpdatePlan
from omni_trainer.workers.batches import filled_up, train_batch
from omni_trainer.workers.server_adapter import serve

LINEAR = DiffusionSamplingConfig(
    num_inference_steps=4, guidance_scale=1.0, schedule=ScheduleSource.LINEAR
)


@pytest.fixture
def worker(toy_source):
    """A rank with its model."""
    made = make(toy_source)
    yield made
    made.close()


def make(source, *overrides):
    worker = ActorRolloutRefWorker(worker_config(load_run(source, overrides).config))
    worker.init_model()
    return worker


def requests(worker, groups=2, samples=3, window=(0, 2)):
    pipeline = worker.config.actor.model.pipeline
    sampling = sampling_spec(
        LINEAR, pipeline, sigmas=worker.schedule(LINEAR), kind=StepKind.SDE, noise_level=0.7
    )
    return [
        RolloutRequest(
            samples=tuple(
                SampleRecord(
                    group_id=f"g{g}", row_id=str(g), k=k, seed=10 * g + k, prompt=f"sign {g}"
                )
                for k in range(samples)
            ),
            sampling=sampling,
            window=window,
        )
        for g in range(groups)
    ]


def sampled(worker):
    return [trajectory for _, trajectory in worker.generate(requests(worker))]


def step(rows, denominator=None):
    rows = tuple(rows)
    return OptimizerStepPlan(
        rows=rows,
        advantages=tuple(1.0 if i % 2 else -1.0 for i in range(len(rows))),
        weights=(1.0,) * len(rows),
        denominator=denominator or 2.0 * len(rows),
    )


ALL = [(source, row) for source in range(2) for row in range(3)]


def weights(worker):
    return {n: t.clone() for n, t in worker.training.engine.get_per_tensor_param()}


def test_samples_come_with_what_a_driver_keeps(worker):
    pairs = list(worker.generate(requests(worker)))

    for info, trajectory in pairs:
        assert info.records == trajectory.records
        assert info.nbytes == trajectory.nbytes() > 0
        assert info.effective.sigmas == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert [info.records[0].group_id for info, _ in pairs] == ["g0", "g1"]


def test_log_probs_of_actor_and_reference_agree_until_the_actor_moves(worker):
    trajectories = sampled(worker)
    plan = step(ALL)
    before = worker.infer_actor_batch(plan, *trajectories)
    stored = torch.cat([trajectory.log_probs for trajectory in trajectories])

    torch.testing.assert_close(before, stored, rtol=0, atol=1e-6)
    assert torch.equal(worker.infer_ref_batch(plan, *trajectories), before)

    worker.update_actor(UpdatePlan(steps=(plan,), sources=(0, 1)), False, *trajectories)

    assert torch.equal(worker.infer_ref_batch(plan, *trajectories), before)
    assert not torch.equal(worker.infer_actor_batch(plan, *trajectories), before)


def test_an_algorithm_that_cannot_train_the_model_is_refused_before_it_is_loaded(
    toy_source, monkeypatch
):
    monkeypatch.setattr(ToyEngine, "initialize", lambda self: pytest.fail("it was loaded"))
    # A run's config says it earlier: here the worker has to.
    monkeypatch.setattr(FlowGRPOOptions, "mistakes", lambda self, facts: {})
    with pytest.raises(ValueError, match="flow_grpo cannot train 'toy': its loss looks at the ref"):
        make(toy_source, "model.lora=null", "algorithm.kl_coef=0.1")


def test_images_and_a_model_that_edits_them_come_together_or_are_refused_before_it_is_loaded(
    toy_source, monkeypatch
):
    monkeypatch.setattr(ToyEngine, "initialize", lambda self: pytest.fail("it was loaded"))
    with pytest.raises(
        ValueError, match=r"'toy': an input image is given.*leave data\.image_column"
    ):
        make(toy_source, "data.image_column=image")
    monkeypatch.setattr(ToyFamily, "inputs", ("text", "image"))
    with pytest.raises(ValueError, match=r"'toy': this model edits images.*: data\.image_column"):
        make(toy_source)


def test_a_request_reaches_a_server_with_its_image(worker):
    """The toy, which samples from text alone, says that it got one."""

    def travelled(method, *args, **keywords):
        held = pickle.dumps(args)
        return serve(worker.rollout, method, *pickle.loads(held), **keywords)  # noqa: S301

    adapter = ServerAdapter(travelled)
    (request,) = requests(worker, groups=1)
    edit = attrs.evolve(request, image=InputImage(data=b"a file"))
    with pytest.raises(ValueError, match="an input image is given, and this model samples from"):
        adapter.submit([edit])
    assert adapter.generate([request])[0].rows == 3


def test_an_engine_that_cannot_tell_is_tried(toy_source, monkeypatch):
    monkeypatch.setattr(ToyEngine, "facts", BaseEngine.facts)
    worker = make(toy_source, "model.lora=null")

    assert worker.training.engine.facts() is None
    assert worker.rollout.weight_version == worker.training.engine.weight_version
    worker.close()


def test_the_canary_is_exact(worker):
    report = worker.canary(*sampled(worker))

    assert report.rows == 6
    assert report.exact == {0: 0.0, 2: 0.0}
    assert max(report.floor.values()) <= 1e-6


def test_the_canary_goes_through_micro_batches_as_large_as_those_of_training(toy_source):
    worker = make(toy_source, "engine.micro_batch_size=10", "rollout.batch_size=1")
    sizes = []
    step = worker.training.engine.forward_step
    worker.training.engine.forward_step = lambda micro_batch, *rest, **more: (
        sizes.append(len(micro_batch.rows)) or step(micro_batch, *rest, **more)
    )

    report = worker.canary(*sampled(worker))

    assert sizes == [10]  # 5 rows of 2 steps: the batch of 1 that was sampled, and 4 more
    assert report.rows == 5
    worker.close()


def test_a_micro_batch_is_filled_as_far_as_there_are_rows(worker):
    trajectories = sampled(worker)  # 2 of 3 rows, 2 trained steps each

    assert filled_up(trajectories, [(1, 0)], pairs=2) == [(1, 0)]
    assert filled_up(trajectories, [(1, 0)], pairs=5) == [(0, 0), (0, 1), (1, 0)]
    assert filled_up(trajectories, [(1, 0)], pairs=99) == ALL


def test_rows_are_taken_in_the_order_of_the_plan(worker):
    trajectories = sampled(worker)
    batch = train_batch(trajectories, step([(0, 2), (1, 1), (0, 0)]))

    found = [(r.group_id, r.k) for r in batch.trajectory.records]
    assert found == [("g0", 2), ("g1", 1), ("g0", 0)]
    assert batch.trajectory.media is None
    assert torch.equal(batch.trajectory.log_probs[1], trajectories[1].log_probs[1])


def test_an_update_reports_what_it_did(worker):
    trajectories = sampled(worker)
    halves = (step(ALL[:3]), step(ALL[3:]))
    result = worker.update_actor(UpdatePlan(steps=halves, sources=(0, 1)), False, *trajectories)

    assert (result.weight_version, result.skipped, result.lr) == (2, 0, pytest.approx(1e-2))
    assert result.metrics["ratio"].count == 12
    assert result.metrics["grad_norm"].count == 2
    assert "lr" not in result.metrics
    assert worker.update_weights() == 2


def test_nothing_follows_a_step_that_was_skipped(worker, monkeypatch):
    """Or another policy would change under a version that was pushed already."""
    followed = []
    for name in ("after_update", "after_rollout"):
        monkeypatch.setattr(
            worker.algorithm, name, lambda _, optimizer_step, name=name: followed.append(name)
        )
    trajectories = sampled(worker)
    good = step(ALL[:3])
    bad = attrs.evolve(step(ALL[3:]), advantages=(float("nan"),) * 3)
    plan = UpdatePlan(steps=(bad,), sources=(0, 1))
    assert worker.update_actor(plan, False, *trajectories).skipped == 1
    assert followed == []
    plan = UpdatePlan(steps=(bad, good), sources=(0, 1))
    assert worker.update_actor(plan, False, *trajectories).skipped == 1
    assert followed == ["after_update", "after_rollout"]


def test_an_update_without_rows_does_nothing(worker):
    before = weights(worker)
    result = worker.update_actor(UpdatePlan(steps=(), sources=()), False)

    assert (result.weight_version, result.lr, result.metrics) == (0, None, {})
    assert all(torch.equal(before[n], t) for n, t in weights(worker).items())


def test_a_checkpoint_brings_everything_back(worker, toy_source, tmp_path):
    trajectories = sampled(worker)
    plan = UpdatePlan(steps=(step(ALL),), sources=(0, 1))
    worker.update_actor(plan, False, *trajectories)
    state = worker.save_checkpoint(tmp_path)
    other = make(toy_source)

    assert other.load_checkpoint(tmp_path, state) == 1
    for one in (worker, other):
        one.update_actor(plan, False, *trajectories)
    assert all(torch.equal(weights(worker)[n], t) for n, t in weights(other).items())
    assert torch.equal(torch.get_rng_state(), torch.get_rng_state())


def test_a_push_that_is_not_bound_whole_is_an_error(toy_source, monkeypatch):
    worker = make(toy_source, "rollout.placement=replica")
    update = ToyRollout.update

    def forgetful(self, new):
        report = update(self, new)
        return attrs.evolve(report, bound=report.bound[1:])

    monkeypatch.setattr(ToyRollout, "update", forgetful)
    trajectories = sampled(worker)
    worker.update_actor(UpdatePlan(steps=(step(ALL),), sources=(0, 1)), False, *trajectories)

    with pytest.raises(WeightMismatchError, match="did not bind"):
        worker.update_weights()


def test_pictures_are_picked_without_the_rest(worker):
    trajectories = sampled(worker)
    found = worker.pick_images([2, 0], *trajectories)

    assert torch.equal(found[0], trajectories[0].media.image[2])
    assert (found.shape, found.dtype) == ((2, 16, 16, 3), torch.uint8)


# -- training worker --------------------------------------------------------------------------------


def test_a_training_worker_needs_no_rollout(toy_source, worker):
    config = worker_config(load_run(toy_source).config)
    alone = TrainingWorker(config.training())
    with pytest.raises(RuntimeError, match="call reset first"):
        alone.infer_batch(train_batch(sampled(worker), step(ALL)))
    alone.set_loss_fn(ConfiguredLoss(config.actor.loss))
    alone.reset()
    batch = train_batch(sampled(worker), step(ALL))
    output = alone.train_mini_batch(batch, mini_batches=2)

    assert (alone.weight_version, alone.optimizer_steps) == (2, 2)
    assert output.metrics["loss"].count == 12
    with pytest.raises(ValueError, match="6 rows do not divide into 4 mini-batches; 1, 2, 3, 6"):
        alone.train_mini_batch(batch, mini_batches=4)
    alone.reset()
    assert alone.weight_version == 0


def test_adapters_are_copied_and_averaged(toy_source):
    worker = make(toy_source)
    engine = worker.training.engine
    engine.add_adapter("old")
    trajectories = sampled(worker)
    worker.update_actor(UpdatePlan(steps=(step(ALL),), sources=(0, 1)), False, *trajectories)
    new = dict(engine.get_per_tensor_param(adapter="default"))
    worker.copy_adapter("default", "old")
    old = dict(engine.get_per_tensor_param(adapter="old"))

    pairs = list(zip(new.values(), old.values(), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    worker.ema_update_adapter("default", "old", 0.5)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_each_policy_of_a_version_is_pushed_once_and_when_it_is_about_to_sample(
    toy_source, monkeypatch
):
    worker = make(toy_source, "rollout.placement=replica")
    worker.training.engine.add_adapter("old")
    pushed = []
    update = worker.rollout.update

    def watched(new):
        pushed.append((new.adapter, new.version))
        return update(new)

    monkeypatch.setattr(worker.rollout, "update", watched)
    asked = [attrs.evolve(request, adapter="old") for request in requests(worker)]
    with pytest.raises(ValueError, match="no adapter named 'old'"):
        worker.rollout.submit(asked)
    for adapter in (None, "default", "old", "old"):
        assert worker.update_weights(adapter) == 0
    assert pushed == [("old", 0)], "init_model pushed `default`"
    assert {t.adapter for t in worker.rollout.generate(asked)} == {"old"}

    plan = UpdatePlan(steps=(step(ALL),), sources=(0, 1))
    worker.update_actor(plan, False, *sampled(worker))
    assert worker.update_weights() == 1
    assert worker.update_weights("old") == 1
    assert pushed == [("old", 0), ("default", 1), ("old", 1)]


def test_a_rollout_that_holds_one_policy_is_pushed_again_what_another_one_replaced(
    toy_source, monkeypatch
):
    """As merged adapters are: an evaluation with another policy than samples takes its place."""
    worker = make(toy_source, "rollout.placement=replica")
    worker.training.engine.add_adapter("old")
    pushed = []

    def watched(new):
        pushed.append(new.adapter)
        return UpdateReport(version=new.version, bound=tuple(new.tensors), seconds=0.0, nbytes=0)

    monkeypatch.setattr(worker.rollout, "update", watched)
    monkeypatch.setattr(
        type(worker.config.rollout_options), "keeps_adapters", property(lambda options: False)
    )
    for adapter in ("old", "old", None, "default", "old"):
        worker.update_weights(adapter)
    assert pushed == ["old", "default", "old"]


def test_a_rollout_that_shares_the_module_is_pushed_nothing(worker, monkeypatch):
    monkeypatch.setattr(worker.rollout, "update", pytest.fail)
    assert worker.update_weights("default") == 0
    worker.update_actor(UpdatePlan(steps=(step(ALL),), sources=(0, 1)), False, *sampled(worker))
    assert worker.update_weights() == worker.update_weights("default") == 1


def test_an_engine_that_rests_is_in_host_memory_exactly_while_the_rollout_samples(
    toy_source, monkeypatch
):
    worker = make(toy_source, "rollout.placement=replica")
    said = []
    monkeypatch.setattr(worker.training.engine, "to", lambda device, **parts: said.append(device))
    list(worker.generate(requests(worker)))
    assert said == []
    monkeypatch.setattr(
        type(worker.config.actor.engine), "rests_on_host", property(lambda options: True)
    )
    for _ in worker.generate(requests(worker)):
        assert said == ["cpu"]
    assert said == ["cpu", "device"]

    given_up = worker.generate(requests(worker))
    next(given_up)
    given_up.close()
    assert said == ["cpu", "device"] * 2
    monkeypatch.setattr(worker.rollout, "stream", lost)
    with pytest.raises(OSError, match="the rollout is gone"):
        list(worker.generate(requests(worker)))
    assert said == ["cpu", "device"] * 3


def lost(*args, **options):
    raise OSError("the rollout is gone")


# -- a rollout that lives elsewhere -----------------------------------------------------------------


def test_a_rollout_is_used_through_its_client(toy_source):
    worker = make(toy_source, "rollout.placement=replica")
    far = worker.rollout
    calls = []

    def transport(method, *args, **kwargs):
        calls.append(method)
        return serve(far, method, *args, **kwargs)

    near = ServerAdapter(transport)
    asked = requests(worker)
    found = near.generate(asked)

    assert [t.records for t in found] == [request.samples for request in asked]
    assert near.state is RolloutState.READY
    near.pause()
    assert near.state is far.state is RolloutState.PAUSED
    tensors = dict(worker.training.engine.get_per_tensor_param())
    report = near.update(WeightUpdate(version=5, tensors=tensors))
    assert set(report.bound) == set(tensors)
    near.resume()
    assert near.weight_version == 5
    near.sleep()
    with pytest.raises(RolloutStateError, match="asleep"):
        near.submit(asked)
    near.wake()
    handle = near.submit(asked)
    near.cancel(handle)
    assert near.done(handle)
    near.close()
    assert {"submit", "poll", "done", "pause", "update", "resume", "sleep", "wake"} <= set(calls)


@pytest.mark.parametrize("method", ["_jobs", "engine", "__init__", "nothing"])
def test_only_what_a_rollout_has_is_served(toy_source, method):
    with pytest.raises(AttributeError, match="has no method"):
        serve(make(toy_source).rollout, method)


def test_workers_and_loops_load_without_ray():
    code = (
        "import sys, omni_trainer.workers, omni_trainer.loop, omni_trainer.run; "
        "print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
