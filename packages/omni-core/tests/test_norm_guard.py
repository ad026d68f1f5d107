"""NormGuard acts on growth alone."""

from __future__ import annotations

import pytest
import torch

from omni_core.algorithms.base_options import NormGuardOptions
from omni_core.algorithms.diffusion_nft import DiffusionNFT
from omni_core.algorithms.diffusion_nft_options import DiffusionNFTOptions
from omni_core.algorithms.flow_grpo import FlowGRPO
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.norm_guard import norm_growth, norm_guard
from omni_core.testing import forward_loss_inputs, loss_inputs

REFERENCE = {
    "image": torch.tensor([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0]]),
    "audio": torch.full((3, 1), 4.0),
}
SCALE = torch.tensor([[0.8], [1.0], [1.2]])


def test_growth_is_relative_over_all_modalities() -> None:
    velocity = {name: SCALE * value for name, value in REFERENCE.items()}
    torch.testing.assert_close(norm_growth(velocity, REFERENCE), torch.tensor([-0.2, 0.0, 0.2]))
    # A turned velocity of the same length has not grown.
    turned = {"image": torch.tensor([[0.0, 5.0]] * 3), "audio": torch.zeros(3, 1)}
    assert norm_growth(turned, REFERENCE).abs().max() == 0.0


def test_the_hinge_acts_on_growth_beyond_the_margin() -> None:
    leaf = (SCALE * REFERENCE["image"]).requires_grad_()
    velocity = {"image": leaf, "audio": SCALE * REFERENCE["audio"]}
    hinge = norm_guard(velocity, REFERENCE, margin=0.05)
    torch.testing.assert_close(hinge, torch.tensor([0.0, 0.0, 0.15]))
    (gradient,) = torch.autograd.grad(hinge.sum(), leaf)
    assert gradient[:2].tolist() == [[0.0, 0.0]] * 2
    assert gradient[2, 0] > 0.0
    assert norm_guard(velocity, REFERENCE, margin=0.25).sum() == 0.0


def test_a_velocity_of_zero_has_a_finite_gradient() -> None:
    leaf = torch.zeros(1, 2, requires_grad=True)
    hinge = norm_guard({"x": leaf}, {"x": torch.ones(1, 2)})
    (gradient,) = torch.autograd.grad(hinge.sum(), leaf)
    assert gradient.tolist() == [[0.0, 0.0]]


def test_any_algorithm_takes_it_as_an_option() -> None:
    guard = NormGuardOptions(coef=0.5)
    reverse = loss_inputs(apart=0.3)
    assert reverse.reference is not None
    found = FlowGRPO(FlowGRPOOptions(norm_guard=guard)).loss(reverse)
    plain = FlowGRPO(FlowGRPOOptions()).loss(reverse)
    hinge = norm_guard(reverse.current.velocity, reverse.reference.velocity)
    assert hinge.max() > 0.0
    torch.testing.assert_close(found.terms, plain.terms + 0.5 * hinge)
    forward = forward_loss_inputs(apart=0.3)
    assert forward.reference is not None
    guarded = DiffusionNFT(DiffusionNFTOptions(norm_guard=guard)).loss(forward)
    bare = DiffusionNFT(DiffusionNFTOptions()).loss(forward)
    hinge = norm_guard(forward.current, forward.reference)
    torch.testing.assert_close(guarded.terms, bare.terms + 0.5 * hinge)
    assert FlowGRPOOptions(norm_guard=guard).needs_reference
    assert not FlowGRPOOptions().needs_reference


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="modalities differ"):
        norm_guard({"a": torch.ones(1, 1)}, {"b": torch.ones(1, 1)})
    with pytest.raises(ValueError, match="margin"):
        norm_guard(REFERENCE, REFERENCE, margin=-0.1)
