"""Ranks agree on their calls, or all of them fail with every plan."""

from __future__ import annotations

import json
from collections.abc import Callable

from omni_core.choices import StepKind
from omni_core.trajectory import RolloutRequest, SampleRecord, SamplingSpec
from omni_engine_fsdp import batches
from omni_engine_fsdp.batches import Likeness
from omni_engine_fsdp.call_plan import Call, CallPlan, agree, common_count, gather_text

RunRanks = Callable[..., list[str]]

SPEC = SamplingSpec(
    sigmas=(1.0, 0.8999999761581421, 0.5, 0.0),
    guidance_scale=4.5,
    height=16,
    width=16,
    max_sequence_length=16,
    negative_prompt='"später"',
    kind=StepKind.CPS,
    noise_level=0.7,
)


def test_one_rank_agrees_with_itself_without_a_group() -> None:
    agree(CallPlan(phase="train", calls=(Call("transformer", (4,), 3),)), None)
    assert common_count(3, None) == 3
    assert gather_text("a", None) == ["a"]


def test_case_27_ranks_agree_or_all_fail_with_every_plan_within_10_s(run_ranks: RunRanks) -> None:
    four = "transformer [4, 8, 4, 4]"
    high, low = "1 x high [4, 8, 4, 4]", "1 x low [4, 8, 4, 4]"
    plans = {
        "count": (f"3 x {four}", f"2 x {four}"),
        "shape": (f"3 x {four}", "3 x transformer [2, 8, 4, 4]"),
        "expert": (f"{high}, {low}", f"{low}, {high}"),
        "none": (f"3 x {four}", "no call"),
    }
    for output in run_ranks("call_plan"):
        found = json.loads(output)
        assert found["equal"]["error"] is None
        for what, (first, second) in plans.items():
            assert found[what]["error"] == (
                "ranks were about to make different calls:\n"
                f"  rank 0: train: {first}\n  rank 1: train: {second}"
            )
            assert found[what]["seconds"] < 10.0
        # A short rank learns what to fill up to.
        assert found["counts"] == [3, [1, 5, 0], ["a", "später\n" * 100]]


# -- dealing rows into batches --------------------------------------------------------------------


def request(group: str, count: int, **changes: object) -> RolloutRequest:
    samples = tuple(
        SampleRecord(group_id=group, row_id=group, k=k, seed=k, prompt=group) for k in range(count)
    )
    return RolloutRequest(**{"samples": samples, "sampling": SPEC, **changes})  # type: ignore[arg-type]


def test_rows_share_batches_across_requests_but_not_across_specs() -> None:
    requests = [request("a", 3), request("b", 1, adapter="old"), request("c", 3)]
    dealt = batches.deal(requests, batch_size=4, group=None)
    assert [(b.likeness.adapter, b.size) for b in dealt] == [
        ("default", 4),
        ("default", 2),
        ("old", 1),
    ]
    assert [[(r.request, r.sample.k) for r in b.rows] for b in dealt] == [
        [(0, 0), (0, 1), (0, 2), (2, 0)],
        [(2, 1), (2, 2)],
        [(1, 0)],
    ]


def test_dummies_are_copies_of_the_first_row() -> None:
    (full,) = batches.deal([request("a", 2)], batch_size=4, group=None)
    short = batches.Batch(full.likeness, full.rows, 4)
    assert [row.sample.k for row in short.padded()] == [0, 1, 0, 0]
    empty = batches.Batch(full.likeness, (), 2, full.rows[1])
    assert [row.sample.k for row in empty.padded()] == [1, 1]


def test_a_likeness_travels_as_text_unchanged() -> None:
    likeness = Likeness(SPEC, "old")
    again = Likeness.of_text(likeness.to_text())
    assert again == likeness
    assert again.sampling.sigmas == SPEC.sigmas
    assert again.sampling.kind is StepKind.CPS


def test_calls_of_one_expert_in_a_row_are_one_entry() -> None:
    found = batches.calls(["high", "high", "low", "low", "low"], 8, (16, 64, 64))
    assert found == [Call("high", (8, 16, 64, 64), 2), Call("low", (8, 16, 64, 64), 3)]
