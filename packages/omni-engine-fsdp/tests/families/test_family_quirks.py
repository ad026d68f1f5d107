"""What one family does that the others do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, SanaPipeline

from omni_core.choices import StepKind
from omni_core.model import NO_GUIDANCE, Guidance, ModelFamily, Step
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
)
from omni_engine_fsdp.families.flux import FluxFamily
from omni_engine_fsdp.families.flux2 import Flux2Family
from omni_engine_fsdp.families.sana import SanaFamily
from omni_engine_fsdp.families.z_image import ZImageFamily
from omni_engine_fsdp.sampling import SamplingBatch, SamplingRule, sample
from tiny_models.flux import build_tiny_flux
from tiny_models.flux2 import build_tiny_flux2
from tiny_models.sana import build_tiny_sana

SIZE = DiffusionPipelineConfig(height=32, width=32, max_sequence_length=48)
STEPS = DiffusionSamplingConfig(num_inference_steps=5)


def of(kind: type[ModelFamily], path: Path, **size: int) -> Any:
    pipeline = attrs.evolve(SIZE, **size)
    return kind(DiffusionModelConfig(path=str(path), pipeline=pipeline))


# -- FLUX.1 ---------------------------------------------------------------------------------------


def test_flux_refuses_a_negative_prompt(tiny_path: Callable[[str], Path]) -> None:
    conditioner = of(FluxFamily, tiny_path("flux")).load_conditioner(torch.float32)
    with pytest.raises(ValueError, match=r"negative_prompt: FLUX\.1 has no negative branch"):
        conditioner.encode(["a"], negative_prompt="ugly", guidance=Guidance(scale=3.5))


def test_flux_without_the_scale_as_an_input_takes_none(tmp_path: Path) -> None:
    """As FLUX.1-schnell."""
    family = of(FluxFamily, build_tiny_flux(tmp_path / "schnell", guidance_embeds=False))
    conditioner = family.load_conditioner(torch.float32)
    with pytest.raises(ValueError, match=r"guidance_scale 3\.5: this FLUX\.1 takes no guidance"):
        conditioner.encode(["a"], negative_prompt="", guidance=Guidance(scale=3.5))
    assert conditioner.encode(["a"], negative_prompt="", guidance=NO_GUIDANCE).rows == 1
    even = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    torch.testing.assert_close(family.schedule(STEPS).sigmas, even, rtol=0.0, atol=1e-6)


@torch.no_grad()
def test_flux_takes_its_guidance_scale_unrounded_in_bf16(
    tiny_path: Callable[[str], Path],
) -> None:
    """bf16 holds 3504, not 3500."""
    path = str(tiny_path("flux"))
    family = FluxFamily(DiffusionModelConfig(path=path, dtype=DType.BFLOAT16, pipeline=SIZE))
    denoiser = family.load_denoiser(torch.bfloat16)
    seen: list[torch.Tensor] = []
    module: Any = denoiser.transformer.get_submodule("time_text_embed.time_proj")
    sinusoids = module.forward

    def seeing(value: torch.Tensor) -> Any:
        seen.append(value)
        return sinusoids(value)

    module.forward = seeing
    conditioning = family.load_conditioner(torch.bfloat16).encode(
        ["a"], negative_prompt="", guidance=Guidance(scale=3.5)
    )
    step = Step(index=torch.tensor([0]), sigma=torch.tensor([0.5]))
    denoiser.velocity({"image": torch.zeros(1, 4, 8, 8)}, step, conditioning, Guidance(scale=3.5))
    assert [value.tolist() for value in seen] == [[500.0], [3500.0]]


def test_flux_shifts_its_schedule_by_size(tiny_path: Callable[[str], Path]) -> None:
    path = tiny_path("flux")
    small, large = (of(FluxFamily, path, height=side, width=side) for side in (16, 1024))
    assert (small.schedule(STEPS).sigmas[1:-1] < large.schedule(STEPS).sigmas[1:-1]).all()


# -- FLUX.2 ---------------------------------------------------------------------------------------


def test_a_distilled_flux2_takes_no_guidance(tmp_path: Path) -> None:
    family = of(Flux2Family, build_tiny_flux2(tmp_path / "distilled", distilled=True))
    conditioner = family.load_conditioner(torch.float32)
    with pytest.raises(ValueError, match=r"guidance_scale 4\.0: this FLUX\.2 is distilled"):
        conditioner.encode(["a"], negative_prompt="", guidance=Guidance(scale=4.0))
    assert conditioner.encode(["a"], negative_prompt="", guidance=NO_GUIDANCE).rows == 1


def test_flux2_encodes_a_negative_prompt_that_stock_leaves_empty(
    tiny_path: Callable[[str], Path],
) -> None:
    conditioner = of(Flux2Family, tiny_path("flux2")).load_conditioner(torch.float32)
    found = conditioner.encode(["a", "b"], negative_prompt="ugly", guidance=Guidance(scale=4.0))
    alone = conditioner.encode(["ugly"], negative_prompt="", guidance=NO_GUIDANCE)
    for row in found.negative_prompt_embeds:
        assert torch.equal(row, alone.prompt_embeds[0])


def test_flux2_shifts_its_schedule_by_the_number_of_steps(
    tiny_path: Callable[[str], Path],
) -> None:
    family = of(Flux2Family, tiny_path("flux2"))
    few, many = (
        family.schedule(DiffusionSamplingConfig(num_inference_steps=steps)) for steps in (4, 200)
    )
    assert few.sigmas[1] > many.sigmas[50]


# -- Z-Image --------------------------------------------------------------------------------------


def test_z_image_counts_guidance_from_one(tiny_path: Callable[[str], Path]) -> None:
    conditioner = of(ZImageFamily, tiny_path("z_image")).load_conditioner(torch.float32)
    with pytest.raises(ValueError, match=r"guidance_scale 0\.0: .*take 1\.0 for no guidance"):
        conditioner.encode(["a"], negative_prompt="", guidance=Guidance(scale=0.0))


# -- SANA -----------------------------------------------------------------------------------------


class FirstOrder(DPMSolverMultistepScheduler):
    """The published solver without its look back, and without cutting timesteps to whole numbers."""

    def set_timesteps(self, *args: Any, **keywords: Any) -> None:
        super().set_timesteps(*args, **keywords)
        self.timesteps = self.sigmas[:-1] * 1000


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
def test_sana_steps_through_the_solvers_sigmas_one_at_a_time(tmp_path: Path) -> None:
    path = build_tiny_sana(tmp_path / "solver", solver=True)
    family = of(SanaFamily, path)
    schedule = family.schedule(STEPS)
    pipeline = SanaPipeline.from_pretrained(path, local_files_only=True)
    pipeline.scheduler.set_timesteps(5)
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)

    pipeline.scheduler = FirstOrder.from_config(pipeline.scheduler.config, solver_order=1)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        ["a sign"],
        height=32,
        width=32,
        num_inference_steps=5,
        guidance_scale=1.0,
        max_sequence_length=48,
        use_resolution_binning=False,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
    ).images
    found = sample(
        family.load_denoiser(torch.float32),
        SamplingBatch(
            seeds=(3,),
            windows=[()],
            conditioning=family.load_conditioner(torch.float32).encode(
                ["a sign"], negative_prompt="", guidance=NO_GUIDANCE
            ),
        ),
        SamplingRule(schedule=schedule, guidance=NO_GUIDANCE, kind=StepKind.ODE, noise_level=0.0),
        shapes=family.load_codec(torch.float32).latent_shapes(family.config.pipeline),
        device=torch.device("cpu"),
    )
    torch.testing.assert_close(found.latents["image"][:, -1], expected, rtol=0.0, atol=1e-5)


def test_a_solver_of_another_noise_schedule_is_refused(tmp_path: Path) -> None:
    path = build_tiny_sana(tmp_path / "solver", solver=True)
    file = path / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_flow_sigmas": False}))
    with pytest.raises(ValueError, match="use_flow_sigmas false is not a flow-matching schedule"):
        of(SanaFamily, path).schedule(STEPS)


def test_another_scheduler_is_refused_by_name(
    tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(tiny_path("flux"), path)
    index = path / "model_index.json"
    entries = json.loads(index.read_text())
    entries["scheduler"] = ["diffusers", "DDIMScheduler"]
    index.write_text(json.dumps(entries))
    with pytest.raises(
        ValueError, match="must be FlowMatchEulerDiscreteScheduler, got DDIMScheduler"
    ):
        of(FluxFamily, path).schedule(STEPS)
