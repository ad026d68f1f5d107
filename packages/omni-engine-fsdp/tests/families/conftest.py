"""Every model family beside the stock pipeline of the same folder.

A family joins by one more `Case`; the tests of test_families.py then hold for it. Letters: B rows, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from family_under_test import PROMPTS, SEEDS, FamilyUnderTest
from PIL import Image
from torch import Tensor

from omni_core.input_image import InputImage
from omni_core.model import EditConditioner, Guidance
from omni_core.options import DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.reverse_step import StepKind
from omni_core.testing.samples import requests_for
from omni_core.trajectory import RolloutRequest, SamplingSpec
from omni_engine_fsdp.families.packing import pack, unpack
from omni_engine_fsdp.families.qwen_image_edit import QwenImageEditFamily
from omni_engine_fsdp.sampling import SampledBatch, SamplingBatch, SamplingRule, sample
from tiny_models import build_tiny

Latents = Mapping[str, Tensor]


def pictures(count: int) -> list[Tensor]:
    """Images to be edited, of the size that they are brought to: of several, stock resizes none for its encoder."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, 256, (32, 64, 3), generator=generator).to(torch.uint8)
        for _ in range(count)
    ]


def same(value: Any, like: Latents) -> Latents:
    """The pipeline holds latents as we do."""
    del like
    return {"image": value}


def unpacked(value: Tensor, like: Latents) -> Latents:
    """The pipeline holds packed 2 x 2 patches."""
    return {"image": unpack(value, like["image"])}


def flattened(value: Tensor, like: Latents) -> Latents:
    """The pipeline holds a sequence of latents."""
    return {"image": value.transpose(1, 2).reshape(like["image"].shape)}


def plainly(negative: Tensor, positive: Tensor, scale: float) -> Tensor:
    return negative + scale * (positive - negative)


def at_norm(negative: Tensor, positive: Tensor, scale: float) -> Tensor:
    """Each patch has the norm that it has without guidance."""
    combined, like = pack(plainly(negative, positive, scale)), pack(positive)
    norms = [value.norm(dim=-1, keepdim=True) for value in (like, combined)]
    return unpack(combined * (norms[0] / norms[1]), positive)


@attrs.frozen(kw_only=True)
class Case:
    """What differs between families when they are compared with stock."""

    name: str
    size: DiffusionPipelineConfig
    guided: float = 4.5
    """A scale at which the family guides."""
    negative: str = "blue photo"
    """One that the stock pipeline can be called with."""
    from_stock: Callable[[Any, Latents], Latents] = same
    """What the pipeline gives its scheduler -> our latents, shaped like the second argument."""
    batched: bool = True
    """The stock pipeline runs both branches as one batch, as we do: equal bit for bit when guided, too."""
    time_module: str = ""
    """Path of the transformer's module whose first input is the timestep that conditions it."""
    time_input: Callable[[Tensor], Tensor] = lambda sigma: sigma * 1000
    """Sigma -> what that module should get."""
    blocks: tuple[str, ...] = ()
    """Class names of the shard units."""
    combine: Callable[[Tensor, Tensor, float], Tensor] = plainly
    """Negative and conditional velocity, and the scale -> what guidance makes of them."""


SIZE = DiffusionPipelineConfig(height=16, width=32, max_sequence_length=16)

CASES = (
    Case(
        name="sd3",
        size=SIZE,
        time_module="time_text_embed.time_proj",
        blocks=("JointTransformerBlock",) * 2,
    ),
    Case(
        name="flux",
        size=SIZE,
        negative="",
        from_stock=unpacked,
        time_module="time_text_embed.time_proj",
        blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    ),
    Case(
        name="flux2",
        size=attrs.evolve(SIZE, max_sequence_length=48),
        negative="",
        from_stock=flattened,
        batched=False,
        time_module="time_guidance_embed.time_proj",
        blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    ),
    Case(
        name="qwen_image",
        size=attrs.evolve(SIZE, max_sequence_length=256),
        from_stock=unpacked,
        batched=False,
        time_module="time_text_embed.time_proj",
        time_input=lambda sigma: sigma,
        blocks=("QwenImageTransformerBlock",) * 2,
        combine=at_norm,
    ),
    Case(
        name="qwen_image_edit",
        size=attrs.evolve(SIZE, max_sequence_length=512, input_image_area=32 * 64),
        from_stock=unpacked,
        batched=False,
        time_module="time_text_embed.time_proj",
        time_input=lambda sigma: sigma,
        blocks=("QwenImageTransformerBlock",) * 2,
        combine=at_norm,
    ),
    Case(
        name="z_image",
        size=attrs.evolve(SIZE, max_sequence_length=64),
        from_stock=lambda value, like: {"image": value},
        time_module="t_embedder",
        time_input=lambda sigma: 1000 - sigma * 1000,
        blocks=("ZImageTransformerBlock",) * 3,
    ),
    Case(
        name="sana",
        size=DiffusionPipelineConfig(height=32, width=64, max_sequence_length=32),
        time_module="time_embed.emb.time_proj",
        blocks=("SanaTransformerBlock",),
    ),
)


@attrs.frozen(kw_only=True)
class StockStep:
    """One call of the stock pipeline's scheduler."""

    sample: Any
    velocity: Any
    next_sample: Any


class Loaded(FamilyUnderTest):
    """One of the families above, and its stock pipeline."""

    def encode(self, prompts: Sequence[str], scale: float, negative: str = "") -> Any:
        """Encode prompts; where images are edited, each with one of its own."""
        said: dict[str, Any] = {"negative_prompt": negative, "guidance": Guidance(scale=scale)}
        if isinstance(self.conditioner, EditConditioner):
            edited = pictures(len(prompts))
            return self.conditioner.encode_edits(list(prompts), edited, self.codec, **said)
        return self.conditioner.encode(list(prompts), **said)

    def requests(self, spec: SamplingSpec, prompts: Sequence[str]) -> list[RolloutRequest]:
        """Two samples of each prompt; where images are edited, each with one of its own."""
        asked = requests_for(spec, prompts)
        if "image" not in self.family.inputs:
            return asked
        edited = [InputImage.of(picture) for picture in pictures(len(prompts))]
        return [attrs.evolve(r, image=i) for r, i in zip(asked, edited, strict=True)]

    def stock(self, **keywords: Any) -> Any:
        """The stock pipeline of the folder; its processor of videos would need torchvision.

        It brings images to a megapixel each; here to what the case says.
        """
        if isinstance(self.family, QwenImageEditFamily):
            keywords["processor"] = self.family.load_processor()
            reckoned, area = calculate_dimensions, self.case.size.input_image_area
            pipeline_qwenimage_edit.calculate_dimensions = lambda _, ratio: reckoned(area, ratio)
        return super().stock(**keywords)

    def ode(self, scale: float, negative: str) -> SampledBatch:
        """The sampling loop without randomness."""
        return sample(
            self.denoiser,
            SamplingBatch(
                seeds=SEEDS,
                windows=[()] * len(SEEDS),
                conditioning=self.encode(PROMPTS, scale, negative),
            ),
            SamplingRule(
                schedule=self.schedule,
                guidance=Guidance(scale=scale),
                kind=StepKind.ODE,
                noise_level=0.0,
            ),
            shapes=self.shapes,
            device=torch.device("cpu"),
        )

    def run_stock(self, scale: float, negative: str, pipeline: Any = None) -> list[StockStep]:
        """Let the stock pipeline draw the samples of `SEEDS`; returns what its scheduler saw."""
        return self.draw_stock(scale, negative, pipeline)[0]

    def draw_stock(
        self, scale: float, negative: str, pipeline: Any = None, *, output_type: str = "latent"
    ) -> tuple[list[StockStep], Any]:
        """The same, and what the pipeline returned."""
        pipeline = pipeline or self.pipeline
        scheduler, steps = pipeline.scheduler, []
        step = scheduler.step

        def recording(velocity: Any, timestep: Any, state: Any, *args: Any, **more: Any) -> Any:
            result = step(velocity, timestep, state, *args, **more)
            steps.append(StockStep(sample=state, velocity=velocity, next_sample=result[0]))
            return result

        scheduler.step = recording
        call = self.family.stock_call(
            DiffusionSamplingConfig(
                num_inference_steps=FamilyUnderTest.steps,
                guidance_scale=scale,
                negative_prompt=negative,
            )
        )
        if "negative_prompt" in call:  # one for each prompt
            call["negative_prompt"] = [negative] * len(PROMPTS)
        if "image" in self.family.inputs:
            call["image"] = [Image.fromarray(each.numpy()) for each in pictures(len(PROMPTS))]
        try:
            drawn = pipeline(
                prompt=list(PROMPTS),
                generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
                output_type=output_type,
                **call,
            )
        finally:
            del scheduler.step
        return steps, drawn

    def ours(self, value: Any) -> Latents:
        """Stock latents as we hold them."""
        return self.case.from_stock(value, self.noise(len(SEEDS)))


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a family's tiny pipeline, once."""
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            made[name] = build_tiny(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return path


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def loaded(request: pytest.FixtureRequest, tiny_path: Callable[[str], Path]) -> Loaded:
    """One family after the other."""
    return Loaded(request.param, tiny_path(request.param.name))


@pytest.fixture(scope="session")
def case_names() -> tuple[str, ...]:
    """Families that are compared."""
    return tuple(case.name for case in CASES)
