"""The SD3 family against the stock pipeline of the same folder, beyond what families/ asks of every family."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from omni_core.model import NO_GUIDANCE, Guidance, Step, TextLayout
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
)
from omni_core.schedule import FlowMatchSchedule
from omni_engine_fsdp.families.sd3 import SD3Family
from tiny_models.sd3 import build_tiny_sd3

PROMPTS = ["a red sign", 'photo of the sign that reads "42"', "blue"]
STOCK_SHIFT_3 = [  # NUMERICS: the shift applied twice, as diffusers does on its default path
    1.0,
    0.9601293206214905,
    0.9133489727973938,
    0.857692301273346,
    0.7903682589530945,
    0.7072784900665283,
    0.602150559425354,
    0.4648760259151459,
    0.2780487835407257,
    0.008928571827709675,
    0.0,
]


def model_config(path: Path, **changes: Any) -> DiffusionModelConfig:
    pipeline = DiffusionPipelineConfig(height=32, width=32, max_sequence_length=16)
    return attrs.evolve(DiffusionModelConfig(path=str(path), pipeline=pipeline), **changes)


def stock_pipeline(path: Path, **keywords: Any) -> Any:
    stock: Any = StableDiffusion3Pipeline
    pipeline = stock.from_pretrained(path, local_files_only=True, **keywords)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def family(tiny_sd3: Path) -> SD3Family:
    return SD3Family(model_config(tiny_sd3))


def copied(tiny_sd3: Path, tmp_path: Path, **index: Any) -> Path:
    """A copy of the pipeline with entries of its index changed (None removes one)."""
    path = tmp_path / "copy"
    shutil.copytree(tiny_sd3, path)
    entries = json.loads((path / "model_index.json").read_text())
    entries.update(index)
    kept = {name: value for name, value in entries.items() if value is not None}
    (path / "model_index.json").write_text(json.dumps(kept))
    return path


# -- the folder -----------------------------------------------------------------------------------


def test_nothing_is_read_until_a_part_is_asked_for() -> None:
    assert SD3Family(DiffusionModelConfig(path="/nowhere")).config.path == "/nowhere"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent.*does not exist"):
        SD3Family(model_config(tmp_path / "absent")).load_denoiser(torch.float32)


def test_a_folder_without_an_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no model_index\.json"):
        SD3Family(model_config(tmp_path)).load_codec(torch.float32)


def test_an_index_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(ValueError, match=r"model_index\.json: not JSON"):
        SD3Family(model_config(tmp_path)).load_codec(torch.float32)


def test_another_pipeline_is_refused(tiny_sd3: Path, tmp_path: Path) -> None:
    path = copied(tiny_sd3, tmp_path, _class_name="FluxPipeline")
    with pytest.raises(ValueError, match=r"'sd3' serves StableDiffusion3Pipeline.*FluxPipeline"):
        SD3Family(model_config(path)).load_denoiser(torch.float32)


def test_a_missing_component_is_named(tiny_sd3: Path, tmp_path: Path) -> None:
    path = copied(tiny_sd3, tmp_path)
    shutil.rmtree(path / "vae")
    with pytest.raises(FileNotFoundError, match="component 'vae'"):
        SD3Family(model_config(path)).load_codec(torch.float32)


def test_a_component_of_another_class_is_refused(tiny_sd3: Path, tmp_path: Path) -> None:
    path = copied(tiny_sd3, tmp_path, transformer=["diffusers", "FluxTransformer2DModel"])
    with pytest.raises(ValueError, match=r"must be SD3Transformer2DModel, got FluxTransformer2D"):
        SD3Family(model_config(path)).load_denoiser(torch.float32)


# -- the conditioner ------------------------------------------------------------------------------


@torch.no_grad()
def stock_encoding(pipeline: Any, prompts: list[str], *, guided: bool, negative: str) -> list[Any]:
    text, negative_text, pooled, negative_pooled = pipeline.encode_prompt(
        prompts,
        None,
        None,
        do_classifier_free_guidance=guided,
        negative_prompt=negative,
        max_sequence_length=16,
    )
    return [text, pooled, negative_text, negative_pooled]


@pytest.mark.parametrize("negative", ["", "a blue photo"])
def test_encoding_equals_stock_bit_for_bit(
    family: SD3Family, tiny_sd3: Path, negative: str
) -> None:
    conditioner = family.load_conditioner(torch.float32)
    found = conditioner.encode(PROMPTS, negative_prompt=negative, guidance=Guidance(scale=4.5))
    expected = stock_encoding(stock_pipeline(tiny_sd3), PROMPTS, guided=True, negative=negative)
    assert found.rows == 3
    for ours, theirs in zip(attrs.astuple(found, recurse=False), expected, strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad
        assert not ours.is_inference()


def test_without_guidance_there_is_no_negative_branch(family: SD3Family, tiny_sd3: Path) -> None:
    found = family.load_conditioner(torch.float32).encode(
        PROMPTS, negative_prompt="", guidance=NO_GUIDANCE
    )
    expected = stock_encoding(stock_pipeline(tiny_sd3), PROMPTS, guided=False, negative="")
    assert torch.equal(found.prompt_embeds, expected[0])
    assert torch.equal(found.pooled, expected[1])
    assert found.negative_prompt_embeds is None
    assert found.negative_pooled is None


def test_a_missing_third_encoder_is_zeros_as_in_stock(tiny_sd3: Path, tmp_path: Path) -> None:
    absent = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    path = copied(tiny_sd3, tmp_path, **absent)
    found = (
        SD3Family(model_config(path))
        .load_conditioner(torch.float32)
        .encode(PROMPTS, negative_prompt="", guidance=Guidance(scale=2.0))
    )
    stock = stock_pipeline(path, text_encoder_3=None, tokenizer_3=None)
    expected = stock_encoding(stock, PROMPTS, guided=True, negative="")
    for ours, theirs in zip(attrs.astuple(found, recurse=False), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not found.prompt_embeds[:, 16:].any()


def test_case_9_fixed_text_keeps_the_stock_length(family: SD3Family) -> None:
    conditioner = family.load_conditioner(torch.float32)
    assert conditioner.layout is TextLayout.FIXED
    for prompt in ("a", " ".join(["sign"] * 40)):
        found = conditioner.encode([prompt], negative_prompt="", guidance=NO_GUIDANCE)
        assert found.prompt_embeds.shape == (1, 16 + 16, 32)  # CLIP's tokens and T5's


def test_case_9_the_configured_length_is_the_models(tiny_sd3: Path) -> None:
    pipeline = DiffusionPipelineConfig(height=32, width=32, max_sequence_length=24)
    family = SD3Family(model_config(tiny_sd3, pipeline=pipeline))
    found = family.load_conditioner(torch.float32).encode(
        ["a"], negative_prompt="", guidance=NO_GUIDANCE
    )
    assert found.prompt_embeds.shape == (1, 16 + 24, 32)


def test_more_text_than_stock_takes_is_refused(tiny_sd3: Path) -> None:
    pipeline = DiffusionPipelineConfig(max_sequence_length=513)
    with pytest.raises(ValueError, match=r"max_sequence_length 513: .* at most 512"):
        SD3Family(model_config(tiny_sd3, pipeline=pipeline)).load_conditioner(torch.float32)


def test_prompts_are_counted_by_the_encoder_that_reads_most(
    family: SD3Family, tiny_sd3: Path, tmp_path: Path
) -> None:
    """T5's tokenizer and the configured length; without T5, CLIP's and its own."""
    prompts = ["a red sign", " ".join(["red"] * 20)]
    found = family.prompt_lengths(prompts)
    tokenizer = stock_pipeline(tiny_sd3).tokenizer_3
    assert [length.tokens for length in found] == [len(tokenizer(p).input_ids) for p in prompts]
    assert [length.limit for length in found] == [16, 16]
    assert [length.cut for length in found] == [False, True]

    shutil.copytree(tiny_sd3, tmp_path / "two")
    index = json.loads((tmp_path / "two/model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (tmp_path / "two/model_index.json").write_text(json.dumps(index))
    clip = SD3Family(model_config(tmp_path / "two")).prompt_lengths(prompts)
    assert {length.limit for length in clip} == {
        stock_pipeline(tiny_sd3).tokenizer.model_max_length
    }


def test_guidance_below_one_is_refused(family: SD3Family) -> None:
    conditioner = family.load_conditioner(torch.float32)
    with pytest.raises(ValueError, match=r"guidance_scale 0\.5: .*take 1\.0"):
        conditioner.encode(["a"], negative_prompt="", guidance=Guidance(scale=0.5))


# -- the denoiser ---------------------------------------------------------------------------------


def rows(family: SD3Family, scale: float, prompts: list[str]) -> tuple[Any, Any]:
    """Latents and conditioning of one row for each prompt."""
    latents = torch.randn(len(prompts), 8, 8, 8, generator=torch.Generator().manual_seed(3))
    conditioning = family.load_conditioner(torch.float32).encode(
        prompts, negative_prompt="blue", guidance=Guidance(scale=scale)
    )
    return {"image": latents}, conditioning


def step_at(*sigmas: float) -> Step:
    return Step(index=torch.arange(len(sigmas)), sigma=torch.tensor(sigmas))


@torch.no_grad()
def test_case_1_a_bf16_model_is_conditioned_on_the_float32_timestep(tiny_sd3: Path) -> None:
    family = SD3Family(model_config(tiny_sd3, dtype=DType.BFLOAT16))
    denoiser = family.load_denoiser(torch.bfloat16)
    seen: list[torch.Tensor] = []
    transformer: Any = denoiser.transformer
    transformer.time_text_embed.time_proj.register_forward_hook(
        lambda _, inputs, output: seen.extend([inputs[0], output])
    )
    latents, conditioning = rows(family, 1.0, ["a", "blue"])
    found = denoiser.velocity(latents, step_at(0.97826087, 0.68181819), conditioning, NO_GUIDANCE)
    timestep, sinusoids = seen
    assert timestep.dtype == torch.float32
    torch.testing.assert_close(timestep, torch.tensor([978.2609, 681.8182]), rtol=0.0, atol=1e-3)
    # Frequency 0 is 1, so the first sine is that of the timestep itself: cosines come first.
    torch.testing.assert_close(
        sinusoids[:, 128].double(), timestep.double().sin(), rtol=0.0, atol=1e-4
    )
    assert sinusoids.dtype == torch.float32
    assert denoiser.dtype == torch.bfloat16
    assert found["image"].dtype == torch.float32


# -- the schedule ---------------------------------------------------------------------------------


def test_the_stock_schedule_is_what_the_stock_pipeline_produces(
    family: SD3Family, tiny_sd3: Path
) -> None:
    found = family.schedule(DiffusionSamplingConfig(num_inference_steps=10))
    assert found.values() == tuple(torch.tensor(STOCK_SHIFT_3).tolist())
    pipeline = stock_pipeline(tiny_sd3)
    pipeline("a", height=32, width=32, max_sequence_length=16, num_inference_steps=10)
    assert torch.equal(found.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(found.timesteps, pipeline.scheduler.timesteps)


def test_the_stock_schedule_with_shift_1(tmp_path: Path) -> None:
    path = build_tiny_sd3(tmp_path / "shift1", shift=1.0)
    family = SD3Family(model_config(path))
    found = family.schedule(DiffusionSamplingConfig(num_inference_steps=10))
    expected = [1.0, 0.889, 0.778, 0.667, 0.556, 0.445, 0.334, 0.223, 0.112, 0.001, 0.0]
    torch.testing.assert_close(found.sigmas, torch.tensor(expected), rtol=0.0, atol=1e-6)


def test_a_dynamic_shift_is_that_of_the_configured_size(tiny_sd3: Path, tmp_path: Path) -> None:
    path = copied(tiny_sd3, tmp_path)
    file = path / "scheduler" / "scheduler_config.json"
    changed = {**json.loads(file.read_text()), "use_dynamic_shifting": True, "max_shift": 9.0}
    file.write_text(json.dumps(changed))
    found = []
    for height in (16, 32):
        pipeline = DiffusionPipelineConfig(height=height, width=32, max_sequence_length=16)
        family = SD3Family(model_config(path, pipeline=pipeline))
        found.append(family.schedule(DiffusionSamplingConfig(num_inference_steps=6)))
        stock = stock_pipeline(path)
        stock("a", height=height, width=32, max_sequence_length=16, num_inference_steps=6)
        assert torch.equal(found[-1].sigmas, stock.scheduler.sigmas)
    assert found[0].difference(found[1])


def test_a_linear_schedule_is_explicit(family: SD3Family) -> None:
    sampling = DiffusionSamplingConfig(num_inference_steps=4, schedule="linear", shift=2.0)
    assert family.schedule(sampling).difference(FlowMatchSchedule.linear(4, shift=2.0)) is None


# -- the codec ------------------------------------------------------------------------------------


def test_latent_shapes(family: SD3Family) -> None:
    codec = family.load_codec(torch.float32)
    size = DiffusionPipelineConfig(height=16, width=32)
    assert codec.latent_shapes(size) == {"image": (8, 4, 8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"height": 30},
            "height 30 does not fit: a multiple of 8 up to 32 does; nearest: 24 or 32",
        ),
        ({"width": 3}, "width 3 does not fit: a multiple of 8 up to 32 does; nearest: 8$"),
        ({"width": 64}, "width 64 does not fit: a multiple of 8 up to 32 does; nearest: 32$"),
        ({"height": 12, "width": 20}, "height 12 .*nearest: 8 or 16; width 20 .*: 16 or 24"),
        ({"num_frames": 5}, "num_frames 5: .*take 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    family: SD3Family, changes: dict[str, int], message: str
) -> None:
    codec = family.load_codec(torch.float32)
    size = attrs.evolve(DiffusionPipelineConfig(height=32, width=32), **changes)
    with pytest.raises(ValueError, match=message):
        codec.latent_shapes(size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoded_pixels_are_those_of_the_stock_pictures(
    family: SD3Family, tiny_sd3: Path, dtype: torch.dtype
) -> None:
    pipeline = stock_pipeline(tiny_sd3, dtype=dtype)
    latents = torch.randn(2, 8, 4, 8, generator=torch.Generator().manual_seed(5)) * 2
    pictures = pipeline(
        prompt=["a", "blue"],
        height=16,
        width=32,
        max_sequence_length=16,
        num_inference_steps=1,
        sigmas=[1e-30],  # leaves the latents as they are: the codec alone is compared
        latents=latents.to(dtype),
        output_type="pil",
    ).images
    final = latents.to(dtype).float()
    found = family.load_codec(dtype).decode({"image": final}).image
    assert found is not None
    assert found.dtype == torch.uint8
    assert found.shape == (2, 16, 32, 3)
    assert np.array_equal(found.numpy(), np.stack([np.asarray(picture) for picture in pictures]))


@pytest.mark.skipif(
    find_spec("torchao") is not None, reason="torchao says things of its own when it is imported"
)
def test_loading_the_family_says_nothing_of_what_it_does_without() -> None:
    """transformers tells of image processors without torchvision as stock pipelines are imported."""
    found = subprocess.run(
        [sys.executable, "-c", "import omni_engine_fsdp.families.sd3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert found.stderr == ""
