"""Qwen-Image, the second family: a file of names and shapes is all that it took.

No engine of ours trains it yet, so its velocity is computed here with diffusers' own transformer, and
sampled with the engine package's one loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from omni_core.choices import StepKind
from omni_core.families.qwen_image import QwenImageConditioning
from omni_core.model import Denoiser, Guidance, Step
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing.samples import requests_for
from omni_core.trajectory import Conditioning, RolloutRequest, SamplingSpec, Trajectory
from omni_engine_fsdp.sampling import SamplingBatch, SamplingRule, sample
from omni_rollout_vllm.families.qwen_image import QwenImage
from omni_rollout_vllm.rollout import VllmOmniRollout

SHAPES = {"image": (4, 4, 4)}
PROMPTS = ("a bright sign that says hello", "a room", "a green tree")


class Reference(Denoiser):
    """QwenImagePipeline's own step: two branches, combined and brought to the conditional one's norm."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer

    @property
    def experts(self) -> Mapping[str, nn.Module]:
        return {"transformer": self.transformer}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return ()

    def shard_units(self, expert: nn.Module) -> Sequence[nn.Module]:
        return []

    def velocity(
        self, latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
    ) -> Latents:
        assert isinstance(conditioning, QwenImageConditioning)
        family = QwenImage()
        packed = family.to_engine(latents)
        one = self._branch(packed, step, conditioning.prompt_embeds, conditioning.prompt_mask)
        if guidance.branches == 2:
            assert conditioning.negative_prompt_embeds is not None
            assert conditioning.negative_prompt_mask is not None
            other = self._branch(
                packed,
                step,
                conditioning.negative_prompt_embeds,
                conditioning.negative_prompt_mask,
            )
            both = other + guidance.scale * (one - other)
            one = both * (one.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
        return family.from_engine(one, SHAPES)

    def _branch(self, packed: Tensor, step: Step, text: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.transformer(
            hidden_states=packed,
            timestep=step.timestep / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, 2, 2)]] * len(packed),
            return_dict=False,
        )[0]
        return found


@pytest.fixture(scope="module")
def rollout(tiny_qwen: Path, qwen: Any) -> Iterator[VllmOmniRollout]:
    made = qwen(tiny_qwen)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(tiny_qwen: Path) -> Reference:
    found: Any = QwenImageTransformer2DModel.from_pretrained(tiny_qwen, subfolder="transformer")
    return Reference(found.eval())


def spec_of(kind: str, noise_level: float, guidance_scale: float) -> SamplingSpec:
    return SamplingSpec(
        sigmas=FlowMatchSchedule.linear(5, shift=2.0).values(),
        guidance_scale=guidance_scale,
        height=16,
        width=16,
        max_sequence_length=512,
        negative_prompt="a blur",
        kind=StepKind.parse(kind),
        noise_level=noise_level,
    )


def with_reference(
    reference: Reference, asked: Sequence[RolloutRequest], conditioning: Conditioning
) -> tuple[Tensor, Tensor]:
    """Latents [B, T+1, ...] and log-probs [B, T] of all samples."""
    samples = [s for r in asked for s in r.samples]
    spec = asked[0].sampling
    found = sample(
        reference,
        SamplingBatch(
            seeds=[s.seed for s in samples],
            windows=[r.window for r in asked for _ in r.samples],
            conditioning=conditioning,
        ),
        SamplingRule(
            schedule=spec.schedule(),
            guidance=Guidance(scale=spec.guidance_scale),
            kind=spec.kind,
            noise_level=spec.noise_level,
        ),
        shapes=SHAPES,
        device=torch.device("cpu"),
    )
    return found.latents["image"], found.log_probs


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize(
    ("kind", "noise_level"), [("sde", 0.7), ("cps", 0.7), ("dance_sde", 0.3), ("ode", 0.0)]
)
def test_it_samples_what_diffusers_transformer_does(
    rollout: VllmOmniRollout,
    reference: Reference,
    kind: str,
    noise_level: float,
    guidance_scale: float,
) -> None:
    asked = requests_for(spec_of(kind, noise_level, guidance_scale), PROMPTS)
    found = Trajectory.concat(rollout.generate(asked, timeout=300.0))
    latents, log_probs = with_reference(reference, asked, found.expanded_conditioning())

    assert found.effective.guidance_scale == guidance_scale
    assert found.latents["image"].shape == (6, 6, 4, 4, 4)
    torch.testing.assert_close(found.latents["image"], latents, rtol=0.0, atol=1e-4)
    if kind != "ode":
        assert float((found.log_probs - log_probs[:, :-1]).abs().mean()) <= 1e-6
    assert found.media is not None
    assert found.media.image.shape == (6, 16, 16, 3)


def test_texts_keep_their_own_length(rollout: VllmOmniRollout) -> None:
    asked = requests_for(spec_of("sde", 0.7, 1.0), PROMPTS, samples_per_prompt=1)
    lengths = [t.conditioning.prompt_embeds.shape[1] for t in rollout.generate(asked)]
    joined = Trajectory.concat(rollout.generate(asked)).conditioning

    assert len(set(lengths)) == 3
    assert isinstance(joined, QwenImageConditioning)
    assert joined.prompt_mask.sum(1).tolist() == lengths
