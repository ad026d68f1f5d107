"""FlowMatchSchedule: float32 sigmas, strictly decreasing, addressed by index, sent as data."""

from __future__ import annotations

import json

import pytest
import torch

from omni_core.schedule import FlowMatchSchedule


def test_case_1_timesteps_are_scaled_in_float32() -> None:
    schedule = FlowMatchSchedule.from_values([0.97826087, 0.68181819, 0.0])
    assert schedule.timesteps.dtype == torch.float32
    assert schedule.timesteps.tolist() == pytest.approx([978.2609, 681.8182], abs=1e-3)


def test_case_2_equal_sigmas_are_refused_with_index_and_values() -> None:
    with pytest.raises(ValueError, match=r"sigmas\[1\] = 0\.8.* and sigmas\[2\] = 0\.8") as error:
        FlowMatchSchedule.from_values([1.0, 0.9, 0.9, 0.5, 0.0])
    assert "not strictly decreasing" in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 0.5, 0.6, 0.0], r"sigmas\[1\] = 0\.5 and sigmas\[2\] = 0\.6"),
        ([0.9, 0.9 - 1e-9, 0.0], "not strictly decreasing"),  # equal once they are float32
        ([1.1, 0.5, 0.0], r"sigmas\[0\] = 1\.1.* within \[0, 1\]"),
        ([1.0, float("nan"), 0.0], r"sigmas\[1\] = nan"),
        ([1.0, -0.1], r"sigmas\[1\]"),
        ([1.0], "at least 2 values"),
        ([], "at least 2 values"),
    ],
)
def test_malformed_sigmas_are_refused(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowMatchSchedule.from_values(values)


def test_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        FlowMatchSchedule(torch.tensor([1.0, 0.5, 0.0], dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        FlowMatchSchedule(torch.tensor([[1.0, 0.5, 0.0]]))


def test_the_schedule_owns_its_sigmas() -> None:
    sigmas = torch.tensor([1.0, 0.5, -0.0])
    schedule = FlowMatchSchedule(sigmas)
    sigmas[1] = 2.0
    assert schedule.values() == (1.0, 0.5, 0.0)
    assert not torch.signbit(schedule.sigmas).any()


def test_linear_is_shifted_once() -> None:
    assert FlowMatchSchedule.linear(4).values() == (1.0, 0.75, 0.5, 0.25, 0.0)
    shifted = FlowMatchSchedule.linear(2, shift=3.0)
    assert shifted.values() == (1.0, 0.75, 0.0)
    assert shifted.num_steps == 2
    assert shifted.sigma_guard.item() == 0.75
    for num_steps, shift in ((0, 1.0), (4, 0.0), (4, float("nan"))):
        with pytest.raises(ValueError, match="must be"):
            FlowMatchSchedule.linear(num_steps, shift=shift)


def test_values_travel_through_json_bit_for_bit() -> None:
    schedule = FlowMatchSchedule.linear(28, shift=3.0)
    back = FlowMatchSchedule.from_values(json.loads(json.dumps(schedule.values())))
    assert torch.equal(schedule.sigmas, back.sigmas)
    assert schedule.difference(back) is None


def test_difference_shows_both_tables() -> None:
    table = FlowMatchSchedule.linear(4).difference(FlowMatchSchedule.linear(3))
    assert table is not None
    assert "4 steps and 3 steps" in table
    rows = table.splitlines()[2:]
    assert len(rows) == 5
    assert not rows[0].endswith("<-")
    assert rows[1].split() == ["1", "0.75", "0.666666687", "<-"]
    assert rows[4].split() == ["4", "0", "-", "<-"]
    nudged = FlowMatchSchedule(
        torch.nextafter(FlowMatchSchedule.linear(4).sigmas, torch.tensor(0.0))
    )
    assert FlowMatchSchedule.linear(4).difference(nudged) is not None


def test_steps_are_addressed_by_index_alone() -> None:
    # As floats, bf16 timesteps of a long schedule collide: an index cannot.
    schedule = FlowMatchSchedule.linear(1000)
    assert len(set(schedule.timesteps.bfloat16().tolist())) < 1000
    index = torch.tensor([[0, 1], [999, 500]])
    sigma, sigma_next = schedule.at(index)
    assert torch.equal(sigma, schedule.sigmas[index])
    assert torch.equal(sigma_next, schedule.sigmas[index + 1])
    assert sigma.dtype == torch.float32
    assert schedule.at(torch.tensor(3))[0].shape == ()


def test_a_step_outside_the_schedule_is_an_error() -> None:
    schedule = FlowMatchSchedule.linear(10)
    for step in (-1, 10):
        with pytest.raises(IndexError, match=rf"step {step} is outside \[0, 10\)"):
            schedule.at(torch.tensor([0, step]))
    with pytest.raises(TypeError, match="int64"):
        schedule.at(torch.tensor([900.0]))


def test_case_6_a_window_with_the_last_step_is_refused_with_the_widest_that_fits() -> None:
    schedule = FlowMatchSchedule.linear(10)
    with pytest.raises(ValueError, match=r"algorithm\.window: .*never stochastic.*\[0, 9\)"):
        schedule.check_window(0, 10, where="algorithm.window")
    schedule.check_window(0, 9, where="algorithm.window")
    schedule.check_window(8, 9, where="algorithm.window")


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (8, 2)])
def test_case_6_an_empty_window_is_refused_with_its_path(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.window: .*is empty.*\[0, 9\)"):
        FlowMatchSchedule.linear(10).check_window(start, stop, where="algorithm.window")


def test_a_window_outside_the_schedule_is_refused() -> None:
    for start, stop in ((-1, 3), (4, 12)):
        with pytest.raises(ValueError, match="leaves the 10 steps"):
            FlowMatchSchedule.linear(10).check_window(start, stop, where="w")


def test_a_schedule_that_ends_above_zero_may_be_stochastic_to_its_end() -> None:
    FlowMatchSchedule.from_values([1.0, 0.5, 0.1]).check_window(0, 2, where="w")
    with pytest.raises(ValueError, match="no window fits"):
        FlowMatchSchedule.linear(1).check_window(0, 1, where="w")
