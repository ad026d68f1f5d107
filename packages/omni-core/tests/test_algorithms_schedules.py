"""What algorithms do over a run: windows that move, policies that follow, units that stay whole."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import attrs
import pytest
import torch

from omni_core.algorithm import Algorithm, ModelFacts, Policy
from omni_core.algorithms.awm import AWM
from omni_core.algorithms.awm_options import AWMOptions
from omni_core.algorithms.dance_grpo_options import DanceGRPOOptions
from omni_core.algorithms.dgpo import DGPO
from omni_core.algorithms.dgpo_options import DGPOOptions
from omni_core.algorithms.diffusion_dpo import DiffusionDPO, online_dpo_pairs
from omni_core.algorithms.diffusion_dpo_options import DiffusionDPOOptions
from omni_core.algorithms.diffusion_nft import DiffusionNFT
from omni_core.algorithms.diffusion_nft_options import DiffusionNFTOptions
from omni_core.algorithms.distillation import Distillation
from omni_core.algorithms.distillation_options import DistillationOptions, TeacherConfig
from omni_core.algorithms.elbo import Elbo
from omni_core.algorithms.elbo_options import ElboOptions
from omni_core.algorithms.flow_dppo import FlowDPPO
from omni_core.algorithms.flow_dppo_options import FlowDPPOOptions
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.algorithms.grpo_guard import GRPOGuard
from omni_core.algorithms.grpo_guard_options import GRPOGuardOptions
from omni_core.algorithms.mix_grpo import MixGRPO
from omni_core.algorithms.mix_grpo_options import MixGRPOOptions
from omni_core.algorithms.ram import RAM
from omni_core.algorithms.ram_options import RAMOptions
from omni_core.choices import (
    AdvantageStd,
    OldPolicy,
    SigmaDraw,
    StepKind,
    WindowStrategy,
)
from omni_core.config import structure
from omni_core.options import AlgorithmConfig, RunFacts
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing import forward_loss_inputs, loss_inputs, take_rows

TWENTY_FIVE = FlowMatchSchedule.linear(25, shift=3.0)
TEN = FlowMatchSchedule.linear(10, shift=3.0)
FACTS = RunFacts(num_inference_steps=10, samples_per_prompt=8, prompts_per_step=4)

# -- MixGRPO ---------------------------------------------------------------------------------------


def places(options: MixGRPOOptions, schedule: FlowMatchSchedule, iterations: int) -> list[int]:
    """First step of the window in each iteration."""
    windows = [MixGRPO(options).window(schedule, seed=7, iteration=i) for i in range(iterations)]
    for window in windows:
        assert window == tuple(range(window[0], window[0] + options.window_size))
        assert window[-1] < schedule.num_steps - 1
    return [window[0] for window in windows]


def runs(values: list[int]) -> list[tuple[int, int]]:
    return [(place, len(list(same))) for place, same in groupby(values)]


def test_the_published_window_slides_and_wraps() -> None:
    # 25 steps, w = 4, stride 1, interval 25: [0, 4) to [20, 24), then again.
    found = runs(places(MixGRPOOptions(), TWENTY_FIVE, 25 * 22))
    assert found == [*[(place, 25) for place in range(21)], (0, 25)]


def test_without_wrap_the_window_stays_at_its_last_place() -> None:
    options = MixGRPOOptions(wrap=False, interval=2, stride=3, window_size=2)
    assert runs(places(options, TEN, 12)) == [(0, 2), (3, 2), (6, 8)]


def test_every_group_has_the_iterations_window() -> None:
    for strategy in WindowStrategy:
        algorithm = MixGRPO(MixGRPOOptions(strategy=strategy))
        for iteration in (0, 3, 40):
            found = {algorithm.window(TEN, seed=seed, iteration=iteration) for seed in range(5)}
            assert len(found) == 1


def test_a_decaying_interval_falls_linearly_to_its_lowest() -> None:
    options = MixGRPOOptions(strategy=WindowStrategy.DECAY, interval=8, window_size=5)
    assert runs(places(options, TEN, 25)) == [(0, 8), (1, 6), (2, 5), (3, 3), (4, 2), (0, 1)]


def test_an_exponentially_decaying_interval_falls_past_its_threshold() -> None:
    options = MixGRPOOptions(strategy=WindowStrategy.EXP_DECAY, decay_from=1, decay_rate=0.5)
    expected = [math.ceil(25 * math.exp(-0.5 * max(0, place - 1))) for place in range(6)]
    assert expected == [25, 25, 16, 10, 6, 4]
    assert runs(places(options, TEN, sum(expected))) == list(enumerate(expected))


def test_random_windows_go_everywhere() -> None:
    options = MixGRPOOptions(strategy=WindowStrategy.RANDOM)
    found = places(options, TEN, 60)
    assert set(found) == set(range(6))
    assert found == places(options, TEN, 60)


def test_a_range_bounds_the_window() -> None:
    options = MixGRPOOptions(window_range=(2, 7), window_size=3, interval=1)
    assert places(options, TEN, 4) == [2, 3, 4, 2]
    assert options.mistakes(FACTS) == {}
    too_long = MixGRPOOptions(window_range=(2, 7), window_size=6)
    assert "at most 5 fit" in too_long.mistakes(FACTS)["window_size"]
    with pytest.raises(ValueError, match="6 steps do not fit"):
        MixGRPO(too_long).window(TEN, seed=0, iteration=0)
    assert "at most 9 fit" in MixGRPOOptions(window_size=10).mistakes(FACTS)["window_size"]


# -- old and averaged policies ---------------------------------------------------------------------


class Adapters:
    """Notes what is done."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, float]] = []

    def copy_adapter(self, source: str, target: str) -> None:
        self.done.append((source, target, 0.0))

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        self.done.append((source, target, decay))


@pytest.mark.parametrize(
    ("schedule", "decays"),
    [
        (OldPolicy.COPY, {0: 0.0, 10: 0.0, 1000: 0.0}),
        (OldPolicy.RAMP, {0: 0.0, 10: 0.01, 500: 0.5, 900: 0.5}),
        (OldPolicy.DELAYED_RAMP, {10: 0.0, 75: 0.0, 76: 0.0075, 208: 0.9975, 209: 0.999}),
    ],
)
def test_the_old_policy_follows_by_optimizer_steps(
    schedule: OldPolicy, decays: dict[int, float]
) -> None:
    options = DiffusionNFTOptions(old_policy=schedule, updates_per_rollout=2)
    algorithm, adapters = DiffusionNFT(options), Adapters()
    for step in decays:
        algorithm.after_update(adapters, optimizer_step=step)
    assert adapters.done == []
    for step in decays:
        algorithm.after_rollout(adapters, optimizer_step=step)
    assert [(source, target) for source, target, _ in adapters.done] == [("default", "old")] * len(
        decays
    )
    assert [decay for _, _, decay in adapters.done] == pytest.approx(list(decays.values()))


def test_the_old_policy_samples_where_it_is_another() -> None:
    kept = DiffusionNFT(DiffusionNFTOptions())
    assert kept.options.rollout_algo().adapter == "old"
    assert kept.adapters == ("default", "old")
    assert Policy.OLD in [prediction.policy for prediction in kept.predictions]
    alone = DiffusionNFT(DiffusionNFTOptions(old_policy=OldPolicy.COPY))
    assert alone.options.rollout_algo().adapter == "default"
    assert alone.adapters == ("default",)
    adapters = Adapters()
    alone.after_rollout(adapters, optimizer_step=3)
    assert adapters.done == []
    assert DiffusionNFTOptions(old_policy=OldPolicy.COPY, updates_per_rollout=2).keeps_old


def test_the_moving_average_follows_every_optimizer_step() -> None:
    algorithm, adapters = AWM(AWMOptions()), Adapters()
    for step in (1, 100, 300, 1000):
        algorithm.after_update(adapters, optimizer_step=step)
    assert adapters.done == [
        ("default", "ema", decay) for decay in (0.001, 0.1, pytest.approx(0.3), 0.3)
    ]
    algorithm.after_rollout(adapters, optimizer_step=1)
    assert len(adapters.done) == 4
    assert algorithm.adapters == ("default", "ema")
    assert AWM(AWMOptions(ema_coef=0.0)).adapters == ("default",)


def test_another_policy_needs_an_adapter() -> None:
    for adapter in (True, False):
        facts = ModelFacts(family="toy", masked_text=False, has_adapter=adapter, experts=("t",))
        reason = DiffusionNFT(DiffusionNFTOptions()).unsupported(facts)
        assert (reason is None) == adapter
        assert reason is None or "set model.lora" in reason
        on_policy = DiffusionNFT(DiffusionNFTOptions(old_policy=OldPolicy.COPY, kl_coef=0.0))
        assert on_policy.unsupported(facts) is None


@pytest.mark.parametrize(
    "made", [GRPOGuard(GRPOGuardOptions(kl_coef=0.1)), GRPOGuard(GRPOGuardOptions())]
)
def test_a_reference_needs_an_adapter(made: GRPOGuard) -> None:
    facts = ModelFacts(family="toy", masked_text=False, has_adapter=False, experts=("t",))
    reason = made.unsupported(facts)
    assert (reason is not None) == made.options.needs_reference
    assert reason is None or "set model.lora" in reason
    assert made.unsupported(attrs.evolve(facts, has_adapter=True)) is None


# -- what a loss needs -----------------------------------------------------------------------------

NEEDS: list[tuple[Algorithm, str, str]] = [
    (GRPOGuard(GRPOGuardOptions()), "noise", "the noise of the rollout's steps"),
    (FlowDPPO(FlowDPPOOptions()), "noise", "the noise of the rollout's steps"),
    (Distillation(DistillationOptions()), "teacher", "the teacher's prediction"),
    (DiffusionNFT(DiffusionNFTOptions()), "old", "the old policy's prediction"),
    (DiffusionNFT(DiffusionNFTOptions()), "reference", "the reference's prediction"),
    (Elbo(ElboOptions(updates_per_rollout=2)), "old", "the old policy's prediction"),
    (AWM(AWMOptions()), "ema", "the moving average's prediction"),
    (RAM(RAMOptions()), "reference", "the reference's prediction"),
    (DGPO(DGPOOptions()), "reference", "the reference's prediction"),
]


@pytest.mark.parametrize(("algorithm", "field", "said"), NEEDS)
def test_what_an_engine_left_out_is_named(algorithm: Algorithm, field: str, said: str) -> None:
    forward = algorithm.options.model_type == "diffusion_forward"
    given: Any = forward_loss_inputs() if forward else loss_inputs()
    with pytest.raises(ValueError, match=said):
        algorithm.loss(attrs.evolve(given, **{field: None}))


def test_only_some_need_noise() -> None:
    assert GRPOGuard(GRPOGuardOptions()).needs_noise
    assert FlowDPPO(FlowDPPOOptions()).needs_noise
    assert not MixGRPO(MixGRPOOptions()).needs_noise


# -- units -----------------------------------------------------------------------------------------

GROUPS = ["a", "b", "a", "b", "a", "b", "c"]
REWARDS = torch.tensor([0.2, 0.9, 0.8, 0.1, 0.5, 0.4, 0.7])
ALL = torch.ones(7, dtype=torch.bool)


def test_pairs_are_the_best_and_the_worst_of_each_group() -> None:
    algorithm = DiffusionDPO(DiffusionDPOOptions())
    found = algorithm.advantages(REWARDS, GROUPS, ALL)
    assert found.advantages.tolist() == [-1.0, 1.0, 1.0, -1.0, 0.0, 0.0, 0.0]
    assert found.single_groups == 1
    assert algorithm.units(found.advantages, GROUPS, ALL) == ((2, 0), (1, 3))
    assert algorithm.shares_draws
    assert online_dpo_pairs(REWARDS, GROUPS).tolist() == [2, 0, 1, 3]


def test_ties_take_the_first_row_and_equal_groups_have_no_pair() -> None:
    scores = torch.tensor([0.5, 0.5, 0.1, 0.1, 0.7, 0.7])
    assert online_dpo_pairs(scores, ["a"] * 4 + ["b"] * 2).tolist() == [0, 2]
    middle = torch.tensor([0.0, 0.5, 1.0])
    assert online_dpo_pairs(middle, ["a"] * 3).tolist() == [2, 0]


def test_half_a_pair_is_refused() -> None:
    algorithm = DiffusionDPO(DiffusionDPOOptions())
    with pytest.raises(ValueError, match="group 'a': a pair is one row"):
        algorithm.units(torch.tensor([1.0, 0.0]), ["a", "a"], torch.ones(2, dtype=torch.bool))
    given = forward_loss_inputs(units=2, unit_rows=2)
    with pytest.raises(ValueError, match=r"rows come in pairs.*\[2, 1\]"):
        algorithm.loss(take_rows(given, torch.tensor([0, 1, 2])))
    with pytest.raises(ValueError, match="one of advantage above"):
        algorithm.loss(attrs.evolve(given, advantages=given.advantages.abs()))


def test_a_group_is_one_unit_without_its_unscored_rows() -> None:
    algorithm = DGPO(DGPOOptions())
    valid = torch.tensor([True, True, True, False, True, True, True])
    found = algorithm.advantages(REWARDS, GROUPS, valid).advantages
    assert algorithm.units(found, GROUPS, valid) == ((0, 2, 4), (1, 5), (6,))


def test_a_pairs_loss_does_not_depend_on_the_order_of_its_rows() -> None:
    algorithm = DiffusionDPO(DiffusionDPOOptions())
    given = forward_loss_inputs(units=3, unit_rows=2)
    rows = torch.tensor([5, 0, 2, 4, 1, 3])
    turned = algorithm.loss(take_rows(given, rows)).terms
    assert torch.equal(turned, algorithm.loss(given).terms[rows])


# -- options ---------------------------------------------------------------------------------------


def test_defaults_are_the_published_ones() -> None:
    dance = DanceGRPOOptions()
    assert (dance.kind, dance.noise_level, dance.std) == (
        StepKind.DANCE_SDE,
        0.3,
        AdvantageStd.GROUP,
    )
    mix = MixGRPOOptions()
    assert (mix.window_size, mix.stride, mix.interval, mix.wrap, mix.clip) == (4, 1, 25, True, 1e-5)
    assert (FlowDPPOOptions().max_kl, FlowDPPOOptions().adv_clip) == (1e-5, None)
    nft = DiffusionNFTOptions()
    assert (nft.beta, nft.kl_coef, nft.certain_advantage) == (1.0, 1e-4, 5.0)
    elbo = ElboOptions()
    assert (elbo.adv_scale, elbo.std, elbo.adv_clip) == (0.1, AdvantageStd.NONE, None)
    assert AWMOptions().ema_decay == 0.3
    assert DGPOOptions().beta == 100.0
    assert FlowGRPOOptions().norm_guard is None


def test_elbo_advantages_are_centred_and_scaled() -> None:
    found = Elbo(ElboOptions()).advantages(REWARDS.double(), GROUPS, ALL).advantages
    torch.testing.assert_close(
        found[[0, 2, 4]], 0.1 * (REWARDS[[0, 2, 4]].double() - 0.5), rtol=1e-6, atol=1e-9
    )


MISTAKES: list[tuple[AlgorithmConfig, str, str]] = [
    (GRPOGuardOptions(kind=StepKind.ODE), "kind", "ode has no log-prob"),
    (FlowDPPOOptions(kind=StepKind.ODE), "kind", "choose one of sde, cps, dance_sde"),
    (DiffusionNFTOptions(draws=11), "draws", "at most 10"),
    (DistillationOptions(), "teachers", "at least one teacher"),
    (
        DistillationOptions(teachers=(TeacherConfig(path="a"), TeacherConfig(path="b"))),
        "teachers",
        "names that differ",
    ),
    (
        DistillationOptions(
            teachers=(TeacherConfig(path="a", name="a"), TeacherConfig(path="b", name="b"))
        ),
        "route",
        "name of a column",
    ),
]


@pytest.mark.parametrize(("options", "path", "said"), MISTAKES)
def test_bad_combinations_are_refused_with_what_fits(
    options: AlgorithmConfig, path: str, said: str
) -> None:
    assert said in options.mistakes(FACTS)[path]


def test_draws_may_be_many_off_the_schedule() -> None:
    options = DiffusionNFTOptions(draws=11, sigmas=SigmaDraw.UNIFORM)
    assert options.mistakes(FACTS) == {}
    assert options.draws_of(10) == 11
    assert DiffusionNFTOptions().draws_of(10) == 10


def test_a_row_names_its_teacher() -> None:
    teachers = (TeacherConfig(path="a", name="ocr"), TeacherConfig(path="b", name="taste"))
    routed = Distillation(DistillationOptions(teachers=teachers, route="task"))
    assert dict(routed.teachers) == {"ocr": "a", "taste": "b"}
    assert routed.teacher_of({"task": "taste"}) == 1
    with pytest.raises(
        ValueError, match="column 'task' is missing; expected a teacher: ocr, taste"
    ):
        routed.teacher_of({"other": "ocr"})
    with pytest.raises(ValueError, match="'task' is 3"):
        routed.teacher_of({"task": 3})
    single = Distillation(DistillationOptions(teachers=teachers[:1]))
    assert single.teacher_of({"task": "whatever"}) is None


def test_teachers_need_an_adapter_beside_them() -> None:
    options = DistillationOptions(teachers=(TeacherConfig(path="a"),))
    facts = ModelFacts(family="toy", masked_text=False, has_adapter=False, experts=("t",))
    reason = Distillation(options).unsupported(facts)
    assert reason is not None
    assert "set model.lora" in reason
    assert Distillation(options).unsupported(attrs.evolve(facts, has_adapter=True)) is None
    assert reason == options.mistakes(attrs.evolve(FACTS, has_adapter=False))["name"]


def test_the_paths_of_teachers_can_be_made_absolute() -> None:
    options = DistillationOptions(teachers=(TeacherConfig(path="a"),), route="task")
    moved = options.with_paths(lambda path: f"/there/{path}")
    assert moved == attrs.evolve(options, teachers=(TeacherConfig(path="/there/a"),))
    assert GRPOGuardOptions().with_paths(str.upper) == GRPOGuardOptions()


def test_a_teachers_name_is_a_plain_word() -> None:
    with pytest.raises(ValueError, match="name"):
        TeacherConfig(path="a", name="a.b")


def test_options_are_read_from_a_recipe() -> None:
    given = {
        "form": "velocity",
        "teachers": [{"name": "ocr", "path": "teachers/ocr"}],
        "norm_guard": {"coef": 0.2},
        "kind": "cps",
    }
    options = structure(given, DistillationOptions)
    assert options.teachers == (TeacherConfig(name="ocr", path="teachers/ocr"),)
    assert options.norm_guard is not None
    assert options.norm_guard.coef == 0.2
    assert options.kind is StepKind.CPS
    nft = structure({"old_policy": "delayed_ramp", "probability": "binary"}, DiffusionNFTOptions)
    assert nft.old_policy is OldPolicy.DELAYED_RAMP
