"""Losses of language policies and critics: token losses under a mask, over a global denominator.

A loss is a sum divided by how many tokens or sequences the whole optimizer step has, so that its
gradient is the same however the step was cut into micro-batches and ranks: add up
`loss_denominator` over all of them first, and give each loss that total. A sequence must not be cut.
Letters: B sequences, L token positions; r is a token's probability ratio, A its advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from omni_core.language_options import Aggregation as Aggregation
from omni_core.language_options import PolicyForm as PolicyForm
from omni_core.language_options import PPOLossOptions as PPOLossOptions
from omni_core.language_options import ValueLossOptions as ValueLossOptions
from omni_core.language_tokens import masked_tokens
from omni_core.metrics import Moments

LOG_RATIO_BOUND = 20.0
"""Token log-ratios are held within +- this (no gradient beyond), so that r stays finite."""
SEQUENCE_LOG_RATIO_BOUND = 10.0
"""The same for the sequence log-ratio of `gspo`, from above."""


@attrs.frozen(kw_only=True, eq=False)
class LanguageLoss:
    """A loss of one micro-batch."""

    loss: Tensor
    """Scalar with graph, to be minimised; losses over one global denominator are added up."""
    metrics: Mapping[str, Moments]
    """Over the micro-batch's tokens, without graph; moments of several micro-batches are added up."""


def loss_denominator(aggregation: Aggregation, mask: Tensor) -> int:
    """Count what a mean is over: the tokens, or the sequences that have a token.

    Args:
        aggregation: `PPOLossOptions.effective_aggregation` or another loss's own.
        mask: bool [B, L].

    Raises:
        ValueError: a mask that is not bool [B, L].
    """
    masked_tokens(mask)
    counted = mask if Aggregation.parse(aggregation) is Aggregation.TOKEN_MEAN else mask.any(dim=1)
    return int(counted.sum())


def ppo_loss(
    config: PPOLossOptions,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float | None = None,
) -> LanguageLoss:
    """Policy-gradient loss of a batch of token sequences, in the form that the config names.

    Args:
        config: The form, its clips and its aggregation.
        log_probs: float [B, L], of the sampled tokens under the trained policy; differentiable.
        old_log_probs: float [B, L], under the policy that sampled (`gpg` uses them for metrics only).
        advantages: float [B, L]. `geo_mean` takes their mean over a sequence.
        mask: bool [B, L], True for the tokens that count.
        denominator: `loss_denominator` of the whole optimizer step; None means that this batch is all
            of it. With it, a batch without any token has loss 0.

    Returns:
        The loss, and metrics over the tokens: `ppo_kl` (old - new), and for forms with a ratio
        `ratio`, `pg_clipfrac` (ratio outside the clip), `pg_clipfrac_higher`, `pg_clipfrac_lower`;
        for `vanilla` also `pg_clipfrac_dual` (held by the dual clip).

    Raises:
        ValueError: shapes or types that differ, an all-zero mask without a denominator, or a
            denominator that is not above 0.
    """
    new, old, advantages = masked_tokens(
        mask,
        log_probs=log_probs,
        old_log_probs=old_log_probs.detach(),
        advantages=advantages.detach(),
    )
    inputs = _PolicyInputs(
        log_probs=new, log_ratio=new - old, advantages=advantages, lengths=_lengths(mask)
    )
    losses, metrics = _FORMS[config.form](config, inputs)
    return _reduced(
        losses,
        {"ppo_kl": -inputs.log_ratio, **metrics},
        mask,
        config.effective_aggregation,
        denominator,
    )


def value_loss(
    config: ValueLossOptions,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    denominator: float | None = None,
) -> LanguageLoss:
    """Critic loss: 0.5 max((V - R)^2, (clip(V, V_old +- c) - R)^2) (arXiv 1707.06347's code).

    Args:
        config: The clip and the aggregation.
        values: float [B, L], of the trained critic; differentiable.
        old_values: float [B, L], that the advantages were made with.
        returns: float [B, L].
        mask: bool [B, L].
        denominator: as in `ppo_loss`.

    Returns:
        The loss, and metrics over the tokens: `value`, and `vf_clipfrac` (the clipped square is the
        greater).

    Raises:
        ValueError: as `ppo_loss`.
    """
    values, old_values, returns = masked_tokens(
        mask, values=values, old_values=old_values.detach(), returns=returns.detach()
    )
    squares = (values - returns).square()
    clipfrac = torch.zeros_like(squares)
    if config.clip_range is not None:
        low, high = old_values - config.clip_range, old_values + config.clip_range
        clipped = (values.clamp(low, high) - returns).square()
        clipfrac = clipped > squares
        squares = torch.maximum(squares, clipped)
    metrics = {"value": values, "vf_clipfrac": clipfrac}
    return _reduced(0.5 * squares, metrics, mask, config.aggregation, denominator)


def sft_loss(log_probs: Tensor, mask: Tensor, *, denominator: float | None = None) -> LanguageLoss:
    """Supervised loss: the token mean of -log p.

    Args:
        log_probs: float [B, L], of the target tokens; differentiable.
        mask: bool [B, L].
        denominator: as in `ppo_loss`; tokens.

    Returns:
        The loss, and the metric `log_prob` over the tokens.

    Raises:
        ValueError: as `ppo_loss`.
    """
    (log_probs,) = masked_tokens(mask, log_probs=log_probs)
    metrics = {"log_prob": log_probs}
    return _reduced(-log_probs, metrics, mask, Aggregation.TOKEN_MEAN, denominator)


def _reduced(
    losses: Tensor,
    metrics: Mapping[str, Tensor],
    mask: Tensor,
    aggregation: Aggregation,
    denominator: float | None,
) -> LanguageLoss:
    """Token losses and metrics [B, L] to a loss and moments."""
    if denominator is None:
        denominator = loss_denominator(aggregation, mask)
        if not denominator:
            raise ValueError(
                f"the mask {tuple(mask.shape)} is all zero: a loss needs a token, or the denominator of "
                "the whole step"
            )
    if not 0.0 < denominator < math.inf:
        raise ValueError(f"denominator must be a finite number above 0, got {denominator}")
    per_sequence = losses.masked_fill(~mask, 0.0).sum(dim=1)
    if aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        per_sequence = per_sequence / _lengths(mask).squeeze(1)
    return LanguageLoss(
        loss=per_sequence.sum() / denominator,
        metrics={name: Moments.of(value, mask) for name, value in metrics.items()},
    )


def _lengths(mask: Tensor) -> Tensor:
    """[B, 1]: tokens of each sequence; 1 where there is none, to divide by."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


# -- forms ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class _PolicyInputs:
    """What a form computes with: [B, L], 0 where masked; `lengths` is [B, 1]."""

    log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    lengths: Tensor

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[B, 1]: mean over a sequence's tokens, of values that are 0 where masked."""
        return values.sum(dim=1, keepdim=True) / self.lengths


_Form = Callable[[PPOLossOptions, _PolicyInputs], tuple[Tensor, dict[str, Tensor]]]
"""Token losses [B, L], and metrics [B, L] by name."""


def _vanilla(config: PPOLossOptions, inputs: _PolicyInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r)), and at most -A c where A < 0."""
    ratio = _bounded(inputs.log_ratio).exp()
    losses = _clipped(config, ratio, inputs.advantages)
    metrics = _ratio_metrics(config, ratio)
    if config.dual_clip is not None:
        most = -inputs.advantages * config.dual_clip
        held = (inputs.advantages < 0) & (losses > most)
        losses = torch.where(held, most, losses)
        metrics["pg_clipfrac_dual"] = held
    return losses, metrics


def _gspo(config: PPOLossOptions, inputs: _PolicyInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The clip on s = exp(mean log r): every token's value is s, its gradient s grad(log p)."""
    sequence = inputs.sequence_mean(inputs.log_ratio).detach()
    own = inputs.log_probs - inputs.log_probs.detach()
    ratio = (own + sequence).clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()
    return _clipped(config, ratio, inputs.advantages), _ratio_metrics(config, ratio)


def _gpg(_: PPOLossOptions, inputs: _PolicyInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p."""
    return -inputs.advantages * inputs.log_probs, {}


def _geo_mean(config: PPOLossOptions, inputs: _PolicyInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-mean(A) exp(mean l), l the smaller (by A's sign) of log r and clip(log r): per sequence."""
    sign = inputs.advantages.sign()
    log_ratio = _bounded(inputs.log_ratio)
    clipped = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    smaller = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = inputs.sequence_mean(smaller).exp()
    losses = -inputs.sequence_mean(inputs.advantages) * ratio
    higher, lower = log_ratio > config.clip_ratio_high, log_ratio < -config.clip_ratio_low
    return losses.expand_as(log_ratio), {
        "ratio": ratio.expand_as(log_ratio),
        "pg_clipfrac": higher | lower,
        "pg_clipfrac_higher": higher,
        "pg_clipfrac_lower": lower,
    }


def _cispo(config: PPOLossOptions, inputs: _PolicyInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r)) A log p."""
    ratio = _bounded(inputs.log_ratio).exp().detach()
    clipped = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    losses = -clipped * inputs.advantages * inputs.log_probs
    return losses, _ratio_metrics(config, ratio)


_FORMS: dict[PolicyForm, _Form] = {
    PolicyForm.VANILLA: _vanilla,
    PolicyForm.GSPO: _gspo,
    PolicyForm.GPG: _gpg,
    PolicyForm.GEO_MEAN: _geo_mean,
    PolicyForm.CISPO: _cispo,
}


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _clipped(config: PPOLossOptions, ratio: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clip: max(-A r, -A clip(r, 1 - low, 1 + high))."""
    clipped = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def _ratio_metrics(config: PPOLossOptions, ratio: Tensor) -> dict[str, Tensor]:
    higher, lower = ratio > 1.0 + config.clip_ratio_high, ratio < 1.0 - config.clip_ratio_low
    return {
        "ratio": ratio,
        "pg_clipfrac": higher | lower,
        "pg_clipfrac_higher": higher,
        "pg_clipfrac_lower": lower,
    }
