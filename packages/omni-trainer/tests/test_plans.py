"""Who samples what, and which rows an optimizer step trains: plain data, the same on any number of ranks."""

import itertools

import attrs
import pytest

from omni_core.choices import StepKind
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import SamplingSpec
from omni_trainer.data import PromptBatch, PromptRow
from omni_trainer.rollout_plan import plan_rollout
from omni_trainer.update_plan import PlannedRow, plan_updates

SAMPLING = SamplingSpec(
    sigmas=FlowMatchSchedule.linear(4).values(),
    guidance_scale=1.0,
    height=16,
    width=16,
    max_sequence_length=16,
    kind=StepKind.SDE,
    noise_level=0.7,
)


def batch(count, occurrences=None):
    rows = tuple(
        PromptRow(row_id=str(i), prompt=f"prompt {i}", target=None, line=i) for i in range(count)
    )
    return PromptBatch(rows=rows, epoch=0, occurrences=occurrences or (0,) * count)


def plan(prompts, *, step=0, ranks=1, samples=16, window=lambda seed: (0, 1)):
    return plan_rollout(
        prompts,
        purpose="rollout",
        step=step,
        samples_per_prompt=samples,
        base_seed=0,
        sampling=SAMPLING,
        window=window,
        ranks=ranks,
    )


def test_case_17_every_sample_has_its_seed_on_any_number_of_workers():
    plans = {ranks: plan(batch(48), ranks=ranks) for ranks in (1, 2, 4, 8)}
    seeds = plans[1].seeds

    assert len(set(seeds.values())) == len(seeds) == 48 * 16
    for ranks, found in plans.items():
        by_rank = [
            {(r.group_id, s.k): s.seed for r in requests for s in r.samples}
            for requests in found.by_rank
        ]
        assert [len(part) for part in by_rank] == [768 // ranks] * ranks
        assert dict(itertools.chain.from_iterable(part.items() for part in by_rank)) == seeds
    assert not set(seeds.values()) & set(plan(batch(48), step=1).seeds.values())
    assert plan(batch(48), step=5).seeds == plan(batch(48), step=5).seeds


def test_a_prompt_that_comes_twice_in_a_step_has_two_groups():
    prompts = batch(1)
    twice = PromptBatch(rows=prompts.rows * 2, epoch=0, occurrences=(0, 1))
    found = plan(twice, samples=2)

    assert len({request.group_id for request in found.requests}) == 2
    assert len(set(found.seeds.values())) == 4


def test_a_group_has_one_window_on_every_rank():
    asked = []

    def window(seed):
        asked.append(seed)
        return (seed % 3,)

    found = plan(batch(3), ranks=2, samples=6, window=window)
    windows = {}
    for requests in found.by_rank:
        for request in requests:
            windows.setdefault(request.group_id, set()).add(request.window)

    assert len(set(asked)) == 3
    assert all(len(own) == 1 for own in windows.values())
    assert [len(part.samples) for requests in found.by_rank for part in requests] == [6, 3, 3, 6]


def test_uneven_samples_differ_by_at_most_one_and_lose_none():
    found = plan(batch(5), ranks=4, samples=1)

    counts = [sum(len(r.samples) for r in requests) for requests in found.by_rank]
    assert sorted(counts) == [1, 1, 1, 2]
    assert [s.row_id for requests in found.by_rank for r in requests for s in r.samples] == list(
        "01234"
    )


# -- updates ----------------------------------------------------------------------------------------


def rows(count, *, per_source=4, weights=None):
    return [
        PlannedRow(
            source=i // per_source,
            row=i % per_source,
            advantage=float(i),
            weight=1.0 if weights is None else weights[i],
            trained_steps=3,
        )
        for i in range(count)
    ]


def trained(plans):
    """Advantages (each names a row) of every optimizer step, over all ranks."""
    steps = len(plans[0].steps)
    return [[a for plan in plans for a in plan.steps[i].advantages] for i in range(steps)]


def test_one_update_keeps_the_natural_order():
    (plan,) = plan_updates(rows(12), updates=1, ranks=1, seed=0, iteration=0)

    assert plan.sources == (0, 1, 2)
    assert plan.steps[0].rows == tuple((i // 4, i % 4) for i in range(12))
    assert plan.steps[0].denominator == 36.0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_with_one_update_each_rank_trains_what_it_sampled(ranks):
    """What `engine.keep_graph` rests on; groups of 4 lie across ranks."""
    found = plan(batch(3), ranks=ranks, samples=4)
    rows = [
        PlannedRow(source=i, row=0, advantage=0.0, weight=1.0, trained_steps=2)
        for i in range(len(found.keys))
    ]
    updates = plan_updates(rows, updates=1, ranks=ranks, seed=0, iteration=0)

    for requests, update in zip(found.by_rank, updates, strict=True):
        sampled = [(r.group_id, s.k) for r in requests for s in r.samples]
        assert [found.keys[source] for source in update.sources] == sampled


def test_several_updates_are_a_seeded_permutation_of_all_rows():
    first = trained(plan_updates(rows(24), updates=2, ranks=1, seed=0, iteration=3))
    again = trained(plan_updates(rows(24), updates=2, ranks=1, seed=0, iteration=3))
    other = trained(plan_updates(rows(24), updates=2, ranks=1, seed=0, iteration=4))

    assert first == again != other
    assert sorted(first[0] + first[1]) == [float(i) for i in range(24)]
    assert [len(step) for step in first] == [12, 12]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_rows_of_a_step_do_not_depend_on_the_ranks(ranks):
    alone = trained(plan_updates(rows(24), updates=2, ranks=1, seed=0, iteration=3))
    plans = plan_updates(rows(24), updates=2, ranks=ranks, seed=0, iteration=3)

    assert trained(plans) == alone
    assert {step.denominator for plan in plans for step in plan.steps} == {36.0}
    assert {len(step.rows) for plan in plans for step in plan.steps} == {12 // ranks}


def test_rows_without_weight_are_in_no_denominator_and_an_empty_step_is_left_out():
    half = plan_updates(rows(4, weights=[1, 0, 1, 0]), updates=1, ranks=2, seed=0, iteration=0)
    none = plan_updates(rows(4, weights=[0] * 4), updates=1, ranks=2, seed=0, iteration=0)

    assert [plan.steps[0].denominator for plan in half] == [6.0, 6.0]
    assert [plan.steps[0].weights for plan in half] == [(1, 0), (1, 0)]
    assert [(plan.steps, plan.sources) for plan in none] == [((), ()), ((), ())]


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match="10 rows do not divide evenly into 2 optimizer steps on 3"
    ):
        plan_updates(rows(10), updates=2, ranks=3, seed=0, iteration=0)


# -- units --------------------------------------------------------------------------------------------


def units(sizes, *, alone=0):
    """Rows in units of these sizes, then rows that are in none."""
    owners = [unit for unit, size in enumerate(sizes) for _ in range(size)] + [None] * alone
    return [
        PlannedRow(
            source=0,
            row=i,
            advantage=float(i),
            weight=float(owner is not None),
            trained_steps=5,
            unit=owner,
        )
        for i, owner in enumerate(owners)
    ]


@pytest.mark.parametrize(("updates", "ranks"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)])
def test_a_unit_stays_whole_on_any_number_of_ranks(updates, ranks):
    given = units([2, 3, 1, 2, 2], alone=3)
    plans = plan_updates(given, updates=updates, ranks=ranks, seed=0, iteration=0)

    seen = []
    for step in range(updates):
        for plan in plans:
            found = plan.steps[step]
            mine = {}
            for (_, row), unit in zip(found.rows, found.units, strict=True):
                mine.setdefault(unit, []).append(row)
            for unit, members in mine.items():
                assert members == [row.row for row in given if row.unit == unit]
                seen.append(unit)
        counted = sum(sum(plan.steps[step].weights) for plan in plans)
        assert {plan.steps[step].denominator for plan in plans} == {5.0 * counted}
        assert {plan.steps[step].update for plan in plans} == {step}
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_a_rank_without_a_unit_has_a_row_that_counts_for_nothing():
    plans = plan_updates(units([2], alone=2), updates=1, ranks=2, seed=0, iteration=0)
    weights = sorted(plan.steps[0].weights for plan in plans)

    assert weights == [(0.0,), (1.0, 1.0)]
    assert [plan.steps[0].denominator for plan in plans] == [10.0, 10.0]


def test_a_step_that_is_left_out_keeps_its_number():
    plans = plan_updates(units([2], alone=2), updates=2, ranks=1, seed=0, iteration=0)
    first = plan_updates(units([2], alone=2), updates=2, ranks=1, seed=1, iteration=0)

    assert len(plans[0].steps) == len(first[0].steps) == 1
    assert plans[0].steps[0].update == first[0].steps[0].update == 1


def test_a_row_takes_its_teacher_along():
    given = [attrs.evolve(row, teacher=i % 3) for i, row in enumerate(rows(8))]
    plans = plan_updates(given, updates=2, ranks=2, seed=1, iteration=0)
    for step in (step for plan in plans for step in plan.steps):
        assert step.teachers == tuple(int(advantage) % 3 for advantage in step.advantages)
    (plan,) = plan_updates(rows(4), updates=1, ranks=1, seed=1, iteration=0)
    assert plan.steps[0].teachers is None


def test_rows_that_are_trained_alone_have_no_units():
    (plan,) = plan_updates(rows(12), updates=1, ranks=1, seed=0, iteration=0)

    assert plan.steps[0].units is None
