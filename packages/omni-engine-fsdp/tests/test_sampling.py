"""The sampling loop against the stock pipeline, and its noise and log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from omni_core.model import Denoiser, Guidance, Step
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
)
from omni_core.reverse_step import StepKind, reverse_step
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import initial_noise, step_noise
from omni_core.trajectory import Conditioning
from omni_engine_fsdp.families.sd3 import SD3Family
from omni_engine_fsdp.sampling import SampledBatch, SamplingBatch, SamplingRule, sample

PROMPTS = ["a red sign", 'photo of the sign that reads "42"', "blue"]
SEEDS = (11, 2**40 + 7, 13)
CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture(scope="module")
def family(tiny_sd3: Path) -> SD3Family:
    return SD3Family(
        DiffusionModelConfig(
            path=str(tiny_sd3),
            pipeline=DiffusionPipelineConfig(height=16, width=32, max_sequence_length=16),
        )
    )


@attrs.frozen
class Parts:
    """What the loop needs of a family, loaded once."""

    denoiser: Denoiser
    conditioner: Any
    shapes: dict[str, tuple[int, ...]]
    schedule: FlowMatchSchedule

    def sample(
        self,
        prompts: Sequence[str] = PROMPTS,
        seeds: Sequence[int] = SEEDS,
        windows: Sequence[tuple[int, ...]] | None = None,
        *,
        scale: float = 1.0,
        kind: StepKind = StepKind.SDE,
        noise_level: float = 0.7,
        negative: str = "",
    ) -> SampledBatch:
        guidance = Guidance(scale=scale)
        conditioning = self.conditioner.encode(prompts, negative_prompt=negative, guidance=guidance)
        return sample(
            self.denoiser,
            SamplingBatch(
                seeds=seeds,
                windows=windows if windows is not None else [()] * len(seeds),
                conditioning=conditioning,
            ),
            SamplingRule(
                schedule=self.schedule, guidance=guidance, kind=kind, noise_level=noise_level
            ),
            shapes=self.shapes,
            device=CPU,
        )


@pytest.fixture(scope="module")
def parts(family: SD3Family) -> Parts:
    return Parts(
        denoiser=family.load_denoiser(torch.float32),
        conditioner=family.load_conditioner(torch.float32),
        shapes=family.load_codec(torch.float32).latent_shapes(family.config.pipeline),
        schedule=family.schedule(DiffusionSamplingConfig(num_inference_steps=STEPS)),
    )


# -- against stock --------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "negative"), [(1.0, ""), (4.5, ""), (4.5, "blue photo")])
def test_ode_latents_equal_the_stock_pipelines(
    parts: Parts, tiny_sd3: Path, scale: float, negative: str
) -> None:
    stock: Any = StableDiffusion3Pipeline
    pipeline = stock.from_pretrained(tiny_sd3, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        PROMPTS,
        negative_prompt=[negative] * 3,
        height=16,
        width=32,
        max_sequence_length=16,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type="latent",
    ).images
    found = parts.sample(scale=scale, negative=negative, kind=StepKind.ODE, noise_level=0.0)
    assert found.latents["image"].shape == (3, STEPS + 1, 8, 4, 8)
    torch.testing.assert_close(found.latents["image"][:, -1], expected, rtol=0.0, atol=1e-5)
    assert found.log_probs.isnan().all()


def test_case_3_noise_level_0_is_the_euler_step(parts: Parts) -> None:
    euler = parts.sample(kind=StepKind.ODE, noise_level=0.0)
    for kind in StepKind:
        found = parts.sample(kind=kind, noise_level=0.0)
        torch.testing.assert_close(
            found.latents["image"], euler.latents["image"], rtol=0.0, atol=1e-6
        )
        assert found.latents["image"].isfinite().all()


@pytest.mark.parametrize("kind", list(StepKind))
def test_case_3_a_log_prob_of_a_deterministic_step_is_refused(parts: Parts, kind: StepKind) -> None:
    with pytest.raises(ValueError, match="deterministic step has no log-prob"):
        parts.sample(windows=[(0, 1)] * 3, kind=kind, noise_level=0.0)


def test_the_last_step_is_never_stochastic(parts: Parts) -> None:
    with pytest.raises(ValueError, match="ends at sigma 0 and is never stochastic"):
        parts.sample(windows=[(STEPS - 1,)] * 3)


# -- noise belongs to a sample --------------------------------------------------------------------


def test_case_18_a_sample_is_the_same_alone_in_any_batch_and_at_any_place(parts: Parts) -> None:
    windows = [(0, 1, 2), (1,), (0, 2, 4)]
    together = parts.sample(windows=windows, scale=4.5)
    backwards = parts.sample(PROMPTS[::-1], SEEDS[::-1], windows[::-1], scale=4.5)
    for row in range(3):
        alone = parts.sample([PROMPTS[row]], [SEEDS[row]], [windows[row]], scale=4.5)
        first = initial_noise(SEEDS[row], parts.shapes)["image"]
        for other, place in ((together, row), (backwards, 2 - row), (alone, 0)):
            states = other.latents["image"][place]
            assert torch.equal(states[0], first[0])  # the noise, exactly
            torch.testing.assert_close(states, alone.latents["image"][0], rtol=0.0, atol=1e-4)
            torch.testing.assert_close(
                other.log_probs[place], alone.log_probs[0], rtol=0.0, atol=1e-5, equal_nan=True
            )


def test_steps_and_samples_have_noise_of_their_own(parts: Parts) -> None:
    drawn = [step_noise(seed, step, parts.shapes)["image"] for seed in SEEDS for step in (0, 1)]
    first = [initial_noise(seed, parts.shapes)["image"] for seed in SEEDS]
    distinct = {tensor.numpy().tobytes() for tensor in (*drawn, *first)}
    assert len(distinct) == 9


# -- windows --------------------------------------------------------------------------------------


def test_rows_of_different_windows_share_a_batch(parts: Parts) -> None:
    windows = [(0, 1, 2, 3, 4), (), (2, 3)]
    found = parts.sample(windows=windows)
    ode = parts.sample(kind=StepKind.ODE, noise_level=0.0)
    stochastic = parts.sample(windows=[(0, 1, 2, 3, 4)] * 3)
    states, euler, noisy = (each.latents["image"] for each in (found, ode, stochastic))
    for row, window in enumerate(windows):
        assert found.log_probs[row].isfinite().nonzero().flatten().tolist() == list(window)
    torch.testing.assert_close(states[0], noisy[0], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(states[1], euler[1], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(states[2, :3], euler[2, :3], rtol=0.0, atol=1e-5)
    assert (states[2, 3] - euler[2, 3]).abs().max() > 1e-2


# -- what is scored is what is stored -------------------------------------------------------------


@pytest.mark.parametrize("kind", [StepKind.SDE, StepKind.CPS, StepKind.DANCE_SDE])
@torch.no_grad()
def test_replayed_log_probs_are_bit_equal(parts: Parts, kind: StepKind) -> None:
    window = (0, 1, 4)
    guidance = Guidance(scale=3.0)
    found = parts.sample(windows=[window] * 3, kind=kind, scale=3.0)
    conditioning = parts.conditioner.encode(PROMPTS, negative_prompt="", guidance=guidance)
    for index in window:
        rows = torch.full((3,), index)
        sigma, sigma_next = parts.schedule.at(rows)
        state = {"image": found.latents["image"][:, index]}
        velocity = parts.denoiser.velocity(
            state, Step(index=rows, sigma=sigma), conditioning, guidance
        )
        scored = reverse_step(
            kind,
            state,
            velocity,
            sigma,
            sigma_next,
            sigma_guard=parts.schedule.sigma_guard,
            noise_level=0.7,
            next_sample={"image": found.latents["image"][:, index + 1]},
        )
        assert torch.equal(scored.require_log_prob(), found.log_probs[:, index])


class Rounding(Denoiser):
    """A denoiser in float64, and of two modalities: nothing of the loop is an image's."""

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        return {"only": nn.Identity()}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return ()

    def shard_units(self, expert: nn.Module) -> Sequence[nn.Module]:
        return []

    def velocity(
        self, latents: Any, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> dict[str, Tensor]:
        return {name: (value.double() * 1.1).sin() for name, value in latents.items()}


def test_case_4_what_is_scored_is_what_is_stored() -> None:
    schedule = FlowMatchSchedule.linear(4)
    shapes = {"image": (2, 5, 3), "audio": (7,)}
    rule = SamplingRule(
        schedule=schedule, guidance=Guidance(scale=1.0), kind=StepKind.SDE, noise_level=0.03
    )
    batch = SamplingBatch(seeds=(1, 2), windows=[(0, 1, 2), (1,)], conditioning=Conditioning())
    found = sample(Rounding(), batch, rule, shapes=shapes, device=CPU)
    assert {name: value.dtype for name, value in found.latents.items()} == {
        "image": torch.float32,
        "audio": torch.float32,
    }
    state = {name: value[:, 1] for name, value in found.latents.items()}
    velocity = Rounding().velocity(state, None, Conditioning(), rule.guidance)  # type: ignore[arg-type]
    sigma, sigma_next = schedule.at(torch.tensor([1, 1]))
    scored = reverse_step(
        StepKind.SDE,
        state,
        velocity,
        sigma,
        sigma_next,
        sigma_guard=schedule.sigma_guard,
        noise_level=0.03,
        next_sample={name: value[:, 2] for name, value in found.latents.items()},
    )
    assert torch.equal(scored.require_log_prob().float(), found.log_probs[:, 1])


def test_sampled_tensors_can_be_trained_on(parts: Parts) -> None:
    found = parts.sample(windows=[(0,)] * 3)
    assert not found.latents["image"].is_inference()
    assert not found.latents["image"].requires_grad
    weight = torch.ones((), requires_grad=True)
    (found.latents["image"] * weight).sum().backward()
    assert weight.grad is not None


def test_case_1_every_step_is_conditioned_on_its_float32_timestep(tiny_sd3: Path) -> None:
    """Sampling in bf16: the timesteps reach the transformer unrounded."""
    config = DiffusionModelConfig(
        path=str(tiny_sd3),
        dtype=DType.BFLOAT16,
        pipeline=DiffusionPipelineConfig(height=16, width=32, max_sequence_length=16),
    )
    family = SD3Family(config)
    schedule = FlowMatchSchedule.from_values([1.0, 0.97826087, 0.68181819, 0.0])
    parts = Parts(
        denoiser=family.load_denoiser(torch.bfloat16),
        conditioner=family.load_conditioner(torch.bfloat16),
        shapes={"image": (8, 4, 8)},
        schedule=schedule,
    )
    seen: list[Tensor] = []
    transformer: Any = parts.denoiser.experts["transformer"]
    transformer.time_text_embed.time_proj.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    parts.sample(windows=[(0, 1)] * 3, scale=4.5)
    expected = torch.tensor([1000.0, 978.2609, 681.8182])
    for timestep, value in zip(seen, expected, strict=True):
        torch.testing.assert_close(timestep, value.expand(6), rtol=0.0, atol=1e-3)
