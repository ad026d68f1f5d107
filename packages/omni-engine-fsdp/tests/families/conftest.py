"""Every model family beside the stock pipeline of the same folder.

A family joins by one more `Case`; the tests of test_families.py then hold for it. Letters: B rows, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import diffusers
import pytest
import torch
from torch import Tensor

from omni_core import plugins
from omni_core.model import Conditioner, Denoiser, Guidance, ModelFamily
from omni_core.options import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.reverse_step import StepKind
from omni_core.schedule import FlowMatchSchedule
from omni_engine_fsdp.families.packing import pack, unpack
from omni_engine_fsdp.sampling import SampledBatch, SamplingBatch, SamplingRule, sample
from tiny_models import build_tiny

STEPS = 4
PROMPTS = ("a red sign", "blue")
SEEDS = (11, 2**40 + 7)

Latents = Mapping[str, Tensor]


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


@attrs.define(eq=False, slots=False)
class Loaded:
    """A family over its tiny pipeline, each part read once."""

    case: Case
    path: Path

    def family_of(self, **changes: Any) -> ModelFamily:
        """The family, with fields of the model's config changed."""
        config = DiffusionModelConfig(path=str(self.path), pipeline=self.case.size)
        plugin = plugins.registry(plugins.MODELS).get(self.case.name)
        built: ModelFamily = plugin.build(attrs.evolve(config, **changes))
        return built

    @cached_property
    def family(self) -> ModelFamily:
        return self.family_of()

    @cached_property
    def denoiser(self) -> Denoiser:
        return self.family.load_denoiser(torch.float32)

    @cached_property
    def conditioner(self) -> Conditioner:
        return self.family.load_conditioner(torch.float32)

    @cached_property
    def codec(self) -> Any:
        return self.family.load_codec(torch.float32)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.codec.latent_shapes(self.case.size))

    @cached_property
    def schedule(self) -> FlowMatchSchedule:
        return self.family.schedule(DiffusionSamplingConfig(num_inference_steps=STEPS))

    def encode(self, prompts: Sequence[str], scale: float, negative: str = "") -> Any:
        return self.conditioner.encode(
            list(prompts), negative_prompt=negative, guidance=Guidance(scale=scale)
        )

    def noise(self, rows: int, seed: int = 3) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(rows, *shape, generator=generator)
            for name, shape in self.shapes.items()
        }

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

    def stock(self, **keywords: Any) -> Any:
        """The stock pipeline of the folder."""
        kind = getattr(diffusers, self.family.pipeline_classes[0])
        pipeline = kind.from_pretrained(self.path, local_files_only=True, **keywords)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @cached_property
    def pipeline(self) -> Any:
        return self.stock()

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
                num_inference_steps=STEPS, guidance_scale=scale, negative_prompt=negative
            )
        )
        if "negative_prompt" in call:  # one for each prompt
            call["negative_prompt"] = [negative] * len(PROMPTS)
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
