"""Language-policy losses: closed forms, finite differences, masks, and the cut of a batch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omni_core import config as configs
from omni_core.language_loss import (
    LanguageLoss,
    loss_denominator,
    ppo_loss,
    sft_loss,
    value_loss,
)
from omni_core.language_options import (
    Aggregation,
    PolicyForm,
    PPOLossOptions,
    ValueLossOptions,
)
from omni_core.metrics import merge

MASK = torch.tensor(
    [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 1],
        [0, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
    ],
    dtype=torch.bool,
)
TOKENS = 15
SEQUENCES = 4

Batch = tuple[Tensor, Tensor, Tensor]


def batch(*, spread: float = 0.3, rows: int = 4, per_token: bool = True) -> Batch:
    """float64 new and old log-probs, and advantages of both signs."""
    generator = torch.Generator().manual_seed(3)
    shape = (rows, MASK.shape[1])
    old = -1.0 + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    new = old + spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    width = shape[1] if per_token else 1
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return new, old, advantages.expand(shape).contiguous()


def gradient(loss: Callable[[Tensor], LanguageLoss], at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf).loss, leaf)
    return grad


# -- values ---------------------------------------------------------------------------------------


def one_token(form: PolicyForm, log_ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and gradient of one token whose old log-prob is -1."""
    config = PPOLossOptions(form=form)
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)

    def loss(new: Tensor) -> LanguageLoss:
        return ppo_loss(config, new, old, torch.full_like(old, advantage), mask)

    new = old + log_ratio
    return float(loss(new).loss), float(gradient(loss, new))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "value", "grad"),
    [
        (0.1, 2.0, -2.0 * math.exp(0.1), -2.0 * math.exp(0.1)),
        (0.5, 2.0, -2.4, 0.0),
        (-0.5, 2.0, -2.0 * math.exp(-0.5), -2.0 * math.exp(-0.5)),
        (-0.5, -2.0, 1.6, 0.0),
        (1.0, -2.0, 2.0 * math.e, 2.0 * math.e),
        (2.0, -2.0, 6.0, 0.0),  # e^2 > 3: the dual clip holds it
        (2.0, 2.0, -2.4, 0.0),
    ],
)
def test_vanilla_is_ppo_with_the_dual_clip(
    log_ratio: float, advantage: float, value: float, grad: float
) -> None:
    assert one_token(PolicyForm.VANILLA, log_ratio, advantage) == pytest.approx((value, grad))


def test_without_dual_clip_a_bad_token_has_no_upper_bound() -> None:
    one = torch.ones(1, 1, dtype=torch.bool)
    old = torch.tensor([[-1.0]])
    config = PPOLossOptions(dual_clip=None)
    result = ppo_loss(config, old + 2.0, old, torch.tensor([[-2.0]]), one)
    assert float(result.loss) == pytest.approx(2.0 * math.exp(2.0))
    assert "pg_clipfrac_dual" not in result.metrics


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", [-3.0, 0.05, 3.0])
def test_gpg_and_cispo_weigh_log_p(log_ratio: float, advantage: float) -> None:
    log_p = -1.0 + log_ratio
    assert one_token(PolicyForm.GPG, log_ratio, advantage) == pytest.approx(
        (-advantage * log_p, -advantage)
    )
    weight = min(max(math.exp(log_ratio), 0.8), 1.2)
    # A token outside the clip still learns.
    assert one_token(PolicyForm.CISPO, log_ratio, advantage) == pytest.approx(
        (-weight * advantage * log_p, -weight * advantage)
    )


def test_gspo_clips_whole_sequences() -> None:
    # Mean log-ratios 0.1 (inside) and 0.5 (beyond), though single tokens are on the other side.
    log_ratio = torch.tensor([[0.6, -0.4], [0.1, 0.9]], dtype=torch.float64)
    old = torch.full_like(log_ratio, -2.0)
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages = torch.ones_like(old)

    def loss(new: Tensor) -> LanguageLoss:
        return ppo_loss(PPOLossOptions(form=PolicyForm.GSPO), new, old, advantages, mask)

    inside = math.exp(0.1)
    result = loss(old + log_ratio)
    assert float(result.loss) == pytest.approx(-(inside + 1.2) / 2)
    assert result.metrics["pg_clipfrac_higher"].mean == 0.5
    grad = gradient(loss, old + log_ratio)
    # d/d(log p) of exp(mean log r) is exp(mean) / length, then the mean over two sequences.
    assert grad.flatten().tolist() == pytest.approx([-inside / 4, -inside / 4, 0.0, 0.0])


def test_geo_mean_clips_tokens_and_multiplies_them() -> None:
    log_ratio = torch.tensor([[0.6, -0.4], [0.1, -0.9]], dtype=torch.float64)
    old = torch.full_like(log_ratio, -2.0)
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages = torch.tensor([[1.0, 1.0], [-2.0, -2.0]], dtype=torch.float64)

    def loss(new: Tensor) -> LanguageLoss:
        return ppo_loss(PPOLossOptions(form=PolicyForm.GEO_MEAN), new, old, advantages, mask)

    first, second = math.exp((0.2 - 0.4) / 2), math.exp((0.1 - 0.2) / 2)
    assert float(loss(old + log_ratio).loss) == pytest.approx((-first + 2.0 * second) / 2)
    grad = gradient(loss, old + log_ratio)
    assert grad.flatten().tolist() == pytest.approx([0.0, -first / 4, second / 2, 0.0])


def test_value_loss_takes_the_greater_square() -> None:
    old = torch.zeros(1, 4, dtype=torch.float64)
    values = torch.tensor([[0.1, 2.0, 2.0, -2.0]], dtype=torch.float64)
    returns = torch.tensor([[1.0, 1.0, 3.0, 1.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)

    def loss(new: Tensor) -> LanguageLoss:
        return value_loss(ValueLossOptions(clip_range=0.5), new, old, returns, mask)

    # Clipped values are 0.1, 0.5, 0.5, -0.5; token 1's and 3's own squares are the greater.
    squares = [0.81, 1.0, 6.25, 9.0]
    assert float(loss(values).loss) == pytest.approx(0.5 * sum(squares) / 4)
    assert gradient(loss, values).flatten().tolist() == pytest.approx([-0.225, 0.25, 0.0, -0.75])
    assert loss(values).metrics["vf_clipfrac"].mean == 0.25
    plain = value_loss(ValueLossOptions(clip_range=None), values, old, returns, mask)
    assert float(plain.loss) == pytest.approx(0.5 * (0.81 + 1.0 + 1.0 + 9.0) / 4)


def test_sft_loss_is_the_token_mean() -> None:
    new, _, _ = batch()
    result = sft_loss(new, MASK)
    assert float(result.loss) == pytest.approx(-float(new[MASK].sum()) / TOKENS)
    assert torch.equal(gradient(lambda at: sft_loss(at, MASK), new), -MASK.double() / TOKENS)
    assert result.metrics["log_prob"].mean == pytest.approx(-float(result.loss))


def test_aggregations_weigh_tokens_or_sequences() -> None:
    new, old, advantages = batch()
    for aggregation in Aggregation:
        config = PPOLossOptions(form=PolicyForm.GPG, aggregation=aggregation)
        terms = -advantages * new
        means = [float(row[kept].mean()) for row, kept in zip(terms, MASK, strict=True)]
        expected = {
            Aggregation.TOKEN_MEAN: float(terms[MASK].mean()),
            Aggregation.SEQ_MEAN_TOKEN_MEAN: sum(means) / SEQUENCES,
        }[aggregation]
        assert float(ppo_loss(config, new, old, advantages, MASK).loss) == pytest.approx(expected)


def test_on_policy_every_form_has_the_same_direction() -> None:
    _, old, advantages = batch(per_token=False)
    for form in PolicyForm:
        config = PPOLossOptions(form=form, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
        grad = gradient(lambda at, config=config: ppo_loss(config, at, old, advantages, MASK), old)  # type: ignore[misc]
        expected = -advantages * MASK / MASK.sum(1, keepdim=True) / SEQUENCES
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("form", [PolicyForm.VANILLA, PolicyForm.GPG, PolicyForm.GEO_MEAN])
def test_gradients_equal_finite_differences(form: PolicyForm, aggregation: Aggregation) -> None:
    if form is PolicyForm.GEO_MEAN:
        aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    new, old, advantages = batch(spread=1.0)
    config = PPOLossOptions(form=form, aggregation=aggregation)
    result = ppo_loss(config, new, old, advantages, MASK)
    if form is not PolicyForm.GPG:
        # Tokens on both sides of the clip and inside it take part.
        assert result.metrics["pg_clipfrac_lower"].mean > 0.0
        assert result.metrics["pg_clipfrac_higher"].mean > 0.0
        assert result.metrics["pg_clipfrac"].mean < 1.0
    assert torch.autograd.gradcheck(
        lambda at: ppo_loss(config, at, old, advantages, MASK).loss, (new.requires_grad_(),)
    )


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    # With one advantage a sequence the loss is a true function of its ratio.
    new, old, advantages = batch(spread=0.2, per_token=False)
    config = PPOLossOptions(form=PolicyForm.GSPO, clip_ratio_low=0.05, clip_ratio_high=0.05)
    result = ppo_loss(config, new, old, advantages, MASK)
    assert 0.0 < result.metrics["pg_clipfrac"].mean < 1.0
    grad = gradient(lambda at: ppo_loss(config, at, old, advantages, MASK), new)
    step = 1e-6
    for row, column in MASK.nonzero().tolist():
        moved = torch.zeros_like(new)
        moved[row, column] = step
        up, down = (
            ppo_loss(config, new + sign * moved, old, advantages, MASK).loss for sign in (1, -1)
        )
        assert float(grad[row, column]) == pytest.approx(float(up - down) / (2 * step), abs=1e-8)


def test_cispo_gradient_holds_the_clipped_ratio_still() -> None:
    new, old, advantages = batch(spread=1.0)
    config = PPOLossOptions(form=PolicyForm.CISPO)
    grad = gradient(lambda at: ppo_loss(config, at, old, advantages, MASK), new)
    weight = (new - old).exp().clamp(0.8, 1.2)
    torch.testing.assert_close(grad, -weight * advantages * MASK / TOKENS)


@pytest.mark.parametrize("clip_range", [0.5, None])
def test_value_gradients_equal_finite_differences(clip_range: float | None) -> None:
    values, old, returns = batch(spread=1.0)
    config = ValueLossOptions(clip_range=clip_range)
    assert torch.autograd.gradcheck(
        lambda at: value_loss(config, at, old, returns, MASK).loss, (values.requires_grad_(),)
    )


# -- masks and cuts -------------------------------------------------------------------------------


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, float | None], LanguageLoss]


def of_form(form: PolicyForm) -> Loss:
    config = PPOLossOptions(form=form)
    return lambda new, old, third, mask, denominator: ppo_loss(
        config, new, old, third, mask, denominator=denominator
    )


LOSSES: dict[str, Loss] = {
    **{str(form): of_form(form) for form in PolicyForm},
    "value": lambda new, old, third, mask, denominator: value_loss(
        ValueLossOptions(), new, old, third, mask, denominator=denominator
    ),
    "sft": lambda new, _old, _third, mask, denominator: sft_loss(
        new, mask, denominator=denominator
    ),
}
"""Every loss as one of (new, old, advantages or returns, mask, denominator)."""


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [0.0, 1e4, float("nan"), float("inf")])
def test_masked_tokens_have_no_influence(name: str, junk: float) -> None:
    given = batch()
    clean = LOSSES[name](*given, MASK, None)
    new, old, third = (value.masked_fill(~MASK, junk) for value in given)
    dirty = LOSSES[name](new, old, third, MASK, None)
    assert torch.equal(dirty.loss, clean.loss)
    assert dirty.metrics == clean.metrics
    grad = gradient(lambda at: LOSSES[name](at, old, third, MASK, None), new)
    clean_grad = gradient(lambda at: LOSSES[name](at, *given[1:], MASK, None), given[0])
    assert torch.equal(grad, clean_grad)
    assert torch.count_nonzero(grad[~MASK]) == 0
    assert torch.count_nonzero(grad[MASK]) > 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_do_not_depend_on_how_the_batch_is_cut(name: str, size: int) -> None:
    new, old, third = batch()
    sequences = name in ("gspo", "geo_mean")
    aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN if sequences else Aggregation.TOKEN_MEAN
    # A fifth sequence without a token (padding of a rank) changes nothing.
    mask = torch.cat([MASK, torch.zeros(1, 6, dtype=torch.bool)])
    new, old, third = (torch.cat([value, value[:1]]) for value in (new, old, third))
    cuts = [slice(at, at + size) for at in range(0, 5, size)]
    denominator = sum(loss_denominator(aggregation, mask[cut]) for cut in cuts)
    assert denominator == (SEQUENCES if sequences else TOKENS)

    whole = LOSSES[name](new, old, third, mask, None)
    parts = [
        LOSSES[name](new[cut], old[cut], third[cut], mask[cut], float(denominator)) for cut in cuts
    ]
    total = sum(float(part.loss) for part in parts)
    assert total == pytest.approx(float(whole.loss), rel=1e-12)
    merged = merge(part.metrics for part in parts)
    for metric, moments in whole.metrics.items():
        assert merged[metric].count == moments.count == TOKENS
        assert merged[metric].mean == pytest.approx(moments.mean, rel=1e-12)

    grad = gradient(lambda at: LOSSES[name](at, old, third, mask, None), new)
    pieces = [
        gradient(
            lambda at, cut=cut: LOSSES[name](at, old[cut], third[cut], mask[cut], denominator),  # type: ignore[misc]
            new[cut],
        )
        for cut in cuts
    ]
    torch.testing.assert_close(torch.cat(pieces), grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_out_of_range_leaves_the_gradient_finite(name: str) -> None:
    old = torch.full((2, 3), -300.0)
    mask = torch.ones(2, 3, dtype=torch.bool)
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    grad = gradient(lambda at: LOSSES[name](at, old, advantages, mask, None), torch.zeros(2, 3))
    assert bool(grad.isfinite().all())


def test_half_precision_is_computed_in_float32() -> None:
    new, old, advantages = (value.bfloat16() for value in batch())
    result = ppo_loss(PPOLossOptions(), new, old, advantages, MASK)
    exact = ppo_loss(PPOLossOptions(), new.float(), old.float(), advantages.float(), MASK)
    assert result.loss.dtype == torch.float32
    assert torch.equal(result.loss, exact.loss)


def test_old_policy_and_advantages_get_no_gradient() -> None:
    new, old, advantages = (value.requires_grad_() for value in batch())
    loss = ppo_loss(PPOLossOptions(), new, old, advantages, MASK).loss
    of_new, of_old, of_advantages = torch.autograd.grad(
        loss, (new, old, advantages), allow_unused=True
    )
    assert of_new is not None
    assert of_old is None
    assert of_advantages is None


# -- mistakes and options -------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_an_all_zero_mask_needs_the_denominator_of_the_whole_step(name: str) -> None:
    given = batch()
    nothing = torch.zeros_like(MASK)
    with pytest.raises(ValueError, match=r"mask \(4, 6\) is all zero"):
        LOSSES[name](*given, nothing, None)
    share = LOSSES[name](*given, nothing, 7.0)
    assert float(share.loss) == 0.0
    assert all(moments.count == 0 for moments in share.metrics.values())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan"), float("inf")])
def test_a_denominator_is_a_finite_number_above_zero(name: str, denominator: float) -> None:
    with pytest.raises(ValueError, match="denominator must be a finite number above 0"):
        LOSSES[name](*batch(), MASK, denominator)


def test_wrong_shapes_and_types_are_named() -> None:
    new, old, advantages = batch()
    config = PPOLossOptions()
    with pytest.raises(ValueError, match=r"old_log_probs must be float \(4, 6\).*\(4, 5\)"):
        ppo_loss(config, new, old[:, :5], advantages, MASK)
    with pytest.raises(ValueError, match=r"advantages must be float \(4, 6\).*\(4, 1\)"):
        ppo_loss(config, new, old, advantages[:, :1], MASK)
    with pytest.raises(ValueError, match=r"log_probs must be .*int64"):
        ppo_loss(config, new.long(), old, advantages, MASK)
    with pytest.raises(ValueError, match=r"mask must be bool \[B, L\], got torch.float32 \(4, 6\)"):
        ppo_loss(config, new, old, advantages, MASK.float())
    with pytest.raises(ValueError, match=r"mask must be bool \[B, L\], got torch.bool \(6,\)"):
        sft_loss(new[0], MASK[0])
    with pytest.raises(ValueError, match="returns must be"):
        value_loss(ValueLossOptions(), new, old, advantages[0], MASK)
    with pytest.raises(ValueError, match="mask must be bool"):
        loss_denominator(Aggregation.TOKEN_MEAN, MASK.long())


def test_options_are_checked() -> None:
    with pytest.raises(
        ValueError, match="unknown PolicyForm 'reinforce'; known are: vanilla, gspo"
    ):
        PPOLossOptions(form="reinforce")
    with pytest.raises(ValueError, match="'geo_mean' has one term a sequence"):
        PPOLossOptions(form=PolicyForm.GEO_MEAN, aggregation=Aggregation.TOKEN_MEAN)
    mistakes: list[dict[str, float]] = [
        {"clip_ratio_low": 0.0},
        {"clip_ratio_high": -1.0},
        {"dual_clip": 1.0},
    ]
    for mistake in mistakes:
        with pytest.raises(ValueError, match=next(iter(mistake))):
            PPOLossOptions(**mistake)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip_range"):
        ValueLossOptions(clip_range=0.0)


def test_options_come_from_a_config() -> None:
    raw = {"form": "cispo", "clip_ratio_high": 0.28, "aggregation": "seq-mean-token-mean"}
    options = configs.structure(raw, PPOLossOptions)
    assert options == PPOLossOptions(
        form=PolicyForm.CISPO,
        clip_ratio_high=0.28,
        aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
    )
    assert configs.structure(configs.unstructure(options), PPOLossOptions) == options


def test_options_need_no_torch() -> None:
    code = "import sys, omni_core; omni_core.PPOLossOptions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
