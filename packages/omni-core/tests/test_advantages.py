"""Group advantages: input order, unscored rows, groups that say nothing."""

from __future__ import annotations

import random

import pytest
import torch

from omni_core.advantages import AdvantageStd, group_advantages


@pytest.mark.parametrize("std", list(AdvantageStd))
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize(
    "rewards", [[1.0] * 4, [0.7, 0.7 + 1e-8, 0.7 + 2e-8, 0.7 + 3e-8], [0.0] * 4]
)
def test_case_10_equal_rewards_give_zero_advantages(
    rewards: list[float], scale: float, std: AdvantageStd
) -> None:
    for dtype in (torch.float32, torch.float64):
        got = group_advantages(
            torch.tensor(rewards, dtype=dtype) * scale, ["a"] * 4, std=std, eps=1e-8
        )
        assert got.advantages.tolist() == [0.0, 0.0, 0.0, 0.0]
        assert got.zero_std_groups == 1
        assert got.groups == 1


def test_case_10_a_silent_group_stays_silent_beside_a_loud_one() -> None:
    got = group_advantages(torch.tensor([0.7, 0.7, 0.0, 1.0]), ["a", "a", "b", "b"])
    assert got.advantages[:2].tolist() == [0.0, 0.0]
    assert got.advantages[2] == -got.advantages[3] != 0.0
    assert got.zero_std_groups == 1
    assert got.group_std_mean == pytest.approx(0.5**0.5 / 2)


def test_small_but_true_differences_are_not_silenced() -> None:
    got = group_advantages(
        torch.tensor([0.7, 0.70001]), ["a", "a"], std=AdvantageStd.GROUP, eps=0.0
    )
    assert got.advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert got.zero_std_groups == 0


@pytest.mark.parametrize("unread", [0.0, 100.0, float("nan")])
def test_case_11_an_unscored_row_has_advantage_zero_and_is_in_no_mean(unread: float) -> None:
    got = group_advantages(
        torch.tensor([0.2, unread, 0.6, 0.4]),
        ["a"] * 4,
        valid=torch.tensor([True, False, True, True]),
        std=AdvantageStd.NONE,
    )
    assert got.advantages.tolist() == pytest.approx([-0.2, 0.0, 0.2, 0.0], abs=1e-7)
    assert got.advantages[1] == 0.0
    assert got.unscored == 1
    for std in (AdvantageStd.GLOBAL, AdvantageStd.GROUP):
        scaled = group_advantages(
            torch.tensor([0.2, unread, 0.6, 0.4]),
            ["a"] * 4,
            valid=torch.tensor([True, False, True, True]),
            std=std,
        )
        expected = 0.2 / (0.2 + 1e-4)  # the std of 0.2, 0.6, 0.4 with ddof 1 is 0.2
        assert scaled.advantages.tolist() == pytest.approx(
            [-expected, 0.0, expected, 0.0], abs=1e-6
        )


def test_groups_left_with_one_or_no_scored_row_are_counted() -> None:
    got = group_advantages(
        torch.tensor([0.5, 0.1, 0.9, 0.3, 0.2, 0.8]),
        ["a", "a", "b", "b", "c", "c"],
        valid=torch.tensor([True, False, False, False, True, True]),
    )
    assert got.advantages[:4].tolist() == [0.0] * 4
    assert (got.groups, got.single_groups, got.unscored_groups) == (3, 1, 1)
    assert (got.unscored, got.zero_std_groups) == (3, 0)
    assert got.advantages[5] > 0.0


def test_no_scored_row_at_all_gives_zeros() -> None:
    got = group_advantages(torch.ones(2), ["a", "a"], valid=torch.tensor([False, False]))
    assert got.advantages.tolist() == [0.0, 0.0]
    assert got.group_std_mean == 0.0


@pytest.mark.parametrize("std", list(AdvantageStd))
def test_case_12_shuffled_rows_get_the_same_advantages_in_input_order(std: AdvantageStd) -> None:
    rewards = torch.rand(8, generator=torch.Generator().manual_seed(5)).tolist()
    ids = ["a"] * 3 + ["b"] * 5
    ordered = group_advantages(torch.tensor(rewards), ids, std=std).advantages
    for seed in range(10):
        order = random.Random(seed).sample(range(8), 8)
        shuffled = group_advantages(
            torch.tensor([rewards[row] for row in order]), [ids[row] for row in order], std=std
        )
        assert torch.equal(shuffled.advantages, ordered[torch.tensor(order)])


def test_advantages_are_clipped_and_counted() -> None:
    rewards = torch.tensor([0.0] * 99 + [1.0])
    free = group_advantages(rewards, ["a"] * 100, clip=None)
    assert free.advantages.max().item() == pytest.approx(9.89, abs=1e-2)
    assert free.clipped == 0
    bound = group_advantages(rewards, ["a"] * 100)
    assert bound.advantages.max().item() == 5.0
    assert bound.clipped == 1


def test_ddof_is_stated() -> None:
    rewards = torch.tensor([0.0, 1.0])
    zero = group_advantages(rewards, ["a", "a"], ddof=0, eps=0.0)
    one = group_advantages(rewards, ["a", "a"], ddof=1, eps=0.0)
    assert zero.advantages.tolist() == [-1.0, 1.0]
    assert one.advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_malformed_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(2, 1\)"):
        group_advantages(torch.zeros(2, 1), ["a", "a"])
    with pytest.raises(ValueError, match="and 1 ids"):
        group_advantages(torch.zeros(2), ["a"])
    with pytest.raises(ValueError, match="valid must be bool"):
        group_advantages(torch.zeros(2), ["a", "a"], valid=torch.ones(2))
    with pytest.raises(ValueError, match=r"row 1 \(group 'b'\) has reward nan"):
        group_advantages(torch.tensor([0.0, float("nan")]), ["a", "b"])
    for options in ({"ddof": 2}, {"eps": -1.0}, {"clip": 0.0}):
        with pytest.raises(ValueError, match="is wrong"):
            group_advantages(torch.zeros(2), ["a", "a"], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="known are: global, group, none"):
        AdvantageStd.parse("batch")
