"""Algorithms against closed-form numbers in float64, and against finite differences of their own loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.algorithm import Algorithm
from omni_core.algorithms.awm import AWM
from omni_core.algorithms.awm_options import AWMOptions
from omni_core.algorithms.dance_grpo import DanceGRPO
from omni_core.algorithms.dance_grpo_options import DanceGRPOOptions
from omni_core.algorithms.dgpo import DGPO, group_weights
from omni_core.algorithms.dgpo_options import DGPOOptions
from omni_core.algorithms.diffusion_dpo import DiffusionDPO, dpo_terms
from omni_core.algorithms.diffusion_dpo_options import DiffusionDPOOptions
from omni_core.algorithms.diffusion_nft import DiffusionNFT, nft_terms, reward_probability
from omni_core.algorithms.diffusion_nft_options import DiffusionNFTOptions
from omni_core.algorithms.distillation import Distillation
from omni_core.algorithms.distillation_options import DistillationOptions, TeacherConfig
from omni_core.algorithms.elbo import Elbo, elbo_terms
from omni_core.algorithms.elbo_options import ElboOptions
from omni_core.algorithms.flow_dppo import FlowDPPO
from omni_core.algorithms.flow_dppo_options import FlowDPPOOptions
from omni_core.algorithms.flow_grpo import FlowGRPO
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.algorithms.grpo_guard import GRPOGuard, guard_log_ratio, noise_log_ratio
from omni_core.algorithms.grpo_guard_options import GRPOGuardOptions
from omni_core.algorithms.ram import RAM
from omni_core.algorithms.ram_options import RAMOptions
from omni_core.choices import (
    DistillationForm,
    ElboForm,
    KLForm,
    OldPolicy,
    RewardProbability,
    StepKind,
)
from omni_core.engine import LossInputs, StepPrediction
from omni_core.forward_process import (
    ForwardLossInputs,
    adaptive_error,
    clean_estimate,
    denoising_error,
    noise_to,
    velocity_error,
)
from omni_core.kl import gaussian_kl
from omni_core.reverse_step import ReverseStep, old_mean, reverse_step, transition_std
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing import forward_loss_inputs, loss_inputs, trained_leaf

IDENTITIES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "golden" / "identities.json").read_text()
)
SIGMAS = torch.tensor(IDENTITIES["sigmas_shift3_T10"], dtype=torch.float64)
K = torch.arange(8, dtype=torch.float64).reshape(2, 4)
SAMPLE, VELOCITY, NOISE = torch.sin(1 + K), torch.cos(2 + 3 * K), torch.sin(5 + 7 * K)
NEW_VELOCITY = VELOCITY + 0.01 * torch.cos(K)
STOCHASTIC = (StepKind.SDE, StepKind.CPS, StepKind.DANCE_SDE)


def close(got: Tensor, expected: Any, *, rtol: float = 1e-10) -> None:
    want = torch.tensor(expected, dtype=torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.flatten(), want.expand(got.numel()), rtol=rtol, atol=1e-14)


# -- closed forms ----------------------------------------------------------------------------------

CLEAN, X1, SIGMA = {"x": SAMPLE}, {"x": NOISE}, torch.full((2,), 0.6, dtype=torch.float64)
NOISED = noise_to(CLEAN, X1, SIGMA)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nft_is_the_closed_form(beta: float) -> None:
    expected = IDENTITIES[f"nft beta{beta}"]
    probability = reward_probability(
        torch.tensor(expected["A"], dtype=torch.float64),
        mode=RewardProbability.CONTINUOUS,
        adv_clip_max=5.0,
    )
    close(probability, expected["r"])
    new, old = {"x": NEW_VELOCITY}, {"x": VELOCITY}
    terms = nft_terms(new, old, NOISED, CLEAN, SIGMA, probability, beta=beta, scale=5.0)
    close(terms.positive, expected["pos"])
    close(terms.negative, expected["neg"])
    close(terms.loss, expected["policy"])
    kl = 1e-4 * velocity_error(new, old)
    close(kl, expected["kl"])
    close((terms.loss + kl).mean(), expected["total"])


def test_dpo_is_the_closed_form() -> None:
    expected = IDENTITIES["dpo beta100 (row0=win,row1=lose, target eps-x0)"]
    error, reference = (
        denoising_error({"x": velocity}, CLEAN, X1) for velocity in (NEW_VELOCITY, VELOCITY)
    )
    terms = dpo_terms(error[:1], error[1:], reference[:1], reference[1:], beta=100.0)
    close(terms.loss, expected["loss"])
    close(terms.chosen_reward - terms.rejected_reward, expected["inside"])


def test_elbo_gradients_are_the_closed_forms() -> None:
    expected = IDENTITIES["elbo adaptive"]
    new, old = (
        -adaptive_error({"x": velocity}, NOISED, CLEAN, SIGMA)
        for velocity in (NEW_VELOCITY, VELOCITY)
    )
    close(new, expected["new"])
    close(old, expected["old"])
    advantages = 0.1 * torch.tensor(IDENTITIES["nft beta1.0"]["A"], dtype=torch.float64)
    for form in ElboForm:
        close(elbo_terms(form, new, old, advantages).mean(), expected[form.value], rtol=1e-9)


def take(kind: StepKind, index: int, eta: float, velocity: Tensor, **given: Any) -> ReverseStep:
    return reverse_step(
        kind,
        {"x": SAMPLE},
        {"x": velocity},
        SIGMAS[index].expand(2),
        SIGMAS[index + 1].expand(2),
        sigma_guard=SIGMAS[1],
        noise_level=eta,
        **given,
    )


@pytest.mark.parametrize("step", sorted(IDENTITIES["steps"]))
def test_the_guarded_ratio_is_the_closed_form(step: str) -> None:
    old = take(StepKind.SDE, int(step), 0.7, VELOCITY, noise={"x": NOISE})
    new = take(StepKind.SDE, int(step), 0.7, NEW_VELOCITY, next_sample=old.next_sample)
    expected = IDENTITIES["steps"][step]["flow_sde eta.7"]["guard_log_ratio"]
    mean = old_mean(new, {"x": NOISE})
    close(mean["x"], old.mean["x"].flatten().tolist(), rtol=1e-12)
    close(noise_log_ratio(new.mean, mean, {"x": NOISE}), expected, rtol=1e-10)


# -- identities of the reverse process -------------------------------------------------------------


@pytest.mark.parametrize("kind", STOCHASTIC)
@pytest.mark.parametrize("index", range(9))
def test_guard_is_the_mean_of_noise_times_the_move(kind: StepKind, index: int) -> None:
    old = take(kind, index, 0.7, VELOCITY, noise={"x": NOISE})
    new = take(kind, index, 0.7, NEW_VELOCITY, next_sample=old.next_sample)
    assert old.log_density is not None
    assert new.log_density is not None
    by_densities = guard_log_ratio(new.log_density, old.log_density, new.mean, old.mean, new.std)
    by_noise = (NOISE * (new.mean["x"] - old.mean["x"])).mean(1)
    torch.testing.assert_close(by_densities, by_noise, rtol=1e-9, atol=1e-14)
    mean = old_mean(new, {"x": NOISE})
    torch.testing.assert_close(mean["x"], old.mean["x"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        noise_log_ratio(new.mean, mean, {"x": NOISE}), by_noise, rtol=1e-9, atol=1e-14
    )


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_both_forms_of_the_guarded_ratio_have_one_gradient(kind: StepKind) -> None:
    given = loss_inputs(kind=kind, apart=0.05)
    assert given.noise is not None
    leaf, current = trained_leaf(given), given.current
    assert current.log_density is not None
    old = old_mean(current, given.noise)
    s, d = current.std, leaf[0].numel()
    density = (
        -(given.noise["image"] ** 2).flatten(1).mean(1) / 2
        - s.log()
        - 0.5 * torch.log(torch.tensor(2 * torch.pi))
    )
    forms = (
        guard_log_ratio(current.log_density, density, current.mean, old, s),
        noise_log_ratio(current.mean, old, given.noise),
    )
    first, second = (torch.autograd.grad(f.sum(), leaf, retain_graph=True)[0] for f in forms)
    torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-12)
    (of_mean,) = torch.autograd.grad(forms[1].sum(), current.mean["image"], retain_graph=True)
    torch.testing.assert_close(of_mean, given.noise["image"] / d)


def test_a_rows_guarded_ratio_is_its_own() -> None:
    # One published script takes the mean of s over its batch: rows at different steps would differ.
    given = loss_inputs(apart=0.05)
    assert given.noise is not None
    options = GRPOGuardOptions(clip_ratio=10.0)
    found = GRPOGuard(options).loss(given)
    assert len(set(given.current.std.tolist())) > 1
    move = given.current.mean["image"].detach() - old_mean(given.current, given.noise)["image"]
    ratio = (given.noise["image"] * move).flatten(1).mean(1).exp()
    torch.testing.assert_close(found.metrics["ratio"], ratio, rtol=1e-9, atol=0.0)
    torch.testing.assert_close(
        found.terms.detach(), -given.advantages * ratio / -given.dt, rtol=1e-9, atol=0.0
    )


def test_the_first_steps_deviation_is_eta() -> None:
    for eta in (0.3, 0.7, 1.2):
        std = take(StepKind.SDE, 0, eta, VELOCITY, noise={"x": NOISE}).std
        torch.testing.assert_close(std, torch.full_like(std, eta), rtol=1e-14, atol=0.0)


def test_dance_grpo_is_flow_grpo_with_constant_diffusion() -> None:
    given = loss_inputs(kind=StepKind.DANCE_SDE, noise_level=0.3)
    options = DanceGRPOOptions()
    plain = FlowGRPO(FlowGRPOOptions(kind=StepKind.DANCE_SDE, noise_level=0.3))
    assert torch.equal(DanceGRPO(options).loss(given).terms, plain.loss(given).terms)
    assert options.clip == 1e-4
    torch.testing.assert_close(given.current.std, 0.3 * (-given.dt).sqrt())


def test_distillation_is_the_exact_kl_to_the_teacher() -> None:
    given = loss_inputs(apart=0.05)
    assert given.teacher is not None
    found = Distillation(DistillationOptions()).loss(given).terms
    kl = gaussian_kl(given.current.mean, given.teacher.mean, given.current.std, form=KLForm.EXACT)
    assert torch.equal(found, kl)
    options = DistillationOptions(form=DistillationForm.VELOCITY)
    velocity = Distillation(options).loss(given).terms
    apart = given.current.velocity["image"] - given.teacher.velocity["image"]
    torch.testing.assert_close(velocity, apart.square().flatten(1).mean(1))
    (gradient,) = torch.autograd.grad(found.sum(), trained_leaf(given), retain_graph=True)
    assert ((gradient * apart).flatten(1).sum(1) > 0).all()
    equal = Distillation(DistillationOptions()).loss(loss_inputs(apart=0.0))
    assert equal.terms.abs().max() == 0.0


def test_the_distance_from_each_of_several_teachers_has_a_name() -> None:
    teachers = tuple(TeacherConfig(name=name, path="-") for name in ("ocr", "style"))
    options = DistillationOptions(teachers=teachers, route="teacher")
    said = Distillation(options).loss(attrs.evolve(loss_inputs(), teacher_place=1)).metrics
    assert torch.equal(said["teacher_distance/style"], said["teacher_distance"])
    assert "teacher_distance/ocr" not in said
    alone = Distillation(DistillationOptions(teachers=teachers[:1])).loss(loss_inputs()).metrics
    assert sorted(alone) == ["loss", "teacher_distance"]


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_case_5_the_kl_from_the_old_policy_has_the_samplers_deviation(kind: StepKind) -> None:
    given = loss_inputs(kind=kind, apart=0.05)
    assert given.noise is not None
    schedule = FlowMatchSchedule.linear(6, shift=3.0)
    sigma, after = schedule.at(torch.arange(6) % 5)
    std = transition_std(
        kind, sigma, after, sigma_guard=schedule.sigma_guard, noise_level=0.7
    ).double()
    torch.testing.assert_close(given.current.std, std, rtol=1e-6, atol=0.0)
    found = FlowDPPO(FlowDPPOOptions(kind=kind)).loss(given).metrics["kl_old"]
    move = given.current.mean["image"].detach() - old_mean(given.current, given.noise)["image"]
    by_hand = move.square().flatten(1).mean(1) / (2.0 * given.current.std.square())
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=0.0)


def dppo(ratio: Sequence[float], advantages: Sequence[float], delta: float) -> tuple[Any, Tensor]:
    """Four rows whose KL from the old policy is 0.5 each: mu moved by s, D values of it."""
    rows = len(ratio)
    mean = torch.ones(rows, 3, dtype=torch.float64, requires_grad=True)
    noise = torch.zeros(rows, 3, dtype=torch.float64)
    one = torch.ones(rows, dtype=torch.float64)
    log_probs = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    current = StepPrediction(
        next_sample={"x": noise},
        mean={"x": mean},
        std=one,
        log_prob=log_probs,
        log_density=log_probs,
        velocity={"x": mean},
    )
    given = LossInputs(
        current=current,
        noise={"x": noise},
        old_log_probs=0.0 * one,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=one,
        dt=-one,
    )
    result = FlowDPPO(FlowDPPOOptions(max_kl=delta)).loss(given)
    return result, torch.autograd.grad(result.terms.sum(), log_probs)[0]


def test_dppo_drops_what_moves_away_and_keeps_what_comes_back() -> None:
    ratio, advantages = (1.5, 0.5, 1.5, 0.5), (2.0, -2.0, -2.0, 2.0)
    result, gradient = dppo(ratio, advantages, 0.4)
    assert result.metrics["kl_old"].tolist() == [0.5] * 4
    assert result.terms.tolist() == [0.0, 0.0, 3.0, -1.0]
    assert gradient.tolist() == [0.0, 0.0, 3.0, -1.0]
    assert result.metrics["clip_fraction"].tolist() == [1.0, 1.0, 0.0, 0.0]
    # The threshold itself is beyond; above it nothing is dropped, and no advantage is clipped.
    assert dppo(ratio, advantages, 0.5)[1].tolist() == gradient.tolist()
    assert dppo(ratio, (9.0, -9.0, -9.0, 9.0), 0.6)[1].tolist() == [-13.5, 4.5, 13.5, -4.5]


# -- identities of the forward process -------------------------------------------------------------


def test_a_velocity_that_is_right_gives_the_sample_back() -> None:
    given = forward_loss_inputs()
    velocity = {"image": given.noise["image"] - given.clean["image"]}
    estimate = clean_estimate(given.noised, velocity, given.sigma)
    torch.testing.assert_close(estimate["image"], given.clean["image"], rtol=1e-12, atol=1e-12)
    assert denoising_error(velocity, given.clean, given.noise).max() == 0.0


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_at_the_old_policy_nft_does_not_see_the_reward_but_learns_from_it(beta: float) -> None:
    given = forward_loss_inputs(apart=0.0)
    options = DiffusionNFTOptions(beta=beta, kl_coef=0.0, old_policy=OldPolicy.COPY)
    leaf = trained_leaf(given)
    error = adaptive_error(given.current, given.noised, given.clean, given.sigma)
    (slope,) = torch.autograd.grad(error.sum(), leaf, retain_graph=True)
    for advantages in (given.advantages, -3.0 * given.advantages, 0.0 * given.advantages):
        result = DiffusionNFT(options).loss(attrs.evolve(given, advantages=advantages))
        torch.testing.assert_close(result.terms.detach(), 5.0 * error.detach() / beta)
        (gradient,) = torch.autograd.grad(result.terms.sum(), leaf)
        r = result.metrics["reward_probability"]
        expected = 5.0 * (2.0 * r - 1.0).reshape(-1, 1, 1) * slope
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_on_policy_the_elbo_gradients_are_one() -> None:
    given = forward_loss_inputs()
    gradients = []
    for form in ElboForm:
        result = Elbo(ElboOptions(form=form)).loss(given)
        assert result.metrics["ratio"].tolist() == [1.0] * 6
        gradients.append(torch.autograd.grad(result.terms.sum(), trained_leaf(given))[0])
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-10, atol=1e-14)


def test_on_policy_awm_is_the_pretraining_loss_times_the_advantage() -> None:
    given = forward_loss_inputs()
    result = AWM(AWMOptions(ema_coef=0.0, kl_coef=0.0)).loss(given)
    assert result.metrics["ratio"].tolist() == [1.0] * 6
    error = denoising_error(given.current, given.clean, given.noise)
    weighed = given.advantages.clamp(-5.0, 5.0) * error
    expected, gradient = (
        torch.autograd.grad(f.sum(), trained_leaf(given))[0] for f in (weighed, result.terms)
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def test_dgpo_has_the_gradient_of_a_preference_between_the_parts_of_a_group() -> None:
    given = forward_loss_inputs(units=3, unit_rows=4, apart=0.3)
    assert given.reference is not None
    beta = 7.0
    terms = DGPO(DGPOOptions(beta=beta)).loss(given).terms
    error, reference = (
        denoising_error(v, given.clean, given.noise) for v in (given.current, given.reference)
    )
    ordered = (given.advantages * (error - reference)).reshape(3, 4).sum(1)
    preference = -torch.nn.functional.logsigmoid(-beta / 4 * ordered)
    leaf = trained_leaf(given)
    ours = torch.autograd.grad(terms.mean(), leaf, retain_graph=True)[0]
    theirs = torch.autograd.grad(preference.mean(), leaf)[0]
    torch.testing.assert_close(beta * ours, theirs, rtol=1e-9, atol=1e-14)
    weights = group_weights(error, reference, given.advantages, given.unit, beta=beta)
    assert len(set(weights.tolist())) == 3


def test_ram_regresses_to_the_reference_where_the_advantage_is_zero() -> None:
    given = forward_loss_inputs(apart=0.1)
    assert given.reference is not None
    algorithm = RAM(RAMOptions(strength=2.0))
    none = algorithm.loss(attrs.evolve(given, advantages=0.0 * given.advantages)).terms
    assert torch.equal(none, velocity_error(given.current, given.reference))
    one = algorithm.loss(attrs.evolve(given, advantages=0.5 + 0.0 * given.advantages)).terms
    # m A = 1 moves the target by the whole residual of the (on-policy) old velocity.
    target = given.noise["image"] - given.clean["image"]
    residual = target - given.current["image"].detach()
    away = given.current["image"] - given.reference["image"] - residual
    torch.testing.assert_close(one, away.square().flatten(1).mean(1), rtol=1e-12, atol=0.0)


# -- gradients -------------------------------------------------------------------------------------

REVERSE: list[tuple[Algorithm, StepKind]] = [
    (FlowGRPO(FlowGRPOOptions(clip_ratio=0.01, kl_coef=0.3, kind=kind)), kind)
    for kind in STOCHASTIC
]
REVERSE += [
    (GRPOGuard(GRPOGuardOptions(clip_ratio=0.01, kl_coef=0.3, kl_form=KLForm.EXACT)), kind)
    for kind in STOCHASTIC
]
REVERSE += [(FlowDPPO(FlowDPPOOptions(max_kl=1e-3, kl_coef=0.3)), kind) for kind in STOCHASTIC]
REVERSE += [
    (Distillation(DistillationOptions(form=form)), StepKind.SDE) for form in DistillationForm
]


def differences(
    loss: Callable[[Tensor], Tensor], at: Tensor, directions: int = 3, step: float = 1e-6
) -> list[tuple[Tensor, float]]:
    """Some directions, and the loss's slope along them."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(directions):
        along = torch.randn(at.shape, generator=generator, dtype=at.dtype)
        rise = loss(at + step * along) - loss(at - step * along)
        found.append((along, float(rise) / (2.0 * step)))
    return found


@pytest.mark.parametrize(
    ("algorithm", "kind"), REVERSE, ids=lambda value: str(getattr(value, "options", value))[:20]
)
def test_reverse_gradients_are_finite_differences(algorithm: Algorithm, kind: StepKind) -> None:
    given = loss_inputs(kind=kind, apart=0.05, seed=3)
    leaf = trained_leaf(given)
    terms = algorithm.loss(given).terms
    (gradient,) = torch.autograd.grad(terms.sum(), leaf, retain_graph=True)
    # The mean is linear in the velocity, mu = a x + b v: b from the mean's own gradient.
    b = torch.autograd.grad(given.current.mean["image"].sum(), leaf)[0]
    std, after = given.current.std.reshape(-1, 1, 1), given.current.next_sample["image"]

    def loss(velocity: Tensor) -> Tensor:
        with torch.no_grad():
            mean = given.current.mean["image"] + b * (velocity - leaf)
            squared = (after - mean).square()
            density = (-squared / (2 * std**2) - std.log() - 0.9189385332046727).flatten(1).mean(1)
            current = attrs.evolve(
                given.current,
                mean={"image": mean},
                velocity={"image": velocity},
                log_prob=-squared.flatten(1).mean(1) if kind is StepKind.CPS else density,
                log_density=density,
            )
            return algorithm.loss(attrs.evolve(given, current=current)).terms.sum()

    torch.testing.assert_close(loss(leaf.detach()), terms.sum().detach(), rtol=1e-10, atol=0.0)
    for along, slope in differences(loss, leaf.detach()):
        assert float((gradient * along).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def constant_part(
    algorithm: Algorithm, given: ForwardLossInputs
) -> Callable[[Tensor], Tensor] | None:
    """The loss whose gradient is meant, where constants of the velocity are in the algorithm's own."""
    leaf = trained_leaf(given).detach()

    def weight(velocity: Tensor) -> Tensor:
        estimate = clean_estimate(given.noised, {"image": velocity}, given.sigma)
        return (estimate["image"] - given.clean["image"]).abs().flatten(1).mean(1)

    def error(velocity: Tensor, at: Tensor) -> Tensor:
        estimate = clean_estimate(given.noised, {"image": velocity}, given.sigma)
        return velocity_error(estimate, given.clean) / weight(at).clamp_min(1e-5)

    if isinstance(algorithm, DiffusionNFT):
        assert given.old is not None
        old, beta = given.old["image"], algorithm.options.beta
        r = algorithm.loss(given).metrics["reward_probability"]

        def nft(velocity: Tensor) -> Tensor:
            plus = [(1 - beta) * old + beta * v for v in (velocity, leaf)]
            minus = [(1 + beta) * old - beta * v for v in (velocity, leaf)]
            policy = 5.0 * (r * error(*plus) + (1 - r) * error(*minus)) / beta
            away = velocity_error({"image": velocity}, algorithm.reference(given))
            return (policy + algorithm.options.kl_coef * away).sum()

        return nft
    if isinstance(algorithm, Elbo):
        assert given.old is not None
        old_elbo = -error(given.old["image"], given.old["image"])
        gain = -error(leaf, leaf) - old_elbo
        a, ratio = given.advantages, gain.exp()

        def elbo(velocity: Tensor) -> Tensor:
            e = -error(velocity, leaf)
            forms = {
                ElboForm.EPG: -ratio * a * e,
                ElboForm.PEPG: -ratio * (a - gain) * e,
                ElboForm.PAR: 0.5 * ratio * (a - (e - old_elbo)).square(),
            }
            return forms[algorithm.options.form].sum()

        return elbo
    if isinstance(algorithm, DGPO):
        weights = algorithm.loss(given).metrics["group_weight"]

        def dgpo(velocity: Tensor) -> Tensor:
            d = denoising_error({"image": velocity}, given.clean, given.noise)
            return (weights * given.advantages * d).sum()

        return dgpo
    return None


FORWARD: list[Algorithm] = [
    DiffusionNFT(DiffusionNFTOptions(kl_coef=0.2)),
    DiffusionNFT(DiffusionNFTOptions(beta=0.1)),
    *(Elbo(ElboOptions(form=form, updates_per_rollout=2)) for form in ElboForm),
    AWM(AWMOptions(updates_per_rollout=2, clip_ratio=0.02)),
    RAM(RAMOptions(old_policy=OldPolicy.RAMP, kl_coef=0.2)),
    DiffusionDPO(DiffusionDPOOptions(beta=10.0, kl_coef=0.2)),
    DGPO(DGPOOptions(beta=10.0)),
]


@pytest.mark.parametrize("algorithm", FORWARD, ids=lambda a: str(a.options)[:30])
def test_forward_gradients_are_finite_differences(algorithm: Algorithm) -> None:
    rows = {DiffusionDPO: 2, DGPO: 4}.get(type(algorithm), 1)
    given = forward_loss_inputs(units=4, unit_rows=rows, apart=0.1, seed=2)
    leaf = trained_leaf(given)
    (gradient,) = torch.autograd.grad(algorithm.loss(given).terms.sum(), leaf)

    def plain(velocity: Tensor) -> Tensor:
        return algorithm.loss(attrs.evolve(given, current={"image": velocity})).terms.sum()

    loss = constant_part(algorithm, given) or plain
    with torch.no_grad():
        torch.testing.assert_close(loss(leaf), plain(leaf), rtol=1e-10, atol=1e-12)
        for along, slope in differences(loss, leaf.detach()):
            assert float((gradient * along).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_other_policies_get_no_gradient() -> None:
    for algorithm in FORWARD:
        rows = {DiffusionDPO: 2, DGPO: 4}.get(type(algorithm), 1)
        given = forward_loss_inputs(units=4, unit_rows=rows)
        others = {
            name: {"image": getattr(given, name)["image"].requires_grad_()}
            for name in ("old", "reference", "ema")
        }
        terms = algorithm.loss(attrs.evolve(given, **others)).terms
        leaves = [value["image"] for value in others.values()]
        found = torch.autograd.grad(terms.sum(), leaves, allow_unused=True)
        assert all(each is None or not each.any() for each in found), algorithm.options


def test_a_schedule_is_not_needed_by_the_forward_process() -> None:
    schedule = FlowMatchSchedule.linear(10)
    assert all(a.window(schedule, seed=0, iteration=0) == () for a in FORWARD)
