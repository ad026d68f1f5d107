"""Weights of a rollout that another policy sampled; the published vectors are in test_golden."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_core.choices import ImportanceLevel, RejectionStatistic
from omni_core.config import structure
from omni_core.rollout_correction import RolloutWeights, rollout_correction
from omni_core.rollout_correction_options import RolloutCorrectionOptions

D = torch.tensor([[0.5, -0.5, 1.0], [0.01, 0.02, -0.01]], dtype=torch.float64)
ZERO = torch.zeros_like(D)


def corrected(floor: Tensor | None = None, *, d: Tensor = D, **options: Any) -> RolloutWeights:
    return rollout_correction(
        RolloutCorrectionOptions(**options), d, torch.zeros_like(d), floor=floor
    )


def test_without_options_nothing_changes() -> None:
    found = corrected()
    assert found.weights.tolist() == [[1.0] * 3] * 2
    assert found.kept.all()
    assert torch.equal(found.log_ratio, D)


def test_a_step_or_a_sample_weighs_its_ratio_up_to_the_threshold() -> None:
    token = corrected(importance=ImportanceLevel.TOKEN).weights
    torch.testing.assert_close(token, D.exp().clamp_max(2.0))
    assert token[0, 2] == 2.0
    sequence = corrected(importance=ImportanceLevel.SEQUENCE, importance_threshold=3.0).weights
    expected = D.sum(1, keepdim=True).exp().clamp_max(3.0).expand_as(D)
    torch.testing.assert_close(sequence, expected)
    huge = corrected(d=torch.full((1, 3), 1e4), importance=ImportanceLevel.SEQUENCE)
    assert huge.weights.tolist() == [[2.0] * 3]
    assert huge.log_ratio.max() == 20.0


def by_hand(statistic: RejectionStatistic, low: float, high: float) -> list[list[bool]]:
    estimators = {"k1": -D, "k2": D.square() / 2, "k3": D.exp() - 1 - D}
    values = estimators[statistic.estimator]
    reduce = {"seq_sum": values.sum(1), "seq_mean": values.mean(1), "seq_max": values.amax(1)}
    if statistic.over != "token":
        values = reduce[statistic.over][:, None].expand(2, 3)
    two_sided = statistic.estimator == "k1"
    lower = math.log(low) if two_sided else -math.inf
    upper = math.log(high) if two_sided else high
    return ((values >= lower) & (values <= upper)).tolist()


@pytest.mark.parametrize(
    "statistic", [each for each in RejectionStatistic if each is not RejectionStatistic.Z_K1]
)
def test_each_statistic_rejects_what_leaves_its_band(statistic: RejectionStatistic) -> None:
    bands = ((0.9, 1.1), (0.5, 2.0), (0.1, 0.2), (0.01, 3.0))
    seen = set()
    for band in bands:
        found = corrected(rejection=statistic, band=band)
        assert found.kept.tolist() == by_hand(statistic, *band)
        assert torch.equal(found.weights, found.kept.double())
        seen.add(str(found.kept.tolist()))
    assert len(seen) > 1


def test_one_bound_means_its_inverse_below() -> None:
    options = RolloutCorrectionOptions(rejection=RejectionStatistic.TOKEN_K1, band=(1.25,))
    assert (options.low, options.high) == (0.8, 1.25)
    assert RolloutCorrectionOptions(band=(2.0,)).low == 0.5
    k3 = RolloutCorrectionOptions(rejection=RejectionStatistic.SEQ_MEAN_K3, band=(0.05,))
    assert k3.high == 0.05
    read = structure(
        {"importance": "token", "rejection": "z_k1", "band": [3]}, RolloutCorrectionOptions
    )
    assert read.rejection is RejectionStatistic.Z_K1
    assert read.band == (3.0,)


def test_z_is_measured_in_units_of_each_steps_floor() -> None:
    floor = torch.tensor([1.0, 0.1, 0.3])
    found = corrected(floor, rejection=RejectionStatistic.Z_K1, band=(4.0,))
    assert found.kept.tolist() == [[True, False, True], [True, True, True]]
    # The language models' band rejects nothing of this scale; the floor's does.
    small = 1e-5 * D
    plain = corrected(d=small, rejection=RejectionStatistic.TOKEN_K1)
    scaled = corrected(1e-5 * floor, d=small, rejection=RejectionStatistic.Z_K1, band=(4.0,))
    assert plain.kept.all()
    assert torch.equal(scaled.kept, found.kept)
    for missing in (None, torch.zeros(3)):
        with pytest.raises(ValueError, match="noise floor"):
            corrected(missing, rejection=RejectionStatistic.Z_K1)


def test_a_rejected_step_weighs_nothing_and_stays() -> None:
    found = corrected(
        importance=ImportanceLevel.TOKEN, rejection=RejectionStatistic.TOKEN_K2, band=(0.1,)
    )
    assert found.kept.tolist() == [[False] * 3, [True] * 3]
    assert found.weights[0].tolist() == [0.0] * 3
    torch.testing.assert_close(found.weights[1], D[1].exp())
    assert found.weights.shape == D.shape
    assert not found.weights.requires_grad


@pytest.mark.parametrize("band", [(), (1.0, 2.0, 3.0), (0.0,), (-1.0, 2.0), (2.0, 0.5), (0.5,)])
def test_a_band_that_is_none_is_refused(band: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        RolloutCorrectionOptions(band=band, rejection=RejectionStatistic.TOKEN_K1)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[B, W\] alike"):
        rollout_correction(RolloutCorrectionOptions(), D, ZERO[:, :2])
