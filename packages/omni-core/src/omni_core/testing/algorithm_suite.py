"""What every algorithm keeps: unscored rows count for nothing, and a row's loss is its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

from omni_core.algorithm import Algorithm, ModelFacts, Policy, Timesteps
from omni_core.choices import StepKind
from omni_core.engine import LossInputs
from omni_core.forward_process import ForwardLossInputs
from omni_core.options import AlgorithmConfig, DType, RunFacts
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing.algorithm_training import ToyTraining
from omni_core.testing.samples import (
    forward_loss_inputs,
    loss_inputs,
    take_rows,
    trained_leaf,
)

Inputs = LossInputs | ForwardLossInputs

FITS = RunFacts(num_inference_steps=10, samples_per_prompt=4, prompts_per_step=3)


class AlgorithmSuite:
    """Subclass as `class TestMyAlgorithm(AlgorithmSuite)` and provide the fixture `algorithm`.

    Its options have to fit a run of 10 sampling steps, 3 prompts a step and groups of 4.
    """

    group_relative = True
    """Whether an advantage compares the samples of a group."""

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        """A fresh algorithm."""
        raise NotImplementedError

    @pytest.fixture
    def schedule(self) -> FlowMatchSchedule:
        """A schedule of 10 steps."""
        return FlowMatchSchedule.linear(10, shift=3.0)

    @pytest.fixture
    def inputs(self, algorithm: Algorithm) -> Inputs:
        """Float64 loss inputs, sampled as the algorithm asks, of units as it asks."""
        if algorithm.options.model_type == "diffusion_forward":
            rows = unit_rows(algorithm)
            return forward_loss_inputs(units=6 if rows == 1 else 3, unit_rows=rows)
        asked = algorithm.options.rollout_algo()
        return loss_inputs(kind=StepKind(asked.kind), noise_level=asked.noise_level)

    # -- what it declares --------------------------------------------------------------------------

    def test_declarations_agree(self, algorithm: Algorithm) -> None:
        """What is sampled, predicted and adapted fits together."""
        asked = algorithm.options.rollout_algo()
        kind = StepKind(asked.kind)
        assert math.isfinite(asked.noise_level)
        assert asked.noise_level >= 0.0
        assert (asked.noise_level == 0.0) == (kind is StepKind.ODE)
        assert asked.adapter in algorithm.adapters
        assert algorithm.predictions[0].policy is Policy.CURRENT
        policies = [prediction.policy for prediction in algorithm.predictions]
        assert algorithm.options.needs_reference == (Policy.REFERENCE in policies)
        assert algorithm.adapters[0] == "default"
        for policy in (Policy.OLD, Policy.EMA):
            assert policy not in policies or policy.value in algorithm.adapters
        drawn = algorithm.options.model_type == "diffusion_forward"
        expected = Timesteps.DRAWN if drawn else Timesteps.REPLAY
        assert {prediction.timesteps for prediction in algorithm.predictions} == {expected}

    def test_a_run_that_fits_is_not_complained_about(self, algorithm: Algorithm) -> None:
        """The options of the fixture fit the run that the suite describes."""
        assert algorithm.options.mistakes(FITS) == {}

    @pytest.mark.parametrize("adapter", [True, False])
    def test_what_cannot_be_trained_is_a_sentence(
        self, algorithm: Algorithm, adapter: bool
    ) -> None:
        """`unsupported` gives None or a reason."""
        facts = ModelFacts(
            family="toy", masked_text=True, has_adapter=adapter, experts=("transformer",)
        )
        reason = algorithm.unsupported(facts)
        assert reason is None or len(reason.split()) > 2

    def test_case_16_a_group_of_one_is_a_mistake(self, algorithm: Algorithm) -> None:
        """CASES 16: refused before anything starts, naming the group size."""
        if not self.group_relative:
            pytest.skip("it does not compare the samples of a group")
        facts = RunFacts(num_inference_steps=10, samples_per_prompt=1, prompts_per_step=3)
        said = " ".join(algorithm.options.mistakes(facts).values())
        assert "samples_per_prompt" in said

    def test_a_schedule_without_a_stochastic_step_is_a_mistake(self, algorithm: Algorithm) -> None:
        """One sampling step leaves nothing to train where log-probs are needed."""
        if algorithm.options.rollout_algo().kind == StepKind.ODE:
            pytest.skip("it needs no stochastic step")
        facts = RunFacts(num_inference_steps=1, samples_per_prompt=4, prompts_per_step=3)
        assert algorithm.options.mistakes(facts)

    def test_options_load_no_torch(self, algorithm: Algorithm) -> None:
        """A config is checked without importing a backend."""
        module = type(algorithm.options).__module__
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, module

    # -- windows -----------------------------------------------------------------------------------

    def test_case_6_a_window_never_holds_the_last_step(
        self, algorithm: Algorithm, schedule: FlowMatchSchedule
    ) -> None:
        """CASES 6: ascending steps of the schedule but its last; none for ode."""
        for seed in range(20):
            window = algorithm.window(schedule, seed=seed, iteration=seed)
            assert list(window) == sorted(set(window))
            assert set(window) <= set(range(schedule.num_steps - 1))
            assert bool(window) == (algorithm.options.rollout_algo().kind != StepKind.ODE)

    def test_equal_seeds_give_equal_windows(
        self, algorithm: Algorithm, schedule: FlowMatchSchedule
    ) -> None:
        """Every rank finds the same window, in any order of asking."""
        first = [algorithm.window(schedule, seed=seed, iteration=0) for seed in range(8)]
        again = [algorithm.window(schedule, seed=seed, iteration=0) for seed in reversed(range(8))]
        assert first == again[::-1]

    # -- advantages --------------------------------------------------------------------------------

    def test_case_11_an_unscored_row_counts_for_nothing(self, algorithm: Algorithm) -> None:
        """CASES 11: advantage exactly 0, and in no mean, whatever its value is."""
        groups = ["a", "b"] * 4
        rewards = torch.tensor([0.2, 0.9, math.nan, 0.1, 0.6, 0.5, 0.4, 0.3])
        valid = torch.tensor([True, True, False, True, True, True, True, True])
        found = algorithm.advantages(rewards, groups, valid).advantages
        assert found[2] == 0.0
        assert torch.isfinite(found).all()
        kept = valid.nonzero().flatten()
        without = algorithm.advantages(
            rewards[kept], [groups[row] for row in kept], torch.ones(7, dtype=torch.bool)
        )
        assert torch.equal(found[kept], without.advantages)

    def test_case_10_equal_rewards_teach_nothing(self, algorithm: Algorithm) -> None:
        """CASES 10: all advantages 0, also where rewards differ by rounding alone."""
        if not self.group_relative:
            pytest.skip("it does not compare the samples of a group")
        for rewards in (torch.ones(4), 0.7 + torch.arange(4) * 1e-8):
            found = algorithm.advantages(rewards, ["g"] * 4, torch.ones(4, dtype=torch.bool))
            assert found.advantages.tolist() == [0.0] * 4

    def test_case_12_advantages_follow_their_rows(self, algorithm: Algorithm) -> None:
        """CASES 12: groups in any order, the output in the input's."""
        groups = ["a"] * 3 + ["b"] * 5
        rewards = torch.tensor([0.1, 0.5, 0.9, 0.3, 0.2, 0.8, 0.4, 0.6])
        valid = torch.ones(8, dtype=torch.bool)
        straight = algorithm.advantages(rewards, groups, valid).advantages
        rows = torch.tensor([5, 0, 3, 7, 1, 4, 2, 6])
        turned = algorithm.advantages(rewards[rows], [groups[row] for row in rows], valid)
        assert torch.equal(turned.advantages, straight[rows])

    def test_case_11_units_hold_scored_rows_once(self, algorithm: Algorithm) -> None:
        """CASES 11: a row is in one unit at most, and an unscored one in none."""
        groups = ["a", "b"] * 4
        rewards = torch.tensor([0.2, 0.9, 0.7, 0.1, 0.6, 0.5, 0.4, 0.3])
        valid = torch.tensor([True, True, False, True, True, True, True, True])
        found = algorithm.advantages(rewards, groups, valid).advantages
        units = algorithm.units(found, groups, valid)
        rows = [row for unit in units for row in unit]
        assert rows
        assert len(rows) == len(set(rows))
        assert set(rows) <= set(valid.nonzero().flatten().tolist())
        assert all(units)
        if any(len(unit) > 1 for unit in units):
            assert algorithm.options.model_type == "diffusion_forward"

    # -- loss --------------------------------------------------------------------------------------

    def test_the_loss_is_one_finite_term_a_row(self, algorithm: Algorithm, inputs: Inputs) -> None:
        """Terms [M] with a graph to the policy, metrics [M] without one."""
        result = algorithm.loss(inputs)
        assert result.terms.shape == inputs.advantages.shape
        assert torch.isfinite(result.terms).all()
        (gradient,) = torch.autograd.grad(result.terms.sum(), trained_leaf(inputs))
        assert torch.isfinite(gradient).all()
        assert gradient.abs().sum() > 0
        for name, values in result.metrics.items():
            assert values.shape == inputs.advantages.shape, name
            assert not values.requires_grad, name
            assert torch.isfinite(values).all(), name

    def test_case_8_a_row_does_not_see_the_rest_of_its_micro_batch(
        self, algorithm: Algorithm, inputs: Inputs
    ) -> None:
        """CASES 8: terms and metrics are the same however the units are cut, and rows ordered."""
        whole = algorithm.loss(inputs)
        for rows in cuts(inputs):
            part = algorithm.loss(take_rows(inputs, rows))
            torch.testing.assert_close(part.terms, whole.terms[rows], rtol=1e-12, atol=1e-12)
            assert part.metrics.keys() == whole.metrics.keys()
            for name, values in part.metrics.items():
                torch.testing.assert_close(values, whole.metrics[name][rows])

    def test_weights_are_left_to_the_engine(self, algorithm: Algorithm, inputs: Inputs) -> None:
        """The engine weighs: a loss that does it too would do it twice."""
        other = attrs.evolve(inputs, weights=torch.zeros_like(inputs.weights))
        assert torch.equal(algorithm.loss(other).terms, algorithm.loss(inputs).terms)

    # -- training the toy model --------------------------------------------------------------------

    def test_what_has_a_gradient_moves_and_nothing_else(
        self, algorithm: Algorithm, tmp_path: Path
    ) -> None:
        """The base and every other adapter stay as they are, bit for bit."""
        training = ToyTraining(algorithm, tmp_path)
        training.update()  # until the second update LoRA's A has a gradient of zero
        batch, before = training.batch(), training.tensors()
        moving = {name for name, value in training.gradients(batch).items() if value.any()}
        training.engine.optimizer_step()
        after = training.tensors()
        assert moving
        assert {name for name in before if not torch.equal(before[name], after[name])} == moving
        assert all(name.endswith(".default") for name in moving)

    def test_case_8_gradients_do_not_depend_on_the_micro_batches(
        self, algorithm: Algorithm, tmp_path: Path
    ) -> None:
        """CASES 8: within 1e-12 of the global norm in float64, micro-batches of a unit or of all rows."""
        whole = ToyTraining(algorithm, tmp_path, dtype=DType.FLOAT64, micro_batch_size=512)
        whole.update()
        batch = whole.batch()
        expected = whole.gradients(batch)
        whole.engine.engine_config = attrs.evolve(whole.engine.engine_config, micro_batch_size=5)
        norm = torch.stack([value.norm() for value in expected.values()]).norm()
        assert norm > 0
        for name, value in whole.gradients(batch).items():
            assert (value - expected[name]).norm() < 1e-12 * norm, name

    def test_case_11_a_row_without_weight_may_hold_anything(
        self, algorithm: Algorithm, tmp_path: Path
    ) -> None:
        """CASES 11: its latents and its advantage are others, and the gradients are what they were."""
        training = ToyTraining(algorithm, tmp_path)
        batch = training.batch()
        (idle,) = (batch.weights == 0).nonzero()[:1]
        latents = {name: value.clone() for name, value in batch.trajectory.latents.items()}
        for value in latents.values():
            value[idle] = 3.0 - value[idle]
        advantages = batch.advantages.clone()
        advantages[idle] = 5.0
        trajectory = attrs.evolve(batch.trajectory, latents=latents)
        spoilt = attrs.evolve(batch, trajectory=trajectory, advantages=advantages)
        expected, found = training.gradients(batch), training.gradients(spoilt)
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    def test_case_28_two_updates_and_two_after_a_resume_are_four(
        self, algorithm: Algorithm, tmp_path: Path
    ) -> None:
        """CASES 28: every tensor, adapters included, bit for bit."""
        fresh = type(algorithm)
        straight = ToyTraining(fresh(algorithm.options), tmp_path / "a")
        for _ in range(4):
            straight.update()
        first = ToyTraining(fresh(algorithm.options), tmp_path / "b")
        for _ in range(2):
            first.update()
        state = json.loads(json.dumps(first.save(tmp_path / "checkpoint")))
        second = ToyTraining(fresh(algorithm.options), tmp_path / "c")
        second.load(tmp_path / "checkpoint", state)
        for _ in range(2):
            second.update()
        found, expected = second.tensors(), straight.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert second.algorithm.state() == straight.algorithm.state()

    # -- state -------------------------------------------------------------------------------------

    def test_state_travels_as_json(self, algorithm: Algorithm) -> None:
        """What is saved is plain data, and loading it changes nothing more."""
        state = json.loads(json.dumps(algorithm.state()))
        fresh = type(algorithm)(algorithm.options)
        fresh.load_state(state)
        assert fresh.state() == algorithm.state()

    def test_options_are_compared_by_value(self, algorithm: Algorithm) -> None:
        """Equal options are equal and hashable: a loss is found again by its config."""
        options: AlgorithmConfig = algorithm.options
        assert attrs.evolve(options) == options
        assert hash(attrs.evolve(options)) == hash(options)


def unit_rows(algorithm: Algorithm) -> int:
    """Rows that a loss has to see together, for groups of 4."""
    groups, valid = ["g"] * 4, torch.ones(4, dtype=torch.bool)
    found = algorithm.advantages(torch.tensor([0.1, 0.9, 0.4, 0.7]), groups, valid).advantages
    return max(len(unit) for unit in algorithm.units(found, groups, valid))


def cuts(inputs: Inputs) -> list[torch.Tensor]:
    """Rows of some micro-batches that leave every unit whole: one unit, some, all in reverse."""
    count = len(inputs.advantages)
    unit = inputs.unit if isinstance(inputs, ForwardLossInputs) else torch.arange(count)
    units = [(unit == number).nonzero().flatten() for number in sorted(set(unit.tolist()))]
    last = len(units) - 1
    return [
        units[0],
        torch.cat([units[last], units[0], units[last // 2]]),
        torch.arange(count).flip(0),
    ]
