"""What every engine of the forward process keeps: all of `EngineSuite`, and units that stay whole."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.algorithms.diffusion_nft_options import DiffusionNFTOptions
from omni_core.choices import OldPolicy, Policy, SigmaDraw
from omni_core.engine import BaseEngine, LossTerms, TrainBatch
from omni_core.forward_needs import ForwardNeeds
from omni_core.forward_process import ForwardLossInputs, denoising_error, noise_to
from omni_core.losses import ConfiguredLoss
from omni_core.options import DiffusionLossConfig
from omni_core.testing.engine_suite import EngineFactory, EngineSuite
from omni_core.testing.samples import train_batch
from omni_core.trajectory import Trajectory


def error_loss(inputs: ForwardLossInputs) -> LossTerms:
    """A d of every row, d the error of pretraining."""
    error = denoising_error(inputs.current, inputs.clean, inputs.noise)
    return LossTerms(terms=inputs.advantages * error, metrics={"error": error.detach()})


def broken_loss(inputs: ForwardLossInputs) -> LossTerms:
    """What a broken update looks like: no gradient is finite."""
    return LossTerms(terms=error_loss(inputs).terms * torch.nan)


class SeenLoss:
    """`error_loss` that keeps what it was given, and asks for what it is told to."""

    def __init__(self, needs: ForwardNeeds) -> None:
        self.forward_needs = needs
        self.seen: list[ForwardLossInputs] = []

    def __call__(self, inputs: ForwardLossInputs) -> LossTerms:
        """Keep the inputs."""
        self.seen.append(inputs)
        return error_loss(inputs)

    def joined(self, pick: Callable[[ForwardLossInputs], Tensor]) -> Tensor:
        """One value of all rows, in the order in which they were given."""
        return torch.cat([pick(inputs).detach().cpu() for inputs in self.seen])


class ForwardEngineSuite(EngineSuite):
    """Subclass and provide the fixtures of `EngineSuite`, for engines of model type diffusion_forward."""

    policy_loss = staticmethod(error_loss)
    nan_loss = staticmethod(broken_loss)
    kl_loss = ConfiguredLoss(
        DiffusionLossConfig(
            name="diffusion_nft",
            options=DiffusionNFTOptions(kl_coef=1.0, old_policy=OldPolicy.COPY),
        )
    )
    counted = "error"
    scores_steps = False

    @pytest.fixture
    def whole_batch(self, trajectory: Trajectory) -> TrainBatch:
        """All rows of the trajectory, at every sigma of its schedule."""
        rows = trajectory.rows * trajectory.effective.num_steps
        return attrs.evolve(train_batch(trajectory), denominator=float(rows))

    def see(self, engine: BaseEngine, batch: TrainBatch, needs: ForwardNeeds) -> SeenLoss:
        """What a loss that needs this is given."""
        loss = SeenLoss(needs)
        engine.infer_batch(batch, loss)
        return loss

    def test_predicting_needs_a_loss(self, engine: BaseEngine, batch: TrainBatch) -> None:
        """There is nothing else to predict."""
        with pytest.raises(ValueError, match="loss"):
            engine.infer_batch(batch)

    def test_a_sample_is_noised_to_every_sigma_of_the_schedule(
        self, engine: BaseEngine, batch: TrainBatch
    ) -> None:
        """Each of its own noise, to x_sigma."""
        loss = self.see(engine, batch, ForwardNeeds())
        sigmas = batch.trajectory.effective.sigmas[:-1]
        found = loss.joined(lambda inputs: inputs.sigma).reshape(batch.trajectory.rows, -1)
        for row in found.tolist():
            assert sorted(row, reverse=True) == pytest.approx(sigmas)
        for inputs in loss.seen:
            for name, value in noise_to(inputs.clean, inputs.noise, inputs.sigma).items():
                assert torch.equal(inputs.noised[name], value)
        for name in batch.trajectory.latents:
            noise = loss.joined(lambda inputs, name=name: inputs.noise[name]).flatten(1)  # type: ignore[misc]
            assert len(torch.unique(noise, dim=0)) == len(noise)

    @pytest.mark.parametrize("draw", list(SigmaDraw))
    def test_what_is_drawn_does_not_depend_on_the_batch(
        self, make_engine: EngineFactory, whole_batch: TrainBatch, draw: SigmaDraw
    ) -> None:
        """Rows in another order and in other micro-batches meet the same noise and sigmas."""
        needs = ForwardNeeds(draws=2, sigmas=draw)
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        found = []
        for size, part in ((8, whole_batch), (3, whole_batch.select(order))):
            loss = self.see(
                make_engine(micro_batch_size=size, optimizer=self.training), part, needs
            )
            noise = loss.joined(lambda inputs: next(iter(inputs.noise.values())))
            rows = torch.cat([loss.joined(lambda i: i.sigma)[:, None], noise.flatten(1)], dim=1)
            found.append(rows.reshape(part.trajectory.rows, 2, -1))
        assert torch.equal(found[1], found[0][order])

    def test_each_update_has_draws_of_its_own(self, engine: BaseEngine, batch: TrainBatch) -> None:
        """A rollout that is trained on twice is noised twice."""
        needs = ForwardNeeds(draws=1)
        found = [
            self.see(engine, attrs.evolve(batch, update=update), needs).joined(
                lambda inputs: next(iter(inputs.noise.values()))
            )
            for update in (0, 1, 0)
        ]
        assert torch.equal(found[0], found[2])
        assert not torch.equal(found[0], found[1])

    @pytest.mark.parametrize("size", [3, 4, 7])
    def test_a_unit_is_never_cut(
        self, make_engine: EngineFactory, whole_batch: TrainBatch, size: int
    ) -> None:
        """Rows of a unit come together, at one noise and sigma, as often as there are draws."""
        units = torch.tensor([0, 1, 0, 2, 1, 0])
        engine = make_engine(micro_batch_size=size, optimizer=self.training)
        needs = ForwardNeeds(draws=2, shares_draws=True)
        loss = self.see(engine, attrs.evolve(whole_batch, units=units), needs)
        sizes = []
        for inputs in loss.seen:
            assert len(inputs.unit) <= size
            for unit in sorted(set(inputs.unit.tolist())):
                rows = (inputs.unit == unit).nonzero().flatten()
                assert len(set(inputs.sigma[rows].tolist())) == 1
                for value in inputs.noise.values():
                    assert len(torch.unique(value[rows].flatten(1), dim=0)) == 1
                sizes.append(len(rows))
        assert sorted(sizes) == [1, 1, 2, 2, 3, 3]

    def test_a_unit_that_does_not_fit_is_refused(
        self, make_engine: EngineFactory, whole_batch: TrainBatch
    ) -> None:
        """The message says which micro-batch would do."""
        engine = make_engine(micro_batch_size=2, optimizer=self.training)
        whole = attrs.evolve(whole_batch, units=torch.tensor([0, 0, 0, 1, 1, 1]))
        with pytest.raises(ValueError, match="micro_batch_size is 2, and must be at least 3"):
            engine.infer_batch(whole, self.policy_loss)

    def test_the_reference_is_the_base_model(
        self, make_engine: EngineFactory, batch: TrainBatch
    ) -> None:
        """It stays where the trained policy was, bit for bit."""
        engine = make_engine(optimizer=attrs.evolve(self.training, lr=1e-2))
        if not engine.has_adapter:
            pytest.skip("there is no reference without an adapter")
        needs = ForwardNeeds(draws=1, others=(Policy.REFERENCE,))

        def velocities() -> tuple[Tensor, Tensor]:
            loss = self.see(engine, batch, needs)
            current = loss.joined(lambda inputs: next(iter(inputs.current.values())))
            return current, loss.joined(
                lambda inputs: next(iter((inputs.reference or {}).values()))
            )

        before = velocities()
        assert torch.equal(*before)
        engine.train_batch(batch, self.policy_loss)
        after = velocities()
        assert torch.equal(after[1], before[1])
        assert not torch.equal(after[0], before[0])

    def test_a_tensordict_keeps_units_and_update(
        self, engine: BaseEngine, whole_batch: TrainBatch
    ) -> None:
        """The two forms of a batch are the same batch."""
        given = attrs.evolve(whole_batch, units=torch.tensor([0, 0, 1, 1, 2, 2]), update=3)
        needs = ForwardNeeds(draws=2, shares_draws=True)
        straight = self.see(engine, given, needs).joined(lambda inputs: inputs.sigma)
        loss = SeenLoss(needs)
        engine.infer_batch(given.to_tensordict(), loss)
        assert torch.equal(loss.joined(lambda inputs: inputs.sigma), straight)
