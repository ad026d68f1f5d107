"""Noised final samples: what is drawn, and that it is a unit's own."""

from __future__ import annotations

import math

import pytest
import torch

from omni_core.choices import SigmaDraw
from omni_core.forward_process import (
    adaptive_error,
    clean_estimate,
    draw_sigmas,
    forward_noise,
    noise_to,
    unit_seed,
    velocity_error,
)
from omni_core.schedule import FlowMatchSchedule

TEN = FlowMatchSchedule.linear(10, shift=3.0)


def drawn(
    draw: SigmaDraw, count: int, *, seed: int = 5, update: int = 0, shift: float = 1.0
) -> torch.Tensor:
    return draw_sigmas(draw, count, seed=seed, update=update, schedule=TEN, shift=shift)


def test_noising_goes_from_the_sample_to_the_noise() -> None:
    clean = {"image": torch.tensor([[1.0, 2.0]] * 3), "audio": torch.tensor([[4.0]] * 3)}
    noise = {"image": torch.tensor([[5.0, -2.0]] * 3), "audio": torch.tensor([[0.0]] * 3)}
    found = noise_to(clean, noise, torch.tensor([0.0, 0.25, 1.0]))
    assert found["image"].tolist() == [[1.0, 2.0], [2.0, 1.0], [5.0, -2.0]]
    assert found["audio"].tolist() == [[4.0], [3.0], [0.0]]


def test_half_precision_is_raised_and_double_kept() -> None:
    clean, noise = {"x": torch.ones(1, 2).bfloat16()}, {"x": torch.zeros(1, 2)}
    assert noise_to(clean, noise, torch.tensor([0.3]))["x"].dtype == torch.float32
    double = {"x": torch.ones(1, 2).double()}
    sigma = torch.tensor([0.1], dtype=torch.float64)
    assert noise_to(double, noise, sigma)["x"].tolist() == [[0.9, 0.9]]


def test_an_error_is_a_mean_over_all_modalities() -> None:
    ours = {"image": torch.ones(1, 3), "audio": torch.zeros(1, 1)}
    theirs = {"image": torch.zeros(1, 3), "audio": torch.zeros(1, 1)}
    assert velocity_error(ours, theirs).tolist() == [0.75]


def test_the_adaptive_weight_brings_errors_to_one_scale() -> None:
    clean = {"x": torch.zeros(2, 4)}
    noised = {"x": torch.tensor([[0.1] * 4, [0.01] * 4])}
    still = {"x": torch.zeros(2, 4)}
    found = adaptive_error(still, noised, clean, torch.full((2,), 0.5))
    torch.testing.assert_close(found, torch.tensor([0.1, 0.01]))
    tiny = adaptive_error(still, {"x": torch.full((2, 4), 1e-7)}, clean, torch.ones(2))
    torch.testing.assert_close(tiny, torch.full((2,), 1e-14 / 1e-5))


def test_sigmas_of_the_schedule_are_its_steps_none_twice() -> None:
    all_of_them = drawn(SigmaDraw.SCHEDULE, 10)
    assert sorted(all_of_them.tolist(), reverse=True) == list(TEN.values()[:-1])
    assert all_of_them.tolist() != sorted(all_of_them.tolist(), reverse=True)
    some = drawn(SigmaDraw.SCHEDULE, 4)
    assert len(set(some.tolist())) == 4
    with pytest.raises(ValueError, match="11 sigmas of a schedule of 10 steps"):
        drawn(SigmaDraw.SCHEDULE, 11)


@pytest.mark.parametrize("draw", [SigmaDraw.UNIFORM, SigmaDraw.LOGIT_NORMAL])
def test_drawn_sigmas_have_their_distribution(draw: SigmaDraw) -> None:
    values = drawn(draw, 4000)
    assert values.dtype == torch.float32
    assert values.min() > 0.0
    assert values.max() <= 1.0
    assert float(values.mean()) == pytest.approx(0.5, abs=0.02)
    # Uniform: 1 / sqrt(12); logit-normal: 0.2083.
    spread = 1.0 / math.sqrt(12.0) if draw is SigmaDraw.UNIFORM else 0.2083
    assert float(values.std()) == pytest.approx(spread, abs=0.01)
    shifted = drawn(draw, 4000, shift=3.0)
    torch.testing.assert_close(shifted, 3.0 * values / (1.0 + 2.0 * values))


def test_what_is_drawn_is_a_units_own() -> None:
    for draw in SigmaDraw:
        first = drawn(draw, 5)
        assert torch.equal(first, drawn(draw, 5))
        assert not torch.equal(first, drawn(draw, 5, seed=6))
        assert not torch.equal(first, drawn(draw, 5, update=1))
    shapes = {"image": (2, 3)}
    noise = forward_noise(5, 0, 0, shapes)["image"]
    assert noise.shape == (1, 2, 3)
    assert torch.equal(noise, forward_noise(5, 0, 0, shapes)["image"])
    others = [forward_noise(*key, shapes)["image"] for key in ((6, 0, 0), (5, 1, 0), (5, 0, 1))]
    assert all(not torch.equal(noise, other) for other in others)
    assert unit_seed([1, 2]) == unit_seed((1, 2))
    assert len({unit_seed([1, 2]), unit_seed([2, 1]), unit_seed([1])}) == 3


def test_what_does_not_fit_is_refused() -> None:
    x, y = {"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}
    with pytest.raises(ValueError, match="modality 'x'"):
        noise_to(x, y, torch.zeros(2))
    with pytest.raises(ValueError, match="one sigma a row"):
        clean_estimate(x, x, torch.zeros(3))
    with pytest.raises(ValueError, match="modalities differ"):
        noise_to(x, {"z": torch.zeros(2, 3)}, torch.zeros(2))
    with pytest.raises(ValueError, match="count 0"):
        drawn(SigmaDraw.UNIFORM, 0)
    with pytest.raises(ValueError, match="shift"):
        drawn(SigmaDraw.UNIFORM, 1, shift=0.0)
