"""Advantages of language policies, for the whole batch at once: they whiten or compare over it.

Make them before the batch is cut into micro-batches. Letters: B sequences, L token positions.
Sources: GAE arXiv 1506.02438; GRPO outcome supervision arXiv 2402.03300.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs
import torch
from torch import Tensor

from omni_core.advantages import AdvantageStd, GroupAdvantages, group_advantages
from omni_core.language_tokens import masked_tokens

WHITEN_EPS = 1e-8
"""Added to the variance that advantages are whitened by."""


@attrs.frozen(kw_only=True, eq=False)
class TokenAdvantages:
    """Advantages and critic targets of a batch, without graph, float64 where an input is, else float32."""

    advantages: Tensor
    """[B, L], whitened over the mask where that was asked. A masked position repeats what the next
    token has (the end of the sequence: 0 before whitening), as published; losses do not read it."""
    returns: Tensor
    """[B, L]: the advantage before whitening plus the value; what a critic learns."""


@attrs.frozen(kw_only=True, eq=False)
class OutcomeAdvantages:
    """Advantages of a batch whose sequences have one score each."""

    advantages: Tensor
    """[B, L]: the sequence's advantage at each of its tokens, 0 where masked."""
    scores: GroupAdvantages
    """[B], with the counts of groups and rows that were left out."""


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    whiten: bool = True,
) -> TokenAdvantages:
    """Generalised advantage estimation: A_t = d_t + gamma lam A_(t+1), d_t = r_t + gamma V_(t+1) - V_t.

    A masked position inside a sequence is passed over: t+1 is the next token under the mask. After the
    last token V and A are 0. Computed in float64.

    Args:
        rewards: float [B, L], per token.
        values: float [B, L], of the critic.
        mask: bool [B, L], True for the tokens that the policy wrote.
        gamma: discount, in [0, 1].
        lam: decay of the trace, in [0, 1].
        whiten: to mean 0 and variance 1 (ddof 1) over all tokens under the mask.

    Raises:
        ValueError: shapes or types that differ, an all-zero mask, one token to whiten, or gamma or lam
            out of range.
    """
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gamma {gamma} and lam {lam} must be in [0, 1]")
    given_values = values.detach()
    rewards, values = masked_tokens(mask, rewards=rewards.detach(), values=given_values)
    count = int(mask.sum())
    if count < (2 if whiten else 1):
        raise ValueError(
            f"the mask {tuple(mask.shape)} has {count} tokens: "
            f"{'whitening needs two' if count else 'it is all zero'}"
        )
    dtype = rewards.dtype
    advantages = _traces(rewards.double(), values.double(), mask, gamma, lam)
    returns = advantages + given_values.double()
    if whiten:
        tokens = advantages[mask]
        advantages = (advantages - tokens.mean()) / (tokens.var(correction=1) + WHITEN_EPS).sqrt()
    return TokenAdvantages(advantages=advantages.to(dtype), returns=returns.to(dtype))


def _traces(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """[B, L]: the recursion, from the last position to the first."""
    trace = rewards.new_zeros(rewards.shape[0])
    next_value = torch.zeros_like(trace)
    traces = torch.empty_like(rewards)
    for at in reversed(range(rewards.shape[1])):
        delta = rewards[:, at] + gamma * next_value - values[:, at]
        trace = torch.where(mask[:, at], delta + gamma * lam * trace, trace)
        next_value = torch.where(mask[:, at], values[:, at], next_value)
        traces[:, at] = trace
    return traces


def outcome_advantages(
    rewards: Tensor,
    group_ids: Sequence[Hashable],
    mask: Tensor,
    *,
    valid: Tensor | None = None,
    std: AdvantageStd = AdvantageStd.GROUP,
    eps: float = 1e-6,
) -> OutcomeAdvantages:
    """GRPO: a sequence's score against its group's mean, over the group's std (ddof 1), at each token.

    Args:
        rewards: float [B, L]; a sequence's score is their sum under the mask.
        group_ids: one per sequence; ids make groups, not prompt texts.
        mask: bool [B, L].
        valid: bool [B], False where a sequence was not scored; None means that all were. One without a
            token never is.
        std: what to divide by; `none` for the centred score (Dr. GRPO, arXiv 2503.20783).
        eps: added to the std.

    Raises:
        ValueError: shapes or types that differ, an all-zero mask, or as `group_advantages`.
    """
    (rewards,) = masked_tokens(mask, rewards=rewards.detach())
    written = mask.any(dim=1)
    if not bool(written.any()):
        raise ValueError(f"the mask {tuple(mask.shape)} is all zero: there is no token to credit")
    if valid is not None and (valid.dtype != torch.bool or valid.shape != written.shape):
        raise ValueError(
            f"valid must be bool {tuple(written.shape)}, got {valid.dtype} {tuple(valid.shape)}"
        )
    scores = group_advantages(
        rewards.double().sum(dim=1),
        group_ids,
        valid=written if valid is None else written & valid,
        std=std,
        ddof=1,
        eps=eps,
        clip=None,
    )
    advantages = scores.advantages.to(rewards.dtype).unsqueeze(1) * mask
    return OutcomeAdvantages(advantages=advantages, scores=scores)
