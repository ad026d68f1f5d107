"""Noise belongs to a sample, whoever draws it, wherever and beside whom."""

from __future__ import annotations

import pytest
import torch

from omni_core.seeds import (
    derive_seed,
    initial_noise,
    initial_noise_batch,
    sample_seed,
    step_noise,
    step_noise_batch,
)

ODD = {"image": (3, 5, 7)}


def seed_of(prompt: int, k: int, step: int = 0, occurrence: int = 0) -> int:
    return sample_seed(
        purpose="rollout", base_seed=17, step=step, row_id=prompt, occurrence=occurrence, k=k
    )


def test_case_17_seeds_do_not_depend_on_the_workers() -> None:
    jobs = [(prompt, k) for prompt in range(48) for k in range(16)]
    alone = {job: seed_of(*job) for job in jobs}
    assert len(set(alone.values())) == 768
    for workers in (1, 2, 4, 8):
        shares = [jobs[rank::workers] for rank in range(workers)]
        assert {job: seed_of(*job) for share in shares for job in share} == alone


def test_case_17_steps_differ_and_a_resumed_step_is_itself() -> None:
    def seeds(step: int) -> set[int]:
        return {seed_of(prompt, k, step=step) for prompt in range(48) for k in range(16)}

    assert not seeds(3) & seeds(4)
    assert seeds(4) == seeds(4)


def test_case_17_a_row_that_comes_twice_in_a_step_is_two_samples() -> None:
    assert seed_of(1, 0, occurrence=0) != seed_of(1, 0, occurrence=1)


def test_the_encoding_is_part_of_the_record() -> None:
    # These numbers are frozen: a change here changes every run.
    assert derive_seed("a") == 8720169856635585161
    assert seed_of(7, 3) == 745158006479383425


def test_parts_are_not_confused() -> None:
    seeds = [
        derive_seed(*parts)
        for parts in (
            ("ab", "c"),
            ("a", "bc"),
            ("abc",),
            (1,),
            ("1",),
            (11,),
            (1, 1),
            ("i1:1",),
            (-1,),
        )
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    with pytest.raises(TypeError, match="True"):
        derive_seed(True)
    with pytest.raises(TypeError, match=r"0\.5"):
        derive_seed(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        derive_seed()


@pytest.mark.parametrize(
    "shapes", [ODD, {"image": (1,)}, {"image": (2, 3), "audio": (5,)}, {"image": ()}]
)
def test_case_18_noise_is_the_same_alone_in_a_batch_and_at_another_position(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    mine = seed_of(7, 3)
    others = [seed_of(7, k) for k in range(3)]
    for alone, batched in (
        (initial_noise(mine, shapes), lambda seeds: initial_noise_batch(seeds, shapes)),
        (step_noise(mine, 4, shapes), lambda seeds: step_noise_batch(seeds, 4, shapes)),
    ):
        last = batched([*others, mine])
        second = batched([others[0], mine, *others[1:]])
        for name, shape in shapes.items():
            assert alone[name].shape == (1, *shape)
            assert last[name].shape == (4, *shape)
            assert torch.equal(last[name][3], alone[name][0])
            assert torch.equal(second[name][1], alone[name][0])
            assert not torch.equal(last[name][0], alone[name][0])


def test_a_stock_pipeline_starts_from_the_same_latents() -> None:
    seed = seed_of(7, 3)
    stock = torch.randn((1, 3, 5, 7), generator=torch.Generator().manual_seed(seed))
    noise = initial_noise(seed, ODD)["image"]
    assert torch.equal(noise, stock)
    assert noise.dtype == torch.float32


def test_step_noise_needs_no_history() -> None:
    seed = seed_of(0, 0)
    steps = [step_noise(seed, index, ODD)["image"] for index in range(5)]
    assert torch.equal(step_noise(seed, 3, ODD)["image"], steps[3])
    drawn = [*steps, initial_noise(seed, ODD)["image"]]
    for index, noise in enumerate(drawn):
        assert not any(torch.equal(noise, other) for other in drawn[:index])


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    initial_noise(1, ODD)
    step_noise(1, 0, ODD)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="no modality"):
        initial_noise(1, {})
    with pytest.raises(ValueError, match="at least one seed"):
        initial_noise_batch([], ODD)
