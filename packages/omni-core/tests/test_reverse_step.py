"""reverse_step: one function for every kind, to draw and to score, with the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from omni_core.reverse_step import (
    Latents,
    ReverseStep,
    StepKind,
    reverse_step,
    transition_coefficients,
    transition_std,
)
from omni_core.schedule import FlowMatchSchedule

STOCHASTIC = [StepKind.SDE, StepKind.CPS, StepKind.DANCE_SDE]
SCHEDULE = FlowMatchSchedule.linear(10, shift=3.0)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def step(
    kind: StepKind | str,
    sample: Latents,
    velocity: Latents,
    index: list[int],
    *,
    noise_level: float = 0.7,
    noise: Latents | None = None,
    next_sample: Latents | None = None,
) -> ReverseStep:
    sigma, sigma_next = SCHEDULE.at(torch.tensor(index))
    return reverse_step(
        kind,
        sample,
        velocity,
        sigma,
        sigma_next,
        sigma_guard=SCHEDULE.sigma_guard,
        noise_level=noise_level,
        noise=noise,
        next_sample=next_sample,
    )


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Formulas


def test_the_first_flow_sde_step_has_std_eta() -> None:
    sigma, sigma_next = SCHEDULE.at(torch.tensor([0]))
    std = transition_std(
        "sde", sigma, sigma_next, sigma_guard=SCHEDULE.sigma_guard, noise_level=0.7
    )
    assert std.tolist() == [pytest.approx(0.7, abs=1e-7)]


def test_the_guard_serves_a_first_sigma_just_below_one() -> None:
    # UniPC begins at 0.999999, where a test for equality with 1 would divide by 1e-6.
    schedule = FlowMatchSchedule.from_values([0.999999, 0.9, 0.0])
    sigma, sigma_next = schedule.at(torch.tensor([0]))
    std = transition_std(
        "sde", sigma, sigma_next, sigma_guard=schedule.sigma_guard, noise_level=0.7
    )
    assert std.item() == pytest.approx(0.7, abs=1e-5)


@pytest.mark.parametrize("index", [0, 1, 4, 8])
def test_dance_sde_is_flow_sde_with_g_equal_to_eta(index: int) -> None:
    sigma, sigma_next = (value.double() for value in SCHEDULE.at(torch.tensor([index])))
    guard = SCHEDULE.sigma_guard.double()
    factor = (sigma / (1.0 - torch.minimum(sigma, guard))).sqrt().item()
    dance = transition_coefficients(
        "dance_sde", sigma, sigma_next, sigma_guard=guard, noise_level=0.3
    )
    flow = transition_coefficients(
        "sde", sigma, sigma_next, sigma_guard=guard, noise_level=0.3 / factor
    )
    for name in ("sample", "velocity", "std"):
        torch.testing.assert_close(
            getattr(dance, name), getattr(flow, name), rtol=1e-14, atol=1e-15
        )
    assert dance.std.item() == pytest.approx(0.3 * math.sqrt(sigma.item() - sigma_next.item()))


@pytest.mark.parametrize("noise_level", [0.0, 0.3, 0.8, 1.0])
def test_cps_preserves_the_coefficients_of_data_and_noise(noise_level: float) -> None:
    sigma, sigma_next = SCHEDULE.at(torch.arange(9))
    got = transition_coefficients(
        "cps", sigma, sigma_next, sigma_guard=SCHEDULE.sigma_guard, noise_level=noise_level
    )
    sigma, sigma_next = sigma.double(), sigma_next.double()
    # x = (1 - sigma) x0 + sigma x1 and v = x1 - x0: what mu gives to x0 and to x1.
    data = got.sample * (1.0 - sigma) - got.velocity
    noise = got.sample * sigma + got.velocity
    torch.testing.assert_close(data, 1.0 - sigma_next, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        noise.square() + got.std.square(), sigma_next.square(), rtol=0, atol=1e-14
    )


def test_published_and_true_log_prob_forms() -> None:
    sample, velocity, noise = normal(0, 2, 6), normal(1, 2, 6), normal(2, 2, 6)
    for kind in STOCHASTIC:
        got = step(kind, {"x": sample}, {"x": velocity}, [2, 5], noise={"x": noise})
        assert got.log_prob is not None
        assert got.log_density is not None
        residual = got.next_sample["x"] - got.mean["x"]
        normal_log_density = torch.distributions.Normal(
            got.mean["x"], got.std.unsqueeze(1)
        ).log_prob(got.next_sample["x"])
        torch.testing.assert_close(
            got.log_density, normal_log_density.mean(1), rtol=1e-5, atol=1e-5
        )
        expected = -residual.square().mean(1) if kind is StepKind.CPS else got.log_density
        torch.testing.assert_close(got.log_prob, expected, rtol=1e-6, atol=1e-7)


# CASES


@pytest.mark.parametrize("kind", list(StepKind))
def test_case_3_noise_level_zero_is_the_euler_step(kind: StepKind) -> None:
    sample, velocity = normal(0, 3, 4, 5, 3), normal(1, 3, 4, 5, 3)
    index = [0, 4, 9]  # the first step (sigma 1) and the last (to sigma 0) included
    got = step(kind, {"x": sample}, {"x": velocity}, index, noise_level=0.0)
    sigma, sigma_next = SCHEDULE.at(torch.tensor(index))
    euler = sample + velocity * (sigma_next - sigma).reshape(3, 1, 1, 1)
    torch.testing.assert_close(got.next_sample["x"], euler, rtol=0, atol=1e-6)
    assert torch.equal(got.next_sample["x"], got.mean["x"])
    assert got.std.tolist() == [0.0, 0.0, 0.0]
    assert got.log_prob is None
    assert got.log_density is None
    with pytest.raises(ValueError, match=r"no log-prob: take .*sde, cps, dance_sde"):
        got.require_log_prob()
    noisy = step(
        kind,
        {"x": sample},
        {"x": velocity},
        index,
        noise_level=0.0,
        noise={"x": normal(2, 3, 4, 5, 3)},
    )
    assert torch.equal(noisy.next_sample["x"], got.next_sample["x"])
    with pytest.raises(ValueError, match="deterministic"):
        step(
            kind, {"x": sample}, {"x": velocity}, index, noise_level=0.0, next_sample={"x": sample}
        )


def test_ode_ignores_the_noise_level() -> None:
    sample, velocity = normal(0, 1, 4), normal(1, 1, 4)
    loud = step("ode", {"x": sample}, {"x": velocity}, [9], noise_level=0.7)
    quiet = step("ode", {"x": sample}, {"x": velocity}, [9], noise_level=0.0)
    assert torch.equal(loud.next_sample["x"], quiet.next_sample["x"])
    assert loud.log_prob is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STOCHASTIC)
def test_case_4_what_is_scored_is_what_is_stored(kind: StepKind, dtype: torch.dtype) -> None:
    sample, velocity, noise = normal(0, 2, 4, 9, 7), normal(1, 2, 4, 9, 7), normal(2, 2, 4, 9, 7)
    drawn = step(kind, {"x": sample}, {"x": velocity}, [1, 6], noise={"x": noise})
    stored = {"x": drawn.next_sample["x"].to(dtype)}
    scored = drawn
    if dtype != torch.float32:  # rounded first, scored after
        scored = step(kind, {"x": sample}, {"x": velocity}, [1, 6], next_sample=stored)
    again = step(kind, {"x": sample}, {"x": velocity}, [1, 6], next_sample=stored)
    assert torch.equal(scored.require_log_prob(), again.require_log_prob())
    assert torch.equal(scored.next_sample["x"], stored["x"].float())


def test_case_4_storing_what_was_scored_in_float32_as_bf16_shifts_the_log_prob() -> None:
    sample, velocity, noise = (normal(seed, 1, 16, 64, 64) for seed in (0, 1, 2))
    sigma, sigma_next = SCHEDULE.at(torch.tensor([4]))
    eta = 0.03 / math.sqrt(sigma.item() - sigma_next.item())  # s = 0.03
    drawn = step(
        "dance_sde", {"x": sample}, {"x": velocity}, [4], noise_level=eta, noise={"x": noise}
    )
    assert drawn.std.item() == pytest.approx(0.03)
    rounded = {"x": drawn.next_sample["x"].bfloat16()}
    late = step(
        "dance_sde", {"x": sample}, {"x": velocity}, [4], noise_level=eta, next_sample=rounded
    )
    shift = late.require_log_prob() - drawn.require_log_prob()
    assert -4e-3 < shift.item() < -1e-3  # a thousand times the clip range


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_case_5_the_std_for_kl_is_bit_equal_to_the_samplers(kind: StepKind) -> None:
    index = list(range(9))
    sample, velocity, noise = normal(0, 9, 5), normal(1, 9, 5), normal(2, 9, 5)
    drawn = step(kind, {"x": sample}, {"x": velocity}, index, noise={"x": noise})
    sigma, sigma_next = SCHEDULE.at(torch.tensor(index))
    std = transition_std(
        kind.value, sigma, sigma_next, sigma_guard=SCHEDULE.sigma_guard, noise_level=0.7
    )
    assert std.dtype == torch.float32
    assert torch.equal(std, drawn.std)
    assert torch.equal(drawn.next_sample["x"], drawn.mean["x"] + std.unsqueeze(1) * noise)
    scored = step(kind, {"x": sample}, {"x": velocity}, index, next_sample=drawn.next_sample)
    assert torch.equal(std, scored.std)


def test_case_5_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"StepKind 'sdee'.*sde, cps, dance_sde, ode"):
        StepKind.parse("sdee")
    with pytest.raises(ValueError, match="known are: sde, cps, dance_sde, ode"):
        step("flow", {"x": normal(0, 1, 2)}, {"x": normal(0, 1, 2)}, [0])
    assert StepKind.parse("dance_sde") is StepKind.DANCE_SDE


@pytest.mark.parametrize("shape", [(3, 5, 7), (16, 64, 64)])
@pytest.mark.parametrize("kind", STOCHASTIC)
def test_case_18_a_row_has_the_same_bits_alone_and_in_a_packed_batch(
    threads: int, kind: StepKind, shape: tuple[int, ...]
) -> None:
    index = [8, 0, 3, 5]  # rows at different steps in one batch
    sample, velocity, noise = (normal(seed, 4, *shape) for seed in (0, 1, 2))
    together = step(kind, {"x": sample}, {"x": velocity}, index, noise={"x": noise})
    for row in range(4):
        one = slice(row, row + 1)
        alone = step(
            kind,
            {"x": sample[one].clone()},
            {"x": velocity[one].clone()},
            index[one],
            noise={"x": noise[one].clone()},
        )
        assert torch.equal(alone.next_sample["x"], together.next_sample["x"][one])
        assert torch.equal(alone.require_log_prob(), together.require_log_prob()[one])
        scored = step(
            kind,
            {"x": sample[one]},
            {"x": velocity[one]},
            index[one],
            next_sample={"x": together.next_sample["x"][one]},
        )
        assert torch.equal(scored.require_log_prob(), together.require_log_prob()[one])


# Modalities, precision, gradients


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_log_probs_of_several_modalities_are_means_over_all_values(kind: StepKind) -> None:
    parts = [{"image": normal(s, 2, 3, 4), "level": normal(9 + s, 2)} for s in range(3)]
    joined = [
        {"all": torch.cat([part["image"].flatten(1), part["level"].unsqueeze(1)], dim=1)}
        for part in parts
    ]
    apart = step(kind, parts[0], parts[1], [1, 7], noise=parts[2])
    whole = step(kind, joined[0], joined[1], [1, 7], noise=joined[2])
    torch.testing.assert_close(
        apart.require_log_prob(), whole.require_log_prob(), rtol=1e-6, atol=1e-6
    )
    assert apart.next_sample["level"].shape == (2,)


def test_low_precision_is_raised_and_float64_is_kept() -> None:
    sample, velocity, noise = normal(0, 2, 6), normal(1, 2, 6).bfloat16(), normal(2, 2, 6)
    low = step("sde", {"x": sample}, {"x": velocity}, [1, 2], noise={"x": noise})
    high = step("sde", {"x": sample}, {"x": velocity.float()}, [1, 2], noise={"x": noise})
    assert low.mean["x"].dtype == torch.float32
    assert torch.equal(low.next_sample["x"], high.next_sample["x"])
    double = step("sde", {"x": sample.double()}, {"x": velocity}, [1, 2], noise={"x": noise})
    assert double.mean["x"].dtype == torch.float64
    assert double.require_log_prob().dtype == torch.float64


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_gradients_equal_finite_differences(kind: StepKind) -> None:
    sample, after = normal(0, 2, 3, dtype=torch.float64), normal(2, 2, 3, dtype=torch.float64)
    velocity = normal(1, 2, 3, dtype=torch.float64).requires_grad_()

    def scored(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        got = step(kind, {"x": sample}, {"x": v}, [1, 6], next_sample={"x": after})
        assert got.log_density is not None
        return got.require_log_prob(), got.log_density, got.mean["x"]

    assert torch.autograd.gradcheck(scored, (velocity,))


def test_samples_are_constants() -> None:
    sample, noise = normal(0, 2, 3), normal(2, 2, 3)
    velocity = normal(1, 2, 3).requires_grad_()
    drawn = step("sde", {"x": sample}, {"x": velocity}, [1, 6], noise={"x": noise})
    assert not drawn.next_sample["x"].requires_grad
    after = drawn.next_sample["x"].clone().requires_grad_()
    scored = step("sde", {"x": sample}, {"x": velocity}, [1, 6], next_sample={"x": after})
    (drawn_grad,) = torch.autograd.grad(drawn.require_log_prob().sum(), velocity)
    grads = torch.autograd.grad(
        scored.require_log_prob().sum(), [velocity, after], allow_unused=True
    )
    assert torch.equal(drawn_grad, grads[0])
    assert grads[1] is None


# Refusals


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_a_stochastic_step_to_sigma_zero_is_refused(kind: StepKind) -> None:
    x = {"x": normal(0, 2, 3)}
    with pytest.raises(ValueError, match=r"row 1: .*ends at sigma 0 and is never stochastic"):
        step(kind, x, x, [3, 9], noise=x)


def test_exactly_one_of_noise_and_next_sample() -> None:
    x = {"x": normal(0, 2, 3)}
    with pytest.raises(ValueError, match="got neither"):
        step("cps", x, x, [3, 4])
    with pytest.raises(ValueError, match="got both"):
        step("cps", x, x, [3, 4], noise=x, next_sample=x)


def test_mismatched_latents_are_refused() -> None:
    x, y = {"x": normal(0, 2, 3)}, {"y": normal(0, 2, 3)}
    with pytest.raises(ValueError, match=r"sample has modalities \['x'\], velocity has \['y'\]"):
        step("sde", x, y, [3, 4], noise=x)
    with pytest.raises(ValueError, match=r"sample \(2, 3\) and noise \(2, 4\)"):
        step("sde", x, x, [3, 4], noise={"x": normal(0, 2, 4)})
    with pytest.raises(ValueError, match="3 rows"):
        step("sde", x, x, [3, 4, 5], noise=x)


@pytest.mark.parametrize("noise_level", [-0.1, float("nan"), float("inf")])
def test_a_noise_level_that_is_no_level_is_refused(noise_level: float) -> None:
    x = {"x": normal(0, 1, 3)}
    with pytest.raises(ValueError, match="noise_level"):
        step("sde", x, x, [3], noise_level=noise_level, noise=x)


def test_sigmas_that_do_not_decrease_are_refused() -> None:
    half, guard = torch.tensor([0.9, 0.5]), torch.tensor(0.9)
    with pytest.raises(ValueError, match=r"row 1: .*sigma 0\.5 to 0\.5"):
        transition_std("sde", half, torch.tensor([0.8, 0.5]), sigma_guard=guard, noise_level=0.7)
    with pytest.raises(ValueError, match=r"\[B\] alike"):
        transition_std("sde", half, torch.tensor([0.4]), sigma_guard=guard, noise_level=0.7)
    with pytest.raises(ValueError, match="sigma_guard"):
        transition_std("sde", half, half - 0.1, sigma_guard=torch.tensor(1.0), noise_level=0.7)
