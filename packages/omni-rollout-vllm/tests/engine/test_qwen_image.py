"""Qwen-Image, the second family: a file of names and shapes is all that it took on this side.

What vLLM-Omni samples is what the training engine samples and scores, for each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omni_core.choices import StepKind
from omni_core.families.qwen_image import QwenImageConditioning
from omni_core.options import DiffusionSamplingConfig
from omni_core.testing.samples import requests_for
from omni_core.trajectory import RolloutRequest, SamplingSpec, Trajectory
from omni_engine_fsdp.options import EngineRolloutConfig
from omni_engine_fsdp.rollout import EngineRollout
from omni_rollout_vllm.rollout import VllmOmniRollout

PROMPTS = ("a bright sign that says hello", "a room", "a green tree")


@pytest.fixture(scope="module")
def rollout(qwen_engine: Any, options: Any, push: Any) -> Iterator[VllmOmniRollout]:
    """READY, with the training engine's weights."""
    made = VllmOmniRollout(options(), engine=qwen_engine)
    push(made, dict(qwen_engine.get_per_tensor_param(adapter=None)), adapter=None)
    yield made
    made.close()


def requests(
    engine: Any, kind: str, noise: float, scale: float, **more: Any
) -> list[RolloutRequest]:
    config = DiffusionSamplingConfig(num_inference_steps=5)
    spec = SamplingSpec(
        sigmas=engine.family.schedule(config).values(),
        guidance_scale=scale,
        height=16,
        width=16,
        max_sequence_length=512,
        negative_prompt="a blur",
        kind=StepKind.parse(kind),
        noise_level=noise,
    )
    return requests_for(spec, PROMPTS, **more)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize(
    ("kind", "noise_level"), [("sde", 0.7), ("cps", 0.7), ("dance_sde", 0.3), ("ode", 0.0)]
)
def test_case_7_log_probs_are_those_of_the_engine_side_rollout_and_of_replay(
    qwen_engine: Any, rollout: VllmOmniRollout, kind: str, noise_level: float, guidance_scale: float
) -> None:
    """CASES 7, across engines: other kernels, so not 0 but at most 1e-6 in the mean."""
    asked = requests(qwen_engine, kind, noise_level, guidance_scale)
    ours = Trajectory.concat(rollout.generate(asked, timeout=300.0))
    engine_side = EngineRollout(EngineRolloutConfig(batch_size=4), engine=qwen_engine)
    theirs = Trajectory.concat(engine_side.generate(asked))

    assert ours.effective.guidance_scale == guidance_scale
    assert ours.latents["image"].shape == theirs.latents["image"].shape
    torch.testing.assert_close(ours.latents["image"], theirs.latents["image"], rtol=0.0, atol=1e-4)
    if kind != "ode":
        assert ours.log_probs.shape == (6, 4)
        assert float((ours.log_probs - theirs.log_probs).abs().mean()) <= 1e-6
        assert float((ours.log_probs - qwen_engine.replay(ours).cpu()).abs().mean()) <= 1e-6
    assert ours.media is not None
    assert theirs.media is not None
    assert int((ours.media.image.int() - theirs.media.image.int()).abs().max()) <= 1


def test_texts_keep_their_own_length(qwen_engine: Any, rollout: VllmOmniRollout) -> None:
    asked = requests(qwen_engine, "sde", 0.7, 1.0, samples_per_prompt=1)
    lengths = [t.conditioning.prompt_embeds.shape[1] for t in rollout.generate(asked)]
    joined = Trajectory.concat(rollout.generate(asked)).conditioning

    assert len(set(lengths)) == 3
    assert isinstance(joined, QwenImageConditioning)
    assert joined.prompt_mask.sum(1).tolist() == lengths
