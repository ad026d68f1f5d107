"""The clipped surrogate: one term per row, whatever the batch was cut into."""

from __future__ import annotations

import pytest
import torch

from omni_core.policy_loss import clipped_surrogate

OLD = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
LOG_RATIO = torch.tensor([0.05, 0.4, -0.4, -0.05], dtype=torch.float64)


def test_terms_and_gradients_are_ppos() -> None:
    log_probs = (OLD + LOG_RATIO).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -9.0], dtype=torch.float64)
    terms = clipped_surrogate(log_probs, OLD, advantages, clip_ratio=0.2, adv_clip_max=5.0)
    ratio = LOG_RATIO.exp()
    # Rows 1 and 2 moved as their advantage asked, beyond the clip: no gradient.
    expected = [-ratio[0].item(), -1.2, 0.8, 5.0 * ratio[3].item()]
    assert terms.loss.tolist() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    assert grad.tolist() == pytest.approx([expected[0], 0.0, 0.0, expected[3]])
    assert terms.clipped_higher.tolist() == [False, True, False, False]
    assert terms.clipped_lower.tolist() == [False, False, True, False]


def test_gradients_equal_finite_differences() -> None:
    log_probs = (OLD + LOG_RATIO).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, 7.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda new: clipped_surrogate(
            new, OLD, advantages, clip_ratio=0.2, adv_clip_max=5.0, weights=weights
        ).loss,
        (log_probs,),
    )


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    old = torch.tensor([-1.3, -0.2, 0.7])
    advantages = torch.tensor([1.5, -0.25, 0.0])
    log_probs = old.clone().requires_grad_()
    terms = clipped_surrogate(log_probs, old, advantages, clip_ratio=1e-5, adv_clip_max=None)
    (grad,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    assert torch.equal(grad, -advantages)
    assert terms.metrics()["pg_clipfrac"] == 0.0
    assert terms.metrics()["ppo_kl"] == 0.0


def test_weights_multiply_after_the_maximum() -> None:
    advantages = torch.ones(4, dtype=torch.float64)
    plain = clipped_surrogate(
        OLD + LOG_RATIO, OLD, advantages, clip_ratio=0.2, adv_clip_max=None
    ).loss
    weights = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    weighted = clipped_surrogate(
        OLD + LOG_RATIO, OLD, advantages, clip_ratio=0.2, adv_clip_max=None, weights=weights
    ).loss
    assert torch.equal(weighted, plain * weights)


def test_terms_do_not_depend_on_how_the_batch_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new, advantages = (torch.randn(12, generator=generator) for _ in range(3))
    new = old + 0.01 * new
    whole = clipped_surrogate(new, old, advantages, clip_ratio=1e-2, adv_clip_max=5.0).loss
    for size in (1, 2, 4):
        parts = [
            clipped_surrogate(
                new[at : at + size],
                old[at : at + size],
                advantages[at : at + size],
                clip_ratio=1e-2,
                adv_clip_max=5.0,
            ).loss
            for at in range(0, 12, size)
        ]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-7, atol=0)


def test_one_row_has_no_ratio_spread() -> None:
    one = torch.tensor([-1.0])
    terms = clipped_surrogate(one, one, one, clip_ratio=0.1, adv_clip_max=None)
    assert terms.metrics()["ratio_std"] == 0.0


def test_malformed_arguments_are_refused() -> None:
    row = torch.zeros(3)
    with pytest.raises(ValueError, match="advantages must be"):
        clipped_surrogate(row, row, torch.zeros(3, 1), clip_ratio=0.1, adv_clip_max=None)
    with pytest.raises(ValueError, match="weights must be"):
        clipped_surrogate(row, row, row, clip_ratio=0.1, adv_clip_max=None, weights=torch.zeros(2))
    for clip_ratio, adv_clip_max in ((0.0, 5.0), (0.1, 0.0), (float("nan"), None)):
        with pytest.raises(ValueError, match="above 0"):
            clipped_surrogate(row, row, row, clip_ratio=clip_ratio, adv_clip_max=adv_clip_max)
