"""Requests and trajectories: rows keep who they are, and parts that were sampled apart stay apart."""

from __future__ import annotations

import pickle  # noqa: TID251 -- what Ray does to a record, in memory; no file is read

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.engine import TrainBatch
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing import requests_for, train_batch
from omni_core.trajectory import (
    BatchPlace,
    Conditioning,
    Media,
    RolloutRequest,
    SampleRecord,
    SamplingSpec,
    Trajectory,
)

SPEC = SamplingSpec(
    sigmas=FlowMatchSchedule.linear(4, shift=3.0).values(),
    guidance_scale=4.5,
    height=16,
    width=8,
    max_sequence_length=7,
    kind=StepKind.SDE,
    noise_level=0.7,
)


@attrs.frozen(kw_only=True, eq=False)
class Text(Conditioning):
    text: Tensor
    negative: Tensor | None = None


def trajectory(group: int = 0, rows: int = 2, *, version: int = 3) -> Trajectory:
    first = torch.arange(rows) + 100.0 * group
    states = torch.arange(5)[None, :, None, None] + first[:, None, None, None] * 10
    return Trajectory(
        latents={"image": states.expand(rows, 5, 2, 3).contiguous()},
        step_indices=torch.tensor([[0, 2]]).expand(rows, 2).contiguous(),
        log_probs=-first[:, None] - torch.tensor([[0.0, 0.5]]),
        conditioning=Text(text=torch.full((1, 6), float(group))),
        prompt_index=torch.zeros(rows, dtype=torch.int64),
        media=Media(image=torch.full((rows, 4, 4, 3), group, dtype=torch.uint8)),
        records=tuple(
            SampleRecord(group_id=f"g{group}", row_id="r", k=k, seed=k, prompt=f"p{group}")
            for k in range(rows)
        ),
        effective=SPEC,
        adapter="default",
        weight_version=version,
        places=tuple(BatchPlace(f"b{group}", k, rows) for k in range(rows)),
    )


def joined() -> Trajectory:
    return Trajectory.concat([trajectory(0, 2), trajectory(1, 3)])


# -- specs and requests ----------------------------------------------------------------------------


def test_a_spec_knows_its_schedule_bit_for_bit() -> None:
    assert SPEC.num_steps == 4
    assert SPEC.schedule().difference(FlowMatchSchedule.linear(4, shift=3.0)) is None


def test_case_32_a_difference_names_each_field_with_both_values() -> None:
    other = attrs.evolve(SPEC, guidance_scale=1.0, kind=StepKind.CPS)
    assert SPEC.difference(SPEC) is None
    assert SPEC.difference(other) == (
        "guidance_scale: 4.5 asked, 1.0 used\n"
        "kind: <StepKind.SDE: 'sde'> asked, <StepKind.CPS: 'cps'> used"
    )


def test_a_request_is_one_group_of_one_prompt_with_distinct_samples() -> None:
    (request,) = requests_for(SPEC, ["a sign"], samples_per_prompt=3)
    assert (request.group_id, request.prompt) == ("0/0", "a sign")
    first = request.samples[0]
    for wrong, said in (
        ((), "must be >= 1"),
        ((first, attrs.evolve(first, k=1, group_id="other")), "one group"),
        ((first, attrs.evolve(first, k=1, prompt="other")), "one prompt"),
        ((first, first), "repeat"),
    ):
        with pytest.raises(ValueError, match=said):
            RolloutRequest(samples=wrong, sampling=SPEC)


def test_expand_and_split_keep_every_sample_and_setting() -> None:
    (request,) = requests_for(SPEC, ["a sign"], samples_per_prompt=5)
    singles = request.expand()
    assert [single.samples for single in singles] == [(sample,) for sample in request.samples]
    parts = request.split(2)
    assert [len(part.samples) for part in parts] == [2, 2, 1]
    assert [s for part in parts for s in part.samples] == list(request.samples)
    assert {part.window for part in (*singles, *parts)} == {request.window}


# -- trajectories ----------------------------------------------------------------------------------


def test_concat_joins_rows_and_counts_prompts_on() -> None:
    found = joined()
    assert found.rows == 5
    assert found.prompt_index.tolist() == [0, 0, 1, 1, 1]
    assert [record.group_id for record in found.records] == ["g0", "g0", "g1", "g1", "g1"]
    assert found.expanded_conditioning().text[:, 0].tolist() == [0, 0, 1, 1, 1]  # type: ignore[attr-defined]
    assert found.latents["image"].shape == (5, 5, 2, 3)
    assert found.media is not None
    assert found.media.image is not None
    assert found.media.image[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 1]


def test_select_keeps_only_the_prompts_that_are_used() -> None:
    found = joined().select(torch.tensor([4, 2]))
    assert found.conditioning.rows == 1
    assert found.prompt_index.tolist() == [0, 0]
    assert [record.k for record in found.records] == [2, 0]
    assert [place.place for place in found.places] == [2, 0]
    assert found.log_probs.tolist() == [[-102.0, -102.5], [-100.0, -100.5]]
    mixed = joined().select(torch.tensor([3, 0, 3]))
    assert mixed.expanded_conditioning().text[:, 0].tolist() == [1, 0, 1]  # type: ignore[attr-defined]


def test_select_then_concat_gives_every_row_back() -> None:
    whole = joined()
    parts = [whole.select(torch.tensor([row])) for row in range(5)]
    found = Trajectory.concat(parts)
    assert found.records == whole.records
    assert torch.equal(found.latents["image"], whole.latents["image"])
    assert torch.equal(
        found.expanded_conditioning().text,  # type: ignore[attr-defined]
        whole.expanded_conditioning().text,  # type: ignore[attr-defined]
    )


def test_state_takes_each_row_at_its_own_step() -> None:
    found = trajectory(0, 2).state(torch.tensor([3, 1]))
    assert found["image"].shape == (2, 2, 3)
    assert found["image"][:, 0, 0].tolist() == [3.0, 11.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_version": 4}, "version 3, adapter 'default' version 4"),
        ({"adapter": "old"}, "adapter 'old'"),
        ({"effective": attrs.evolve(SPEC, guidance_scale=1.0)}, "guidance_scale: 4.5 asked"),
        ({"media": None}, r"Trajectory\.media: some parts have it"),
        ({"step_indices": torch.zeros(2, 1, dtype=torch.int64)}, r"Trajectory\.step_indices"),
        ({"latents": {"video": torch.zeros(2, 5, 1)}}, r"Trajectory\.latents: cannot join keys"),
    ],
)
def test_parts_that_were_sampled_apart_are_not_joined(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Trajectory.concat([trajectory(0), attrs.evolve(trajectory(1), **changes)])  # type: ignore[arg-type]


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="no parts"):
        Trajectory.concat([])


def test_what_a_driver_keeps_holds_no_tensor() -> None:
    info = joined().info(seconds=1.5)
    assert info.records == joined().records
    assert (info.weight_version, info.seconds) == (3, 1.5)
    media, latents = 5 * 4 * 4 * 3, 5 * 5 * 2 * 3 * 4
    assert info.nbytes == media + latents + 5 * 2 * (8 + 4) + 2 * 6 * 4 + 5 * 8
    assert len(pickle.dumps(info)) < 2000


def test_one_row_of_a_large_trajectory_travels_small() -> None:
    large = Trajectory.concat([trajectory(group, 50) for group in range(20)])
    one = large.select(torch.tensor([700]))
    assert len(pickle.dumps(one, protocol=5)) < 10_000
    back: Trajectory = pickle.loads(pickle.dumps(one, protocol=5))  # noqa: S301 -- our own
    assert back.records == one.records
    assert torch.equal(back.latents["image"], one.latents["image"])


def test_media_of_other_kinds_or_rates_are_not_joined() -> None:
    audio = torch.zeros(1, 1, 8)
    first = Media(audio=audio, audio_rate=8000)
    assert Media.concat([first, first]).audio_rate == 8000
    with pytest.raises(ValueError, match=r"Media\.audio_rate: parts differ: 8000, 16000"):
        Media.concat([first, Media(audio=audio, audio_rate=16000)])
    with pytest.raises(ValueError, match=r"Media\.image: some parts"):
        Media.concat([first, attrs.evolve(first, image=torch.zeros(1, 2, 2, 3))])
    with pytest.raises(ValueError, match=r"Media\.concat: no parts"):
        Media.concat([])


def test_conditioning_without_a_tensor_has_no_rows() -> None:
    @attrs.frozen(kw_only=True, eq=False)
    class Empty(Conditioning):
        text: Tensor | None = None

    with pytest.raises(ValueError, match="Empty holds no tensor"):
        _ = Empty().rows


# -- training batches ------------------------------------------------------------------------------


def test_a_training_batch_goes_through_a_tensordict_and_back() -> None:
    batch = train_batch(joined())
    boxed = batch.to_tensordict()
    assert boxed.batch_size == torch.Size([5])
    assert torch.equal(boxed["latents", "image"], batch.trajectory.latents["image"])
    back = TrainBatch.of(boxed)
    assert back.denominator == batch.denominator == 10.0
    assert torch.equal(back.advantages, batch.advantages)
    assert back.trajectory.records == batch.trajectory.records
    assert torch.equal(back.trajectory.log_probs, batch.trajectory.log_probs)
    assert torch.equal(back.trajectory.latents["image"], batch.trajectory.latents["image"])
    assert TrainBatch.of(batch) is batch


def test_changes_made_in_the_tensordict_count() -> None:
    boxed = train_batch(joined()).to_tensordict()
    boxed["advantages"] = torch.arange(5.0)
    assert TrainBatch.of(boxed).advantages.tolist() == [0, 1, 2, 3, 4]


def test_rows_of_a_tensordict_alone_are_no_batch() -> None:
    boxed = train_batch(joined()).to_tensordict()
    with pytest.raises(ValueError, match=r"2 rows came from a batch of 5: use TrainBatch\.select"):
        TrainBatch.of(boxed[:2])


def test_selecting_rows_of_a_batch_keeps_the_denominator() -> None:
    batch = train_batch(joined())
    part = batch.select(torch.tensor([3, 1]))
    assert part.denominator == batch.denominator
    assert part.advantages.tolist() == batch.advantages[[3, 1]].tolist()
    assert [record.group_id for record in part.trajectory.records] == ["g1", "g0"]
    again = TrainBatch.concat([part, batch.select(torch.tensor([0]))])
    assert again.trajectory.rows == 3
    with pytest.raises(ValueError, match=r"TrainBatch\.denominator"):
        TrainBatch.concat([part, attrs.evolve(part, denominator=1.0)])
