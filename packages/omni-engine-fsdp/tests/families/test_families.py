"""What every model family keeps: it computes what the stock pipeline of its folder computes."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from family_under_test import counts_of_stock
from torch import Tensor, nn

from omni_core import plugins
from omni_core.model import NO_GUIDANCE, Guidance, ModelFamily, Step, TextLayout
from omni_core.options import DiffusionPipelineConfig, DType
from omni_engine_fsdp import lora

SIGMAS = (0.97826087, 0.68181819)
VIDEO = ("ltx2", "wan")
"""Compared in test_video_families.py."""


def step_at(*sigmas: float) -> Step:
    return Step(index=torch.arange(len(sigmas)), sigma=torch.tensor(sigmas))


def negative_alone(conditioning: Any) -> Any:
    """The negative branch as if it were the prompt's."""
    branch = {}
    for field in attrs.fields(type(conditioning)):
        if field.name.startswith("negative_"):
            branch[field.name.removeprefix("negative_")] = getattr(conditioning, field.name)
            branch[field.name] = None
    return attrs.evolve(conditioning, **branch)


def test_every_family_of_the_package_is_compared(case_names: tuple[str, ...]) -> None:
    known = plugins.registry(plugins.MODELS)
    ours = {n for n in known.names() if known.get(n).target.startswith("omni_engine_fsdp.")}
    assert ours == {*case_names, *VIDEO}


# -- against stock --------------------------------------------------------------------------------


def scales(loaded: Any) -> list[tuple[float, str]]:
    return [(1.0, ""), (loaded.case.guided, loaded.case.negative)]


def test_ode_latents_equal_the_stock_pipelines(loaded: Any) -> None:
    for scale, negative in scales(loaded):
        expected = loaded.ours(loaded.run_stock(scale, negative)[-1].next_sample)
        found = loaded.ode(scale, negative)
        assert found.latents.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found.latents[name][:, -1], value, rtol=0.0, atol=1e-5)
        assert found.log_probs.isnan().all()


@torch.no_grad()
def test_velocity_equals_stock_bit_for_bit_at_equal_shapes(loaded: Any) -> None:
    """Where stock runs branches one by one, the unguided run is each of them at our shapes."""
    for scale, negative in scales(loaded):
        exact = scale == 1.0 or loaded.case.batched
        conditioning = loaded.encode(("a red sign", "blue"), scale, negative)
        for index, stock in enumerate(loaded.run_stock(scale, negative)):
            rows = torch.full((2,), index)
            found = loaded.denoiser.velocity(
                loaded.ours(stock.sample),
                Step(index=rows, sigma=loaded.schedule.at(rows)[0]),
                conditioning,
                Guidance(scale=scale),
            )
            for name, value in loaded.ours(stock.velocity).items():
                assert found[name].dtype == torch.float32
                bound = 0.0 if exact else 1e-5
                torch.testing.assert_close(found[name], value, rtol=0.0, atol=bound)


def test_the_stock_schedule_is_what_the_stock_pipeline_produces(loaded: Any) -> None:
    loaded.run_stock(1.0, "")
    assert torch.equal(loaded.schedule.sigmas, loaded.pipeline.scheduler.sigmas)
    assert torch.equal(loaded.schedule.timesteps, loaded.pipeline.scheduler.timesteps)


def test_decoded_pixels_are_those_of_the_stock_pictures(loaded: Any) -> None:
    steps, drawn = loaded.draw_stock(1.0, "", output_type="pil")
    found = loaded.codec.decode(loaded.ours(steps[-1].next_sample)).image
    assert found.dtype == torch.uint8
    expected = np.stack([np.asarray(picture) for picture in drawn.images])
    assert found.numpy().std() > 1.0
    assert np.array_equal(found.numpy(), expected)


# -- branches and rows ----------------------------------------------------------------------------


@torch.no_grad()
def test_guided_branches_as_one_batch_equal_each_branch_alone(loaded: Any) -> None:
    scale = loaded.case.guided
    conditioning = loaded.encode(("a red sign", "blue"), scale, loaded.case.negative)
    latents, step = loaded.noise(2), step_at(1.0, 0.4)
    guidance = Guidance(scale=scale)
    found = loaded.denoiser.velocity(latents, step, conditioning, guidance)
    if loaded.denoiser.branches(guidance) == 1:
        other = loaded.denoiser.velocity(latents, step, conditioning, NO_GUIDANCE)
        assert loaded.denoiser.single_branch(guidance) == guidance
        for name, value in found.items():
            assert (value - other[name]).abs().max() > 1e-4  # the scale is an input
        return
    assert loaded.denoiser.single_branch(guidance) == NO_GUIDANCE
    positive = loaded.denoiser.velocity(latents, step, conditioning, NO_GUIDANCE)
    negative = loaded.denoiser.velocity(latents, step, negative_alone(conditioning), NO_GUIDANCE)
    for name, value in found.items():
        assert (positive[name] - negative[name]).abs().max() > 1e-4  # the prompt matters
        expected = loaded.case.combine(negative[name], positive[name], scale)
        torch.testing.assert_close(value, expected, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_rows_at_different_steps_equal_each_row_alone(loaded: Any) -> None:
    sigmas = (1.0, 0.7, 0.2)
    conditioning = loaded.encode(("a", "blue", 'photo of "42"'), 1.0)
    latents = loaded.noise(3)
    together = loaded.denoiser.velocity(latents, step_at(*sigmas), conditioning, NO_GUIDANCE)
    for row, sigma in enumerate(sigmas):
        index = torch.tensor([row])
        alone = loaded.denoiser.velocity(
            {name: value[index] for name, value in latents.items()},
            step_at(sigma),
            conditioning.select(index),
            NO_GUIDANCE,
        )
        for name, value in alone.items():
            torch.testing.assert_close(together[name][index], value, rtol=0.0, atol=1e-5)


@torch.no_grad()
def test_case_9_text_of_another_length_beside_it_changes_nothing(loaded: Any) -> None:
    """CASES 9: 3 and 40 characters in one batch; fixed families keep the configured length."""
    short, long = "abc", "a sign " * 6
    both = loaded.encode((short, long), 1.0)
    alone = loaded.encode((short,), 1.0)
    latents = loaded.noise(2)
    first = torch.tensor([0])
    together = loaded.denoiser.velocity(latents, step_at(0.9, 0.9), both, NO_GUIDANCE)
    found = loaded.denoiser.velocity(
        {name: value[first] for name, value in latents.items()},
        step_at(0.9),
        type(alone).concat([alone]),
        NO_GUIDANCE,
    )
    for name, value in found.items():
        torch.testing.assert_close(together[name][first], value, rtol=0.0, atol=1e-5)
    assert loaded.conditioner.layout is loaded.family.text_layout
    if loaded.family.text_layout is TextLayout.FIXED:
        assert both.prompt_embeds.shape == (2, *alone.prompt_embeds.shape[1:])


def test_parts_of_other_lengths_join(loaded: Any) -> None:
    parts = [loaded.encode((prompt,), 1.0) for prompt in ("abc", "a sign " * 6)]
    joined = type(parts[0]).concat(parts)
    assert joined.rows == 2


def test_guidance_without_a_negative_branch_is_refused(loaded: Any) -> None:
    guidance = Guidance(scale=loaded.case.guided)
    if loaded.denoiser.branches(guidance) == 1:
        pytest.skip("its scale is an input of the module")
    with pytest.raises(ValueError, match="encoded without guidance"):
        loaded.denoiser.velocity(
            loaded.noise(1), step_at(1.0), loaded.encode(("a",), 1.0), guidance
        )


def test_prompts_are_counted_as_the_encoder_reads_them(loaded: Any) -> None:
    """Before a run says that a prompt is cut: a masked family by its mask, a fixed one by what stock cuts."""
    prompts = ["abc", "a sign " * 80]
    found = loaded.family.prompt_lengths(prompts)
    assert found[1].cut is ("image" not in loaded.family.inputs)
    if "image" in loaded.family.inputs:  # the encoder reads all of it, and the image
        masks = [loaded.encode((prompt,), 1.0).prompt_mask.sum() for prompt in prompts]
        assert found[1].tokens - found[0].tokens == masks[1] - masks[0]
    elif loaded.family.text_layout is TextLayout.MASKED:
        for prompt, length in zip(prompts, found, strict=True):
            mask = loaded.encode((prompt,), 1.0).prompt_mask
            assert mask.sum() == min(length.tokens, length.limit)
    else:
        expected = counts_of_stock(loaded.conditioner, prompts)
        assert [(length.tokens, length.limit) for length in found] == expected


# -- precision ------------------------------------------------------------------------------------


@torch.no_grad()
def test_case_1_a_bf16_model_is_conditioned_on_the_float32_timestep(loaded: Any) -> None:
    """CASES 1: 978.2609 and 681.8182, within 1e-3."""
    family: ModelFamily = loaded.family_of(dtype=DType.BFLOAT16)
    denoiser = family.load_denoiser(torch.bfloat16)
    expert = next(iter(denoiser.experts.values()))
    seen: list[Tensor] = []
    module = expert.get_submodule(loaded.case.time_module)
    # After the family's own hook, which is made in the call.
    original = module.forward

    def seeing(first: Tensor, *more: Any) -> Any:
        seen.append(first)
        return original(first, *more)

    module.forward = seeing
    conditioning = loaded.encode(("a", "blue"), 1.0)
    found = denoiser.velocity(loaded.noise(2), step_at(*SIGMAS), conditioning, NO_GUIDANCE)
    assert seen[0].dtype == torch.float32
    expected = loaded.case.time_input(torch.tensor(SIGMAS))
    torch.testing.assert_close(seen[0], expected, rtol=0.0, atol=1e-3)
    for value in found.values():
        assert value.dtype == torch.float32
        assert value.isfinite().all()


@torch.no_grad()
def test_float64_is_kept(loaded: Any) -> None:
    family = loaded.family_of(dtype=DType.FLOAT64)
    conditioning = loaded.encode(("a",), 1.0)
    found = family.load_denoiser(torch.float64).velocity(
        loaded.noise(1), step_at(0.5), conditioning, NO_GUIDANCE
    )
    for value in found.values():
        assert value.dtype == torch.float64


# -- modules --------------------------------------------------------------------------------------


def test_lora_targets_and_shard_units_are_in_the_module(loaded: Any) -> None:
    for name, expert in loaded.denoiser.experts.items():
        lora.check_targets(expert, loaded.denoiser.lora_targets, name=name)
        units = loaded.denoiser.shard_units(expert)
        assert tuple(type(unit).__name__ for unit in units) == loaded.case.blocks
        assert all(isinstance(unit, nn.Module) for unit in units)
    assert tuple(loaded.denoiser.experts) == loaded.family.expert_names
    routes = [
        loaded.denoiser.route(step, loaded.schedule) for step in range(loaded.schedule.num_steps)
    ]
    assert set(routes) == set(loaded.family.expert_names)
    assert loaded.family.lora_targets == loaded.denoiser.lora_targets
    assert tuple(loaded.shapes) == loaded.family.modalities


def test_a_size_that_does_not_fit_is_named(loaded: Any) -> None:
    size = attrs.evolve(loaded.case.size, height=loaded.case.size.height + 1)
    with pytest.raises(ValueError, match=rf"height {size.height} does not fit: a multiple of"):
        loaded.codec.latent_shapes(size)
    with pytest.raises(ValueError, match=r"num_frames 5"):
        loaded.codec.latent_shapes(
            DiffusionPipelineConfig(
                height=loaded.case.size.height, width=loaded.case.size.width, num_frames=5
            )
        )


def test_more_text_than_stock_takes_is_refused(loaded: Any) -> None:
    size = attrs.evolve(loaded.case.size, max_sequence_length=5000)
    with pytest.raises(ValueError, match=r"max_sequence_length 5000: .* at most"):
        loaded.family_of(pipeline=size).load_conditioner(torch.float32)
