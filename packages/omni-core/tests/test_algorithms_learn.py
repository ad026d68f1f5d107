"""Every algorithm raises the reward that it is given, and lowers it when the sign is turned.

Those of the reverse process train the toy family on the toy engine; those of the forward process train a
small velocity net, through the hooks that an engine calls: predictions, units, draws, adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import attrs
import pytest
import torch
from torch import Tensor, nn

from omni_core.algorithm import Policy
from omni_core.algorithms import (
    awm_options,
    dance_grpo_options,
    dgpo_options,
    diffusion_dpo_options,
    diffusion_nft_options,
    distillation_options,
    elbo_options,
    flow_dppo_options,
    grpo_guard_options,
    mix_grpo_options,
    ram_options,
)
from omni_core.algorithms.awm_options import AWMOptions
from omni_core.algorithms.base import ForwardAlgorithm
from omni_core.algorithms.base_options import ForwardOptions, StochasticOptions
from omni_core.algorithms.dance_grpo_options import DanceGRPOOptions
from omni_core.algorithms.dgpo_options import DGPOOptions
from omni_core.algorithms.diffusion_dpo_options import DiffusionDPOOptions
from omni_core.algorithms.diffusion_nft_options import DiffusionNFTOptions
from omni_core.algorithms.distillation_options import DistillationOptions
from omni_core.algorithms.elbo_options import ElboOptions
from omni_core.algorithms.flow_dppo_options import FlowDPPOOptions
from omni_core.algorithms.grpo_guard_options import GRPOGuardOptions
from omni_core.algorithms.mix_grpo_options import MixGRPOOptions
from omni_core.algorithms.ram_options import RAMOptions
from omni_core.choices import DistillationForm, ElboForm, OldPolicy, StepKind
from omni_core.engine import LossInputs, LossTerms, StepPrediction
from omni_core.forward_process import (
    ForwardLossInputs,
    draw_sigmas,
    forward_noise,
    noise_to,
    unit_seed,
)
from omni_core.losses import ConfiguredLoss
from omni_core.options import (
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.plugins import ALGORITHMS, Plugin, registry
from omni_core.reverse_step import Latents
from omni_core.reward import RewardInput
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import initial_noise_batch
from omni_core.testing import requests_for, train_batch
from omni_core.testing.toys import (
    ToyEngine,
    ToyEngineConfig,
    ToyReward,
    ToyRewardConfig,
    ToyRollout,
    ToyRolloutConfig,
)
from omni_core.testing.toys.packing import MicroBatch, pack, predict_velocity, score
from omni_core.trajectory import SamplingSpec, Trajectory

TEN = FlowMatchSchedule.linear(10, shift=3.0)


@pytest.fixture
def name() -> Iterator[str]:
    """A name under which a test registers its algorithm."""
    yield "under_test"
    if "under_test" in registry(ALGORITHMS).registered():
        registry(ALGORITHMS).unregister("under_test")


# -- reverse process, on the toy engine ------------------------------------------------------------

MODEL = DiffusionModelConfig(
    path="toy",
    family="toy",
    lora=LoRAConfig(rank=4, alpha=8),
    pipeline=DiffusionPipelineConfig(height=16, width=16, max_sequence_length=8),
)


def toy_engine() -> ToyEngine:
    engine = ToyEngine(MODEL, ToyEngineConfig(micro_batch_size=64), OptimizerConfig(lr=1e-2), None)
    engine.initialize()
    return engine


def sample(
    engine: ToyEngine, options: StochasticOptions, window: tuple[int, ...], step: int
) -> Trajectory:
    spec = SamplingSpec(
        sigmas=TEN.values(),
        guidance_scale=1.0,
        height=16,
        width=16,
        max_sequence_length=8,
        kind=options.kind,
        noise_level=options.noise_level,
    )
    rollout = ToyRollout(ToyRolloutConfig(batch_size=32), engine=engine)
    asked = requests_for(spec, ["bright", "dark"], samples_per_prompt=12, step=step, window=window)
    return Trajectory.concat(rollout.generate(asked))


REVERSE: list[tuple[Plugin, StochasticOptions]] = [
    (dance_grpo_options.plugin, DanceGRPOOptions(clip_ratio=1e-2)),
    (mix_grpo_options.plugin, MixGRPOOptions(clip_ratio=1e-2, interval=2)),
    (grpo_guard_options.plugin, GRPOGuardOptions(clip_ratio=1e-2)),
    (grpo_guard_options.plugin, GRPOGuardOptions(clip_ratio=1e-2, kind=StepKind.CPS)),
    (flow_dppo_options.plugin, FlowDPPOOptions(max_kl=1e-2)),
    (flow_dppo_options.plugin, FlowDPPOOptions(max_kl=1e-2, kind=StepKind.DANCE_SDE)),
]


@pytest.mark.parametrize(
    ("plugin", "options"), REVERSE, ids=lambda value: getattr(value, "title", "")
)
def test_a_toy_run_learns(name: str, plugin: Plugin, options: StochasticOptions) -> None:
    registry(ALGORITHMS).register(name, plugin)
    loss = ConfiguredLoss(DiffusionLossConfig(name=name, options=options))
    algorithm, engine = plugin.build(options), toy_engine()
    assert loss.needs_noise == algorithm.needs_noise
    reward, means = ToyReward(ToyRewardConfig()), []
    for step in range(16):
        window = algorithm.window(TEN, seed=0, iteration=step)
        trajectory = sample(engine, options, window, step)
        assert trajectory.media is not None
        inputs = [RewardInput(prompt=record.prompt) for record in trajectory.records]
        rewards = torch.tensor([r.value for r in reward.score(trajectory.media, inputs)])
        found = algorithm.advantages(
            rewards,
            [record.group_id for record in trajectory.records],
            torch.ones(trajectory.rows, dtype=torch.bool),
        )
        batch = attrs.evolve(train_batch(trajectory), advantages=found.advantages)
        output = engine.train_batch(batch, loss)
        if "ratio" in output.metrics:
            # On policy; the old mean comes back from the noise to float32's rounding.
            assert output.metrics["ratio"].mean == pytest.approx(1.0, abs=1e-6)
        means.append(float(rewards.mean()))
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 0.05, means


def test_the_noise_of_a_rollout_comes_back() -> None:
    engine = toy_engine()
    options = GRPOGuardOptions()
    trajectory = sample(engine, options, (1, 4, 7), 0)
    rows = torch.tensor([3, 0, 20])
    steps = torch.tensor([4, 1, 7])
    noise = trajectory.drawn_noise(rows, steps)["image"]
    assert noise.dtype == torch.float32
    assert noise.std() == pytest.approx(1.0, abs=0.15)
    again = trajectory.select(rows).drawn_noise(torch.arange(3), steps)["image"]
    assert torch.equal(again, noise)


def test_a_second_update_sees_the_policy_that_sampled() -> None:
    # After a step, the old mean still is the rollout's: kl_old is 0 before and above 0 after.
    engine, options = toy_engine(), FlowDPPOOptions()
    plugin = flow_dppo_options.plugin
    batch = train_batch(sample(engine, options, tuple(range(9)), 0))

    class Loss:
        needs_noise = True

        def __call__(self, inputs: LossInputs) -> LossTerms:
            terms: LossTerms = plugin.build(options).loss(inputs)
            return terms

    loss = Loss()
    first = engine.train_batch(batch, loss).metrics
    second = engine.train_batch(batch, loss).metrics
    assert first["kl_old"].high < 1e-11
    assert second["kl_old"].low > 1e-9
    assert second["kl_old"].mean > 1e4 * first["kl_old"].mean


def predicted(engine: ToyEngine, rows: MicroBatch) -> StepPrediction:
    velocity = predict_velocity(
        engine.denoiser, rows.before, rows.index, rows.conditioning, rows.spec
    )
    return score(rows.before, velocity, rows.after, rows.index, rows.spec)


@pytest.mark.parametrize("form", list(DistillationForm))
def test_a_student_comes_closer_to_its_teacher(form: DistillationForm) -> None:
    student, teacher = toy_engine(), toy_engine()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in dict(teacher.get_per_tensor_param()).values():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    options = DistillationOptions(form=form)
    algorithm, distances = distillation_options.plugin.build(options), []
    assert [p.policy for p in algorithm.predictions] == [Policy.CURRENT, Policy.TEACHER]
    for step in range(12):
        batch = train_batch(sample(student, options, tuple(range(9)), step))
        distance = 0.0
        with student.train_mode():
            student.optimizer_zero_grad()
            for rows in pack(batch, 64):
                with torch.no_grad():
                    told = predicted(teacher, rows)
                given = rows.loss_inputs(predicted(student, rows), None, noise=False)
                terms = algorithm.loss(attrs.evolve(given, teacher=told)).terms
                share = terms.sum() / rows.denominator
                share.backward()
                distance += float(share.detach())
            student.optimizer_step()
        distances.append(distance)
    assert distances[-1] < 0.5 * distances[0], distances


# -- forward process -------------------------------------------------------------------------------


class Velocity(nn.Module):
    """Two latent values a sample; one adapter is one copy of the net."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, latents: Tensor, sigma: Tensor) -> Tensor:
        # x1 - x0 of data N(0, 1) has the velocity 0 at sigma 0.5; the net adds to a linear field.
        share = sigma[:, None]
        exact = (2.0 * share - 1.0) / ((1.0 - share) ** 2 + share**2)
        added: Tensor = self.layers(torch.cat([latents, share], 1))
        return exact * latents + added


class Policies:
    """Named adapters, as an engine keeps them."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        torch.manual_seed(seed)
        default = Velocity()
        with torch.no_grad():
            default.layers[2].weight.zero_()
            default.layers[2].bias.zero_()
        self.nets = {name: copy.deepcopy(default) for name in (*names, "reference")}
        self.optimizer = torch.optim.AdamW(
            self.nets["default"].parameters(), lr=1e-2, weight_decay=0.0
        )

    def copy_adapter(self, source: str, target: str) -> None:
        self.ema_update_adapter(source, target, 0.0)

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        with torch.no_grad():
            pairs = zip(self.nets[target].parameters(), self.nets[source].parameters(), strict=True)
            for ours, new in pairs:
                ours.copy_(decay * ours + (1.0 - decay) * new)

    @torch.no_grad()
    def sample(self, name: str, seeds: Sequence[int]) -> Tensor:
        state = initial_noise_batch(seeds, {"image": (2,)})["image"]
        for high, low in zip(TEN.values()[:-1], TEN.values()[1:], strict=True):
            sigma = torch.full((len(state),), high)
            state = state + (low - high) * self.nets[name](state, sigma)
        return state


def reward_of(samples: Tensor, target: Tensor) -> Tensor:
    return -(samples - target).square().sum(1)


def inputs_of(
    algorithm: ForwardAlgorithm,
    policies: Policies,
    clean: Tensor,
    advantages: Tensor,
    units: Sequence[Sequence[int]],
    seeds: Sequence[int],
    update: int,
) -> ForwardLossInputs:
    """All rows of one optimizer step, noised as an engine does it."""
    options = algorithm.options
    draws = options.draws_of(TEN.num_steps)
    rows: list[int] = []
    numbers, sigmas, noises = [], [], []
    for number, unit in enumerate(units):
        own = [unit_seed([seeds[row] for row in unit])] * len(unit)
        if not algorithm.shares_draws:
            own = [seeds[row] for row in unit]
        for draw in range(draws):
            for row, seed in zip(unit, own, strict=True):
                drawn = draw_sigmas(options.sigmas, draws, seed=seed, update=update, schedule=TEN)
                rows.append(row)
                numbers.append(number * draws + draw)
                sigmas.append(drawn[draw])
                noises.append(forward_noise(seed, update, draw, {"image": (2,)})["image"])
    index = torch.tensor(rows)
    x0, noise = {"image": clean[index]}, {"image": torch.cat(noises)}
    sigma = torch.stack(sigmas)
    noised = noise_to(x0, noise, sigma)

    def predict(policy: Policy) -> Latents | None:
        if policy not in [prediction.policy for prediction in algorithm.predictions]:
            return None
        named = "default" if policy is Policy.CURRENT else policy.value
        with torch.set_grad_enabled(policy is Policy.CURRENT):
            return {"image": policies.nets[named](noised["image"], sigma)}

    current = predict(Policy.CURRENT)
    assert current is not None
    return ForwardLossInputs(
        current=current,
        clean=x0,
        noise=noise,
        noised=noised,
        sigma=sigma,
        advantages=advantages[index],
        weights=torch.ones(len(rows)),
        unit=torch.tensor(numbers),
        old=predict(Policy.OLD),
        reference=predict(Policy.REFERENCE),
        ema=predict(Policy.EMA),
    )


def train(
    plugin: Plugin, options: ForwardOptions, *, rollouts: int, sign: float = 1.0
) -> list[float]:
    """Mean reward of each rollout."""
    algorithm: ForwardAlgorithm = plugin.build(options)
    policies = Policies(algorithm.adapters, seed=0)
    target, means, taken = torch.tensor([1.0, -0.5]), [], 0
    groups = [f"g{row // 8}" for row in range(64)]
    valid = torch.ones(64, dtype=torch.bool)
    for rollout in range(rollouts):
        seeds = [rollout * 64 + row for row in range(64)]
        clean = policies.sample(options.rollout_algo().adapter, seeds)
        rewards = reward_of(clean, target)
        means.append(float(rewards.mean()))
        advantages = algorithm.advantages(sign * rewards, groups, valid).advantages
        units = algorithm.units(advantages, groups, valid)
        for update in range(options.updates_per_rollout):
            given = inputs_of(algorithm, policies, clean, advantages, units, seeds, update)
            terms = algorithm.loss(given).terms
            policies.optimizer.zero_grad()
            terms.mean().backward()
            policies.optimizer.step()
            taken += 1
            algorithm.after_update(policies, optimizer_step=taken)
        algorithm.after_rollout(policies, optimizer_step=taken)
    return means


FORWARD: list[tuple[Plugin, ForwardOptions]] = [
    (diffusion_nft_options.plugin, DiffusionNFTOptions()),
    (diffusion_nft_options.plugin, DiffusionNFTOptions(old_policy=OldPolicy.COPY, beta=0.1)),
    *(
        (elbo_options.plugin, ElboOptions(form=form, adv_scale=0.5, updates_per_rollout=2))
        for form in ElboForm
    ),
    (awm_options.plugin, AWMOptions(draws=6)),
    (ram_options.plugin, RAMOptions()),
    (diffusion_dpo_options.plugin, DiffusionDPOOptions(beta=10.0)),
    (dgpo_options.plugin, DGPOOptions(beta=10.0, draws=4)),
]


@pytest.mark.parametrize(
    ("plugin", "options"), FORWARD, ids=lambda value: getattr(value, "title", "")
)
def test_the_reward_rises(plugin: Plugin, options: ForwardOptions) -> None:
    means = train(plugin, options, rollouts=40)
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 0.4, means
    worse = train(plugin, options, rollouts=10, sign=-1.0)
    assert worse[-1] < worse[0] - 0.1, worse
