"""What every training engine keeps: the same gradient however a batch is cut, and nothing silent.

A gradient is read through the contract alone: AdamW with an eps far above every gradient takes a step of
lr / eps times the gradient, so the change of the weights is the gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import KLForm
from omni_core.engine import (
    BaseEngine,
    CheckpointError,
    LossFunction,
    LossInputs,
    LossTerms,
    NonFiniteGradientsError,
    TrainBatch,
)
from omni_core.losses import ConfiguredLoss
from omni_core.options import DiffusionLossConfig, LRSchedule, OptimizerConfig
from omni_core.rollout import BaseRollout
from omni_core.testing.samples import requests_for, train_batch
from omni_core.trajectory import SamplingSpec, Trajectory

PROBE_EPS = 1e6
"""Far above the root of Adam's second moment."""

_SAMPLED: dict[tuple[type, str], Trajectory] = {}
"""Suite and parameters -> what an engine with its first weights samples."""

_NORMS: dict[type, float] = {}
"""Suite -> about how large its gradients are."""


class EngineFactory(Protocol):
    """Builds and initializes an engine; equal calls give equal weights."""

    def __call__(
        self, *, micro_batch_size: int = 8, optimizer: OptimizerConfig | None = None
    ) -> BaseEngine:
        """Build an engine with these options."""


class RolloutFactory(Protocol):
    """Builds a rollout that samples with an engine's present weights, in any of its batch shapes."""

    def __call__(self, engine: BaseEngine) -> BaseRollout:
        """Build a rollout."""


def policy_loss(inputs: LossInputs) -> LossTerms:
    """-A r without a clip: its gradient is never cut off."""
    ratio = (inputs.current.require_log_prob() - inputs.old_log_probs).exp()
    terms = -inputs.advantages * ratio
    return LossTerms(terms=terms, metrics={"ratio": ratio.detach()})


def nan_loss(inputs: LossInputs) -> LossTerms:
    """What a broken update looks like: no gradient is finite."""
    return LossTerms(terms=inputs.current.require_log_prob() * math.nan)


def kl_loss() -> ConfiguredLoss:
    """FlowGRPO with a KL to the reference."""
    options = FlowGRPOOptions(kl_coef=1.0, kl_form=KLForm.EXACT, clip_ratio=0.5)
    return ConfiguredLoss(DiffusionLossConfig(name="flow_grpo", options=options))


class EngineSuite:
    """Subclass as `class TestMyEngine(EngineSuite)`.

    Fixtures to provide: `make_engine` (an `EngineFactory`), `make_rollout` (a `RolloutFactory`) and
    `sampling` (a stochastic spec of at least 3 steps). An engine of more than one rank is tested by
    running the suite on every rank (`OnRanks`): all ranks sample all rows, and train those that `mine`
    deals to them.
    """

    ratio_bound = 1e-6
    """|ratio - 1| in training micro-batches, before any update."""

    gradient_bound = 1e-5
    """Of the global norm: 1e-5 for float32, 1e-12 for float64."""

    training = OptimizerConfig(lr=1e-3, weight_decay=0.0)
    """An optimizer under which two steps move the weights and keep them finite."""

    policy_loss: LossFunction = staticmethod(policy_loss)
    """A loss with a gradient for every row, and a metric `counted` of each."""

    nan_loss: LossFunction = staticmethod(nan_loss)
    """No gradient of it is finite."""

    kl_loss: LossFunction = kl_loss()
    """Looks at the reference, and says `kl`."""

    first_kl = 0.0
    """The largest KL to the reference of a policy that was not trained yet."""

    counted = "ratio"

    scores_steps = True
    """Whether `infer_batch` gives log-probs of the rollout's own steps."""

    untouched: tuple[str, ...] = ()
    """Trained tensors whose gradient is zero by construction."""

    @pytest.fixture
    def make_engine(self) -> EngineFactory:
        """See `EngineFactory`."""
        raise NotImplementedError

    @pytest.fixture
    def make_rollout(self) -> RolloutFactory:
        """See `RolloutFactory`."""
        raise NotImplementedError

    @pytest.fixture
    def sampling(self) -> SamplingSpec:
        """What trajectories are sampled with."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self, make_engine: EngineFactory) -> BaseEngine:
        """An engine with the training optimizer."""
        return make_engine(optimizer=self.training)

    @pytest.fixture
    def trajectory(self, request: pytest.FixtureRequest, engine: BaseEngine) -> Trajectory:
        """Three groups of two, sampled once by an engine's first weights; windows differ."""
        callspec = getattr(request.node, "callspec", None)
        key = (type(self), repr(callspec and callspec.params))
        if key not in _SAMPLED:
            sampling: SamplingSpec = request.getfixturevalue("sampling")
            make_rollout: RolloutFactory = request.getfixturevalue("make_rollout")
            asked = requests_for(sampling, window=tuple(range(2)))
            asked[1] = attrs.evolve(asked[1], window=(0, sampling.num_steps - 2))
            _SAMPLED[key] = Trajectory.concat(make_rollout(engine).generate(asked))
        return _SAMPLED[key]

    @pytest.fixture
    def whole_batch(self, trajectory: Trajectory) -> TrainBatch:
        """All rows of the trajectory."""
        return train_batch(trajectory)

    @pytest.fixture
    def batch(self, engine: BaseEngine, whole_batch: TrainBatch) -> TrainBatch:
        """The rows of this rank: all of them on one."""
        return self.mine(engine, whole_batch)

    def mine(self, engine: BaseEngine, batch: TrainBatch) -> TrainBatch:
        """The rows that this rank trains of all; several ranks have more and fewer."""
        rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        rows = range(batch.trajectory.rows)
        own = [row for row in rows if row % (2 * size - 1) % size == rank]
        return batch.select(torch.tensor(own))

    def redrawn(self, batch: TrainBatch, *, seed: int) -> TrainBatch:
        """The same rows with other advantages."""
        drawn = train_batch(batch.trajectory, seed=seed).advantages
        return attrs.evolve(batch, advantages=drawn)

    def _needs_log_probs(self) -> None:
        if not self.scores_steps:
            pytest.skip("it scores no step of the rollout")

    def wait_for_all(self) -> None:
        """Let every rank come here: what was written before can be read after."""
        if _on_ranks():
            dist.barrier()

    def _writes(self) -> bool:
        return not _on_ranks() or dist.get_rank() == 0

    # -- how weights are read ----------------------------------------------------------------------

    def trained(self, engine: BaseEngine) -> dict[str, Tensor]:
        """Copies of every trained tensor: the adapter's, or all weights."""
        adapter = "default" if engine.has_adapter else None
        named = engine.get_per_tensor_param(adapter=adapter)
        return {name: tensor.detach().clone() for name, tensor in named}

    def frozen(self, engine: BaseEngine) -> dict[str, Tensor]:
        """Copies of every tensor that must not change; nothing where all weights are trained."""
        if not engine.has_adapter:
            return {}
        named = engine.get_per_tensor_param(adapter=None)
        return {name: tensor.detach().clone() for name, tensor in named}

    def _needs_reference(self, engine: BaseEngine) -> None:
        facts = engine.facts()
        if not engine.has_adapter and not (facts is not None and facts.keeps_policies):
            pytest.skip("every weight is trained, and it keeps no reference")

    def requires_grad(self, engine: Any) -> dict[str, bool]:
        """The requires_grad map of the engine's modules (`engine.denoiser`)."""
        return {
            f"{expert}.{name}": parameter.requires_grad
            for expert, module in engine.denoiser.experts.items()
            for name, parameter in module.named_parameters()
        }

    def gradient(
        self,
        make_engine: EngineFactory,
        batch: TrainBatch,
        *,
        micro_batch_size: int,
        loss: LossFunction | None = None,
    ) -> dict[str, Tensor]:
        """The gradient of every trained tensor in float64, up to a factor that is the same for all."""
        # Of any batch: far enough for the difference of weights to be exact, near enough to be finite.
        if type(self) not in _NORMS:
            _NORMS[type(self)] = self._norm(make_engine, batch, self.policy_loss)
        scale = 10.0 / _NORMS[type(self)]
        probe = OptimizerConfig(
            lr=scale * PROBE_EPS, eps=PROBE_EPS, weight_decay=0.0, max_grad_norm=None
        )
        engine = make_engine(micro_batch_size=micro_batch_size, optimizer=probe)
        before = self.trained(engine)
        engine.train_batch(batch, loss or self.policy_loss)
        after = self.trained(engine)
        return {name: before[name].double() - after[name].double() for name in before}

    def _norm(self, make_engine: EngineFactory, batch: TrainBatch, loss: LossFunction) -> float:
        output = make_engine(optimizer=self.training).train_batch(batch, loss)
        norm = output.metrics["grad_norm"].mean
        assert norm > 0.0, "the batch gives no gradient"
        return norm

    # -- training ----------------------------------------------------------------------------------

    def test_training_moves_what_is_trained_and_nothing_else(
        self, engine: BaseEngine, batch: TrainBatch
    ) -> None:
        """Every trained tensor with a gradient moves; frozen ones keep their bits."""
        before, frozen = self.trained(engine), self.frozen(engine)
        for _ in range(2):  # the first step of a LoRA moves B alone: A has no gradient while B is 0
            engine.train_batch(batch, self.policy_loss)
        after = self.trained(engine)
        still = [name for name, value in before.items() if torch.equal(value, after[name])]
        assert sorted(still) == sorted(self.untouched)
        for name, value in self.frozen(engine).items():
            assert torch.equal(value, frozen[name]), name

    def test_case_7_replay_is_exact(self, engine: BaseEngine, trajectory: Trajectory) -> None:
        """CASES 7: in the rollout's own batches, replayed minus stored log-probs is exactly 0."""
        replayed = engine.replay(trajectory)
        assert replayed.dtype is torch.float32
        assert torch.equal(replayed, trajectory.log_probs)

    def test_replay_does_not_depend_on_the_order_of_the_rows(
        self, engine: BaseEngine, trajectory: Trajectory
    ) -> None:
        """Rows find their batch again by its name."""
        rows = torch.arange(trajectory.rows).flip(0)
        assert torch.equal(engine.replay(trajectory.select(rows)), trajectory.log_probs[rows])

    @pytest.mark.parametrize("micro_batch_size", [1, 5, 64])
    def test_case_7_the_ratio_is_one_before_an_update(
        self,
        make_engine: EngineFactory,
        batch: TrainBatch,
        micro_batch_size: int,
    ) -> None:
        """CASES 7: in training micro-batches |ratio - 1| stays within the bound."""
        self._needs_log_probs()
        engine = make_engine(micro_batch_size=micro_batch_size, optimizer=self.training)
        found = engine.infer_batch(batch).log_probs
        assert found is not None
        assert found.shape == batch.trajectory.log_probs.shape
        ratio = (found - batch.trajectory.log_probs).exp()
        assert float((ratio - 1.0).abs().max()) <= self.ratio_bound

    @pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
    def test_case_8_the_gradient_does_not_depend_on_the_cut(
        self, make_engine: EngineFactory, batch: TrainBatch, micro_batch_size: int
    ) -> None:
        """CASES 8: micro-batches of any size give the unsplit batch's gradient."""
        whole = self.gradient(make_engine, batch, micro_batch_size=1000)
        cut = self.gradient(make_engine, batch, micro_batch_size=micro_batch_size)
        assert _distance(cut, whole) <= self.gradient_bound

    def test_case_8_weights_after_three_steps_do_not_depend_on_the_cut(
        self, make_engine: EngineFactory, batch: TrainBatch
    ) -> None:
        """CASES 8: in float64, weights after 3 steps agree within 1e-10."""
        if self.gradient_bound > 1e-10:
            pytest.skip("Adam's first steps turn rounding of float32 into steps of their own")
        found = []
        for size in (1, 1000):
            engine = make_engine(micro_batch_size=size, optimizer=self.training)
            self._steps(engine, batch, range(3))
            found.append(self.trained(engine))
        for name, value in found[0].items():
            torch.testing.assert_close(value, found[1][name], rtol=0.0, atol=1e-10)

    def test_metrics_do_not_depend_on_the_cut(
        self, make_engine: EngineFactory, batch: TrainBatch, trajectory: Trajectory
    ) -> None:
        """Every (sample, step) pair is counted once."""
        means = []
        for size in (1, 5, 1000):
            engine = make_engine(micro_batch_size=size, optimizer=self.training)
            found = engine.infer_batch(batch, self.policy_loss).metrics[self.counted]
            share = batch.trajectory.rows / trajectory.rows
            assert found.count == batch.denominator * share
            means.append(found.mean)
        assert means == pytest.approx(means[:1] * 3, rel=self.ratio_bound)
        if self.scores_steps:
            assert means[0] == pytest.approx(1.0, abs=self.ratio_bound)

    def test_a_row_of_weight_zero_counts_for_nothing(
        self, make_engine: EngineFactory, batch: TrainBatch, trajectory: Trajectory
    ) -> None:
        """A dummy or unscored row changes neither the gradient nor a mean."""
        rows = torch.arange(batch.trajectory.rows)
        kept, dropped = rows[rows % 3 != 2], rows[rows % 3 == 2]
        weights, advantages = batch.weights.clone(), batch.advantages.clone()
        weights[dropped] = 0.0
        advantages[dropped] = 5.0
        padded = attrs.evolve(batch, weights=weights, advantages=advantages)
        without = self.gradient(make_engine, batch.select(kept), micro_batch_size=3)
        assert (
            _distance(self.gradient(make_engine, padded, micro_batch_size=3), without)
            <= self.gradient_bound
        )
        engine = make_engine(optimizer=self.training)
        assert engine.infer_batch(padded, self.policy_loss).metrics[self.counted].count == (
            len(kept) * batch.denominator / trajectory.rows
        )

    def test_the_gradient_is_that_of_the_objective(
        self, make_engine: EngineFactory, engine: BaseEngine, whole_batch: TrainBatch
    ) -> None:
        """A small step against it lowers the mean term by its square, however many ranks took part."""

        def objective(inputs: Any) -> LossTerms:
            terms = type(self).policy_loss(inputs).terms
            return LossTerms(terms=terms, metrics={"objective": terms.detach()})

        def value(engine: BaseEngine) -> float:
            found = engine.infer_batch(whole_batch, objective).metrics["objective"]
            return found.mean * found.count / whole_batch.denominator

        batch = self.mine(engine, whole_batch)
        square = self._norm(make_engine, batch, self.policy_loss) ** 2
        probe = OptimizerConfig(
            lr=1e-3 / square * PROBE_EPS, eps=PROBE_EPS, weight_decay=0.0, max_grad_norm=None
        )
        engine = make_engine(optimizer=probe)
        before = value(engine)
        engine.train_batch(batch, self.policy_loss)
        assert before - value(engine) == pytest.approx(1e-3, rel=0.1)

    def test_case_27_the_gradient_does_not_depend_on_the_deal(
        self, make_engine: EngineFactory, batch: TrainBatch, whole_batch: TrainBatch
    ) -> None:
        """CASES 27: rows dealt unevenly, and all rows on every rank at their share of the weight."""
        size = make_engine(optimizer=self.training).get_data_parallel_size()
        if size == 1:
            pytest.skip("rows are dealt to one place")
        shared = attrs.evolve(whole_batch, denominator=whole_batch.denominator * size)
        dealt = self.gradient(make_engine, batch, micro_batch_size=3)
        whole = self.gradient(make_engine, shared, micro_batch_size=3)
        assert _distance(dealt, whole) <= self.gradient_bound

    def test_the_denominator_is_the_callers(
        self, make_engine: EngineFactory, batch: TrainBatch
    ) -> None:
        """Half the denominator is twice the gradient: the engine takes no mean of its own."""
        half = attrs.evolve(batch, denominator=batch.denominator / 2.0)
        ratio = self._norm(make_engine, half, self.policy_loss) / self._norm(
            make_engine, batch, self.policy_loss
        )
        assert ratio == pytest.approx(2.0, rel=1e-4)

    def test_steps_count_what_their_weights_say(
        self, make_engine: EngineFactory, batch: TrainBatch
    ) -> None:
        """Step weights scale the gradient, and a step of weight 0 stays in the denominator."""
        self._needs_log_probs()
        ones = torch.ones(batch.trajectory.step_indices.shape)
        whole = self._norm(make_engine, batch, self.policy_loss)
        half = attrs.evolve(batch, step_weights=0.5 * ones)
        assert self._norm(make_engine, half, self.policy_loss) == pytest.approx(
            0.5 * whole, rel=1e-4
        )
        first = ones.clone()
        first[:, 1:] = 0.0
        kept = attrs.evolve(
            batch.trajectory,
            step_indices=batch.trajectory.step_indices[:, :1],
            log_probs=batch.trajectory.log_probs[:, :1],
        )
        alone = self._norm(make_engine, attrs.evolve(batch, trajectory=kept), self.policy_loss)
        weighed = attrs.evolve(batch, step_weights=first)
        assert self._norm(make_engine, weighed, self.policy_loss) == pytest.approx(alone, rel=1e-4)

    def test_a_tensordict_is_taken_like_a_batch(
        self, engine: BaseEngine, batch: TrainBatch
    ) -> None:
        """The two forms of a batch give the same bits."""
        self._needs_log_probs()
        straight = engine.infer_batch(batch).log_probs
        boxed = engine.infer_batch(batch.to_tensordict()).log_probs
        assert straight is not None
        assert boxed is not None
        assert torch.equal(straight, boxed)

    def test_training_needs_a_loss(self, engine: BaseEngine, batch: TrainBatch) -> None:
        """A loss is passed, or set before."""
        with pytest.raises(ValueError, match="loss"):
            engine.train_batch(batch)
        engine.set_loss_fn(self.policy_loss)
        assert engine.train_batch(batch).metrics["skipped"].mean == 0.0

    def test_inferring_records_no_graph_and_moves_nothing(
        self, engine: BaseEngine, batch: TrainBatch
    ) -> None:
        """Modes are left as they were found."""
        before = self.trained(engine)
        recorded = torch.is_grad_enabled()
        output = engine.infer_batch(batch, self.policy_loss)
        if self.scores_steps:
            assert output.log_probs is not None
            assert not output.log_probs.requires_grad
        with engine.eval_mode():
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() == recorded
        for name, value in self.trained(engine).items():
            assert torch.equal(value, before[name]), name

    # -- optimizer ---------------------------------------------------------------------------------

    def test_the_learning_rate_follows_its_schedule(
        self, make_engine: EngineFactory, batch: TrainBatch
    ) -> None:
        """Each step reports the rate that it used."""
        config = attrs.evolve(
            self.training, schedule=LRSchedule.COSINE, warmup_steps=1, total_steps=4
        )
        engine = make_engine(optimizer=config)
        used = [engine.train_batch(batch, self.policy_loss).metrics["lr"].mean for _ in range(3)]
        assert used == pytest.approx([config.rate(step) for step in range(3)])

    def test_gradients_are_clipped_to_the_global_norm(
        self, make_engine: EngineFactory, batch: TrainBatch
    ) -> None:
        """The norm is reported before clipping; the step is that of the clipped gradient."""
        norm = self._norm(make_engine, batch, self.policy_loss)
        limit = norm / 8.0
        probe = OptimizerConfig(
            lr=PROBE_EPS / limit, eps=PROBE_EPS, weight_decay=0.0, max_grad_norm=limit
        )
        engine = make_engine(optimizer=probe)
        before = self.trained(engine)
        output = engine.train_batch(batch, self.policy_loss)
        assert output.metrics["grad_norm"].mean == pytest.approx(norm, rel=1e-4)
        after = self.trained(engine)
        moved = math.sqrt(
            sum(float((before[n] - after[n]).double().square().sum()) for n in before)
        )
        assert moved == pytest.approx(1.0, rel=1e-3)

    def test_case_30_a_non_finite_gradient_is_skipped_counted_and_ends_the_run(
        self, make_engine: EngineFactory, batch: TrainBatch
    ) -> None:
        """CASES 30: weights unchanged, a good step starts the count anew, an error after the limit.

        On several ranks only the last one's gradient is not finite.
        """
        engine = make_engine(optimizer=attrs.evolve(self.training, max_nonfinite_steps=1))
        last = engine.get_data_parallel_rank() == engine.get_data_parallel_size() - 1
        broken = self.nan_loss if last else self.policy_loss
        before = self.trained(engine)
        output = engine.train_batch(batch, broken)
        assert output.metrics["skipped"].mean == 1.0
        assert "grad_norm" not in output.metrics, "a metric is finite or is not there (CASES 36)"
        for name, value in self.trained(engine).items():
            assert torch.equal(value, before[name]), name
        assert engine.train_batch(batch, self.policy_loss).metrics["skipped"].mean == 0.0
        assert engine.train_batch(batch, broken).metrics["skipped"].mean == 1.0
        good = self.trained(engine)
        with pytest.raises(NonFiniteGradientsError, match="max_nonfinite_steps"):
            engine.train_batch(batch, broken)
        for name, value in self.trained(engine).items():
            assert torch.equal(value, good[name]), name

    # -- reference ---------------------------------------------------------------------------------

    def test_case_24_the_reference_leaves_requires_grad_alone(self, engine: BaseEngine) -> None:
        """CASES 24: entering and leaving, also by an exception, changes no parameter's flag."""
        self._needs_reference(engine)
        before = self.requires_grad(engine)
        assert True in before.values()
        with engine.disable_adapter():
            pass
        assert self.requires_grad(engine) == before
        with pytest.raises(RuntimeError, match="inside"), engine.disable_adapter():
            raise RuntimeError("inside")
        assert self.requires_grad(engine) == before

    def test_case_24_the_kl_is_zero_at_first_and_positive_after_a_nudge(
        self, engine: BaseEngine, batch: TrainBatch
    ) -> None:
        """CASES 24: a fresh adapter is the base model; a trained one is not."""
        self._needs_reference(engine)
        loss = self.kl_loss
        assert engine.infer_batch(batch, loss).metrics["kl"].high <= self.first_kl
        engine.train_batch(batch, loss)
        kl = engine.infer_batch(batch, loss).metrics["kl"]
        assert kl.mean > 0.0
        assert kl.low >= 0.0

    def test_case_23_merged_weights_are_all_of_the_policys(
        self, engine: BaseEngine, batch: TrainBatch
    ) -> None:
        """CASES 23: a fresh adapter merged is the base; a trained one changes it, under the same names."""
        base = {n: t.detach().clone() for n, t in engine.get_per_tensor_param(adapter=None)}
        for name, value in engine.get_per_tensor_param(merged=True):
            assert torch.equal(value, base[name]), name
        engine.train_batch(batch, self.policy_loss)
        found = dict(engine.get_per_tensor_param(merged=True))
        assert found.keys() == base.keys()
        assert not all(torch.equal(value, base[name]) for name, value in found.items())

    # -- checkpoints -------------------------------------------------------------------------------

    def _steps(self, engine: BaseEngine, batch: TrainBatch, steps: range) -> list[float]:
        used = []
        for step in steps:
            fresh = self.redrawn(batch, seed=step)
            used.append(engine.train_batch(fresh, self.policy_loss).metrics["lr"].mean)
        return used

    def test_case_28_two_and_two_steps_are_four(
        self, make_engine: EngineFactory, batch: TrainBatch, tmp_path: Path
    ) -> None:
        """CASES 28: weights, moments and learning rate go on bit for bit from a checkpoint."""
        config = attrs.evolve(
            self.training, schedule=LRSchedule.LINEAR, warmup_steps=1, total_steps=6
        )
        straight = make_engine(optimizer=config)
        rates = self._steps(straight, batch, range(4))
        first = make_engine(optimizer=config)
        self._steps(first, batch, range(2))
        state = json.loads(json.dumps(first.save_checkpoint(tmp_path)))
        self.wait_for_all()
        resumed = make_engine(optimizer=config)
        resumed.load_checkpoint(tmp_path, state)
        for name, value in self.trained(resumed).items():
            assert torch.equal(value, self.trained(first)[name]), name
        assert self._steps(resumed, batch, range(2, 4)) == rates[2:]
        expected = self.trained(straight)
        for name, value in self.trained(resumed).items():
            assert torch.equal(value, expected[name]), name

    def test_an_incomplete_checkpoint_is_refused(
        self, make_engine: EngineFactory, engine: BaseEngine, tmp_path: Path
    ) -> None:
        """A missing file is an error that says so, and changes nothing."""
        state = engine.save_checkpoint(tmp_path)
        self.wait_for_all()
        if self._writes():
            largest = max(_files(tmp_path), key=lambda path: path.stat().st_size)
            largest.unlink()
        self.wait_for_all()
        other = make_engine(optimizer=self.training)
        before = self.trained(other)
        with pytest.raises(CheckpointError):
            other.load_checkpoint(tmp_path, state)
        for name, value in self.trained(other).items():
            assert torch.equal(value, before[name]), name

    def test_a_checkpoint_of_another_kind_is_refused(
        self, engine: BaseEngine, tmp_path: Path
    ) -> None:
        """State that was not returned by `save_checkpoint` of such an engine is no checkpoint."""
        engine.save_checkpoint(tmp_path)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(tmp_path, {})

    def test_an_adapter_is_exported_as_a_file(self, engine: BaseEngine, tmp_path: Path) -> None:
        """The returned path exists below the directory."""
        if not engine.has_adapter:
            pytest.skip("there is no adapter to export")
        path = engine.export_adapter(tmp_path / "lora")
        self.wait_for_all()
        assert path.is_file()
        assert path.is_relative_to(tmp_path)

    # -- ranks -------------------------------------------------------------------------------------

    def test_ranks_are_within_their_size(self, engine: BaseEngine) -> None:
        """A rank knows its place."""
        assert 0 <= engine.get_data_parallel_rank() < engine.get_data_parallel_size()
        assert engine.is_mp_src_rank_with_outputs() in (True, False)

    def test_weights_are_named_once(self, engine: BaseEngine) -> None:
        """Names are unique, tensors whole and finite."""
        named = list(engine.get_per_tensor_param(adapter="default" if engine.has_adapter else None))
        assert named
        assert len({name for name, _ in named}) == len(named)
        assert all(torch.isfinite(tensor).all() for _, tensor in named)


def _on_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all tensors."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[name] - theirs[name]).square().sum()) for name in ours)
    size = sum(float(value.square().sum()) for value in theirs.values())
    return math.sqrt(apart / size)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file())
