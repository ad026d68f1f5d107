"""KL of a reverse step: two named forms from the sampler's own standard deviation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from omni_core.kl import KLForm, gaussian_kl, velocity_kl
from omni_core.reverse_step import StepKind, reverse_step
from omni_core.schedule import FlowMatchSchedule

SCHEDULE = FlowMatchSchedule.linear(10, shift=3.0)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_exact_is_the_divergence_of_two_gaussians() -> None:
    mean, mean_ref, std = normal(0, 3, 4), normal(1, 3, 4), torch.tensor([0.1, 0.5, 2.0]).double()
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std.unsqueeze(1)),
        torch.distributions.Normal(mean_ref, std.unsqueeze(1)),
    ).mean(1)
    got = gaussian_kl({"x": mean}, {"x": mean_ref}, std, form=KLForm.EXACT)
    torch.testing.assert_close(got, expected)


def test_flow_grpo_is_exact_times_minus_dt() -> None:
    mean, mean_ref = {"x": normal(0, 2, 4)}, {"x": normal(1, 2, 4)}
    std, dt = torch.tensor([0.3, 0.6]).double(), torch.tensor([-0.1, -0.25]).double()
    exact = gaussian_kl(mean, mean_ref, std, form=KLForm.EXACT)
    published = gaussian_kl(mean, mean_ref, std, form=KLForm.FLOW_GRPO, dt=dt)
    torch.testing.assert_close(published, exact * torch.tensor([0.1, 0.25]).double())


@pytest.mark.parametrize("kind", [StepKind.SDE, StepKind.CPS, StepKind.DANCE_SDE])
def test_the_velocity_form_is_the_same_number(kind: StepKind) -> None:
    sigma, sigma_next = (value.double() for value in SCHEDULE.at(torch.tensor([0, 4, 8])))
    guard = SCHEDULE.sigma_guard.double()
    sample, v, v_ref, noise = (normal(seed, 3, 2, 5) for seed in range(4))

    def mean_and_std(velocity: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        step = reverse_step(
            kind,
            {"x": sample},
            {"x": velocity},
            sigma,
            sigma_next,
            sigma_guard=guard,
            noise_level=0.7,
            noise={"x": noise},
        )
        return dict(step.mean), step.std

    (mean, std), (mean_ref, _) = mean_and_std(v), mean_and_std(v_ref)
    got = velocity_kl(
        kind, {"x": v}, {"x": v_ref}, sigma, sigma_next, sigma_guard=guard, noise_level=0.7
    )
    torch.testing.assert_close(
        got, gaussian_kl(mean, mean_ref, std, form=KLForm.EXACT), rtol=1e-10, atol=0
    )


def test_the_paper_writes_the_velocity_form_of_flow_sde_like_this() -> None:
    sigma, sigma_next = (value.double() for value in SCHEDULE.at(torch.tensor([2, 5])))
    v, v_ref = normal(0, 2, 6), normal(1, 2, 6)
    g, dt = 0.7 * (sigma / (1 - sigma)).sqrt(), sigma - sigma_next
    paper = dt / 2 * (g * (1 - sigma) / (2 * sigma) + 1 / g).square() * (v - v_ref).square().mean(1)
    got = velocity_kl(
        "sde",
        {"x": v},
        {"x": v_ref},
        sigma,
        sigma_next,
        sigma_guard=SCHEDULE.sigma_guard.double(),
        noise_level=0.7,
    )
    torch.testing.assert_close(got, paper, rtol=1e-12, atol=0)


def test_equal_policies_have_kl_zero_and_a_zero_gradient() -> None:
    mean = normal(0, 2, 4).requires_grad_()
    kl = gaussian_kl(
        {"x": mean}, {"x": mean.detach()}, torch.tensor([0.1, 0.2]).double(), form=KLForm.EXACT
    )
    assert kl.tolist() == [0.0, 0.0]
    (grad,) = torch.autograd.grad(kl.sum(), mean)
    assert not grad.any()


def test_gradients_equal_finite_differences() -> None:
    mean, mean_ref = normal(0, 2, 4).requires_grad_(), normal(1, 2, 4)
    std, dt = torch.tensor([0.3, 0.6]).double(), torch.tensor([-0.1, -0.25]).double()
    for form in KLForm:
        assert torch.autograd.gradcheck(
            lambda m, form=form: gaussian_kl({"x": m}, {"x": mean_ref}, std, form=form, dt=dt),
            (mean,),
        )


def test_malformed_arguments_are_refused() -> None:
    x, std = {"x": normal(0, 2, 4)}, torch.tensor([0.3, 0.6]).double()
    with pytest.raises(ValueError, match="needs dt"):
        gaussian_kl(x, x, std, form=KLForm.FLOW_GRPO)
    with pytest.raises(ValueError, match="modalities differ"):
        gaussian_kl(x, {"y": x["x"]}, std, form=KLForm.EXACT)
    with pytest.raises(ValueError, match="shapes differ"):
        gaussian_kl(x, {"x": x["x"][:, :1]}, std, form=KLForm.EXACT)
    with pytest.raises(ValueError, match="std must be"):
        gaussian_kl(x, x, std[:1], form=KLForm.EXACT)
    with pytest.raises(ValueError, match="known are: exact, flow_grpo"):
        KLForm.parse("k3")
    with pytest.raises(ValueError, match="no KL"):
        velocity_kl(
            "ode",
            x,
            x,
            torch.tensor([0.5, 0.5]),
            torch.tensor([0.4, 0.4]),
            sigma_guard=torch.tensor(0.9),
            noise_level=0.7,
        )
