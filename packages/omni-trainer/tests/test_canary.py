"""The canaries' verdicts on numbers that are known."""

import math

import attrs
import pytest

from omni_core.choices import StepKind
from omni_core.options import DType
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import SampleRecord, SamplingSpec, TrajectoryInfo
from omni_trainer.canary import CanaryError, CanaryReport, check_echo, judge

ASKED = SamplingSpec(
    sigmas=FlowMatchSchedule.linear(4).values(),
    guidance_scale=4.5,
    height=16,
    width=16,
    max_sequence_length=16,
    kind=StepKind.SDE,
    noise_level=0.7,
)


def report(*, exact=0.0, floor=0.0, rank=0):
    return CanaryReport(
        rank=rank, rows=4, effective=ASKED, exact={0: 0.0, 1: exact}, floor={0: floor, 1: 0.0}
    )


def verdict(*reports, dtype=DType.FLOAT32, bound=None, clip=1e-4):
    return judge(reports, asked=ASKED, dtype=dtype, bound=bound, clip=clip)


def test_exact_and_near_is_well():
    found = verdict(report(), report(floor=3e-8, rank=1))

    assert (found.exact, found.floor, found.recompute) == (0.0, 3e-8, False)


def test_a_replay_that_is_not_exact_stops_the_run_and_shows_where():
    with pytest.raises(CanaryError) as caught:
        verdict(report(), report(exact=2e-4, rank=1))

    text = str(caught.value)
    assert text.startswith("the exact canary is 0.0002, not 0")
    assert "     1     1  0.75          0.0002" in text
    assert "schedule asked and used (4 steps): 1, 0.75, 0.5, 0.25, 0" in text


def test_a_number_that_is_not_finite_stops_the_run():
    with pytest.raises(CanaryError, match="exact canary is inf"):
        verdict(report(exact=math.inf))


def test_a_floor_above_the_bound_stops_the_run():
    with pytest.raises(CanaryError, match=r"move \|ratio - 1\| by 2e-06, above .* 1e-06"):
        verdict(report(floor=2e-6), clip=1.0)
    assert verdict(report(floor=2e-6), bound=1e-5, clip=1.0).floor == 2e-6


@pytest.mark.parametrize(
    ("floor", "clip", "recompute"),
    [(3e-8, 1e-5, False), (0.9e-6, 1e-5, False), (1.1e-6, 1e-5, True), (9e-7, None, False)],
)
def test_old_log_probs_are_recomputed_where_the_floor_is_near_the_clip(floor, clip, recompute):
    assert verdict(report(floor=floor), bound=1e-3, clip=clip).recompute is recompute


def test_bf16_is_held_against_the_clip_alone():
    found = verdict(report(exact=1e-4, floor=3e-5), dtype=DType.BFLOAT16, clip=1e-5)

    assert (found.exact, found.recompute) == (1e-4, True)


# -- echo -------------------------------------------------------------------------------------------


def info(ks, *, effective=ASKED, version=7, seed=11):
    records = tuple(
        SampleRecord(group_id="g", row_id="1", k=k, seed=seed + k, prompt="a sign") for k in ks
    )
    return TrajectoryInfo(
        records=records, effective=effective, adapter="default", weight_version=version, nbytes=0
    )


def echo(*infos, version=7, adapter="default"):
    seeds = {("g", k): 11 + k for k in range(4)}
    check_echo(infos, asked=ASKED, seeds=seeds, adapter=adapter, weight_version=version)


def test_what_was_asked_for_passes():
    echo(info([0, 1]), info([2, 3]))
    echo(info([0, 1]), info([2, 3]), version=None)


def test_case_7_a_schedule_with_one_point_less_shows_both_tables():
    shorter = attrs.evolve(ASKED, sigmas=FlowMatchSchedule.linear(3).values())
    with pytest.raises(CanaryError) as caught:
        echo(info([0, 1, 2, 3], effective=shorter))

    text = str(caught.value)
    assert "4 steps and 3 steps" in text
    assert "asked" in text
    assert "used" in text
    assert "0.75     0.666666687  <-" in text
    assert "guidance_scale" not in text


def test_case_32_another_guidance_scale_is_refused():
    with pytest.raises(CanaryError, match=r"guidance_scale: 4\.5 asked, 1\.0 used"):
        echo(info([0, 1, 2, 3], effective=attrs.evolve(ASKED, guidance_scale=1.0)))


@pytest.mark.parametrize(
    ("infos", "said"),
    [
        ([info([0, 1, 2])], "1 samples of 4 never came: g:3"),
        ([info([0, 1, 2, 3]), info([3])], "sample 3 of group 'g' came twice"),
        ([info([0, 1, 2, 3, 4])], "sample 4 of group 'g' came twice, or was not asked for"),
        ([info([0, 1, 2, 3], seed=12)], "sample 0 of group 'g'"),
        ([info([0, 1, 2, 3], version=6)], "version 7, used 'default' version 6"),
    ],
)
def test_samples_that_are_missing_twice_or_strange_are_refused(infos, said):
    with pytest.raises(CanaryError, match=said):
        echo(*infos)


def test_version_zero_is_a_version():
    with pytest.raises(CanaryError, match="version 0, used 'default' version 7"):
        echo(info([0, 1, 2, 3]), version=0)
    with pytest.raises(CanaryError, match="adapter 'old'"):
        echo(info([0, 1, 2, 3]), adapter="old")


def test_a_replay_by_other_kernels_is_bounded_instead_of_exact():
    other = attrs.evolve(report(exact=6e-7, floor=6e-7), same_kernels=False)

    assert verdict(other, clip=1e-3).exact == 6e-7
    with pytest.raises(CanaryError, match="exact canary is 2e-05, not 1e-05"):
        verdict(attrs.evolve(other, exact={0: 2e-5}), clip=1e-3)
    with pytest.raises(CanaryError, match="exact canary is nan"):
        verdict(attrs.evolve(other, exact={0: math.nan}), clip=1e-3)
