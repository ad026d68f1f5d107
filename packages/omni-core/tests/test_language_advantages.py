"""GAE and GRPO outcome advantages of token sequences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from omni_core.advantages import AdvantageStd
from omni_core.language_advantages import gae_advantages, outcome_advantages

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 1, 1, 1, 0]], dtype=torch.bool)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    return rewards, values


# -- GAE ------------------------------------------------------------------------------------------


def test_gae_is_its_sum_over_the_tokens_of_the_mask() -> None:
    rewards, values = batch()
    gamma, lam = 0.9, 0.8
    result = gae_advantages(rewards, values, MASK, gamma=gamma, lam=lam, whiten=False)
    for row, kept in enumerate(MASK):
        r, v = rewards[row, kept].tolist(), [*values[row, kept].tolist(), 0.0]
        deltas = [r[at] + gamma * v[at + 1] - v[at] for at in range(len(r))]
        expected = [
            math.fsum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[at:]))
            for at in range(len(r))
        ]
        assert result.advantages[row, kept].tolist() == pytest.approx(expected)
        targets = [advantage + value for advantage, value in zip(expected, v[:-1], strict=True)]
        assert result.returns[row, kept].tolist() == pytest.approx(targets)


def test_lam_one_gives_discounted_returns_and_lam_zero_one_step_errors() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, -1.0, 3.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    full = gae_advantages(rewards, values, mask, gamma=0.5, lam=1.0, whiten=False)
    assert full.returns.tolist() == [[3.0, 4.0, 4.0]]
    one = gae_advantages(rewards, values, mask, gamma=0.5, lam=0.0, whiten=False)
    assert one.advantages.tolist() == [[0.0, 4.5, 1.0]]


def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_mask() -> None:
    rewards, values = batch()
    plain = gae_advantages(rewards, values, MASK, gamma=0.99, lam=0.95, whiten=False)
    white = gae_advantages(rewards, values, MASK, gamma=0.99, lam=0.95)
    tokens = white.advantages[MASK]
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(tokens.var(correction=1)) == pytest.approx(1.0, rel=1e-7)
    # The critic's targets are those before whitening.
    assert torch.equal(white.returns, plain.returns)


def test_equal_advantages_whiten_to_zero() -> None:
    ones = torch.full((2, 4), 0.3)
    mask = torch.ones(2, 4, dtype=torch.bool)
    result = gae_advantages(ones, torch.zeros(2, 4), mask, gamma=0.0, lam=0.0)
    assert float(result.advantages.abs().max()) < 1e-9


@pytest.mark.parametrize("junk", [1e6, float("nan"), float("inf")])
def test_masked_tokens_have_no_influence_on_gae(junk: float) -> None:
    rewards, values = batch()
    clean = gae_advantages(rewards, values, MASK, gamma=0.99, lam=0.95)
    dirty = gae_advantages(
        rewards.masked_fill(~MASK, junk),
        values.masked_fill(~MASK, junk),
        MASK,
        gamma=0.99,
        lam=0.95,
    )
    assert torch.equal(dirty.advantages, clean.advantages)
    assert torch.equal(dirty.returns[MASK], clean.returns[MASK])


def test_gae_keeps_dtype_and_takes_no_gradient() -> None:
    rewards, values = (value.float() for value in batch())
    result = gae_advantages(rewards, values.requires_grad_(), MASK, gamma=0.99, lam=0.95)
    assert result.advantages.dtype == result.returns.dtype == torch.float32
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad


def test_gae_mistakes_are_named() -> None:
    rewards, values = batch()
    with pytest.raises(ValueError, match=r"values must be float \(3, 5\)"):
        gae_advantages(rewards, values[:, 1:], MASK, gamma=0.99, lam=0.95)
    with pytest.raises(ValueError, match="has 0 tokens: it is all zero"):
        gae_advantages(rewards, values, torch.zeros_like(MASK), gamma=0.99, lam=0.95)
    single = torch.zeros_like(MASK)
    single[0, 0] = True
    with pytest.raises(ValueError, match="has 1 tokens: whitening needs two"):
        gae_advantages(rewards, values, single, gamma=0.99, lam=0.95)
    for gamma, lam in ((1.1, 0.9), (0.9, -0.1), (float("nan"), 0.9)):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            gae_advantages(rewards, values, MASK, gamma=gamma, lam=lam)


# -- GRPO outcomes --------------------------------------------------------------------------------


def outcome(*scores: float) -> tuple[Tensor, Tensor]:
    """Rewards [B, 3] at the last token, and a full mask."""
    rewards = torch.zeros(len(scores), 3)
    rewards[:, -1] = torch.tensor(scores)
    return rewards, torch.ones(len(scores), 3, dtype=torch.bool)


def test_outcomes_are_compared_within_their_group() -> None:
    rewards, mask = outcome(1.0, 10.0, 3.0, 40.0)
    mask[0, 0] = False
    result = outcome_advantages(rewards, ["a", "b", "a", "b"], mask)
    a, b = 1.0 / (math.sqrt(2.0) + 1e-6), 15.0 / (math.sqrt(450.0) + 1e-6)
    expected = [[0.0, -a, -a], [-b] * 3, [a] * 3, [b] * 3]
    torch.testing.assert_close(result.advantages, torch.tensor(expected))
    centred = outcome_advantages(rewards, ["a", "b", "a", "b"], mask, std=AdvantageStd.NONE)
    assert centred.advantages[:, -1].tolist() == [-1.0, -15.0, 1.0, 15.0]


def test_equal_rewards_and_lone_sequences_give_zero() -> None:
    rewards, mask = outcome(0.1, 0.1, 0.1, 5.0)
    result = outcome_advantages(rewards, ["a", "a", "a", "b"], mask)
    assert torch.count_nonzero(result.advantages) == 0
    assert (result.scores.zero_std_groups, result.scores.single_groups) == (1, 1)


def test_sequences_without_a_token_or_a_score_are_in_no_mean() -> None:
    rewards, mask = outcome(1.0, 3.0, float("nan"), 100.0)
    mask[3] = False
    valid = torch.tensor([True, True, False, True])
    result = outcome_advantages(rewards, ["a"] * 4, mask, valid=valid)
    pair = outcome_advantages(rewards[:2], ["a"] * 2, mask[:2])
    assert torch.equal(result.advantages[:2], pair.advantages)
    assert torch.count_nonzero(result.advantages[2:]) == 0
    assert result.scores.unscored == 2


@pytest.mark.parametrize("junk", [1e6, float("nan"), float("inf")])
def test_masked_tokens_have_no_influence_on_outcomes(junk: float) -> None:
    rewards, _ = batch()
    clean = outcome_advantages(rewards, ["a"] * 3, MASK)
    dirty = outcome_advantages(rewards.masked_fill(~MASK, junk), ["a"] * 3, MASK)
    assert torch.equal(dirty.advantages, clean.advantages)
    assert torch.count_nonzero(clean.advantages[~MASK]) == 0
    assert torch.count_nonzero(clean.advantages[MASK]) == int(MASK.sum())


def test_outcome_mistakes_are_named() -> None:
    rewards, mask = outcome(1.0, 2.0)
    with pytest.raises(ValueError, match="1 ids"):
        outcome_advantages(rewards, ["a"], mask)
    with pytest.raises(ValueError, match="all zero"):
        outcome_advantages(rewards, ["a", "a"], torch.zeros_like(mask))
    with pytest.raises(ValueError, match=r"valid must be bool \(2,\)"):
        outcome_advantages(rewards, ["a", "a"], mask, valid=torch.ones(2))
    with pytest.raises(ValueError, match="rewards must be float"):
        outcome_advantages(rewards[0], ["a", "a"], mask)
