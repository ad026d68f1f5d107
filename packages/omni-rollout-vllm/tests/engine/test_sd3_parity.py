"""SD3: what vLLM-Omni samples is what the training engine samples and scores, for each kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

from omni_core.choices import StepKind
from omni_core.options import DiffusionSamplingConfig
from omni_core.testing.samples import requests_for
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp.options import EngineRolloutConfig
from omni_engine_fsdp.rollout import EngineRollout
from omni_rollout_vllm.rollout import VllmOmniRollout

KINDS = [("sde", 0.7), ("cps", 0.7), ("dance_sde", 0.3)]


def spec_of(engine: Any, kind: str, noise_level: float, guidance_scale: float) -> SamplingSpec:
    config = DiffusionSamplingConfig(num_inference_steps=6)
    return SamplingSpec(
        sigmas=engine.family.schedule(config).values(),
        guidance_scale=guidance_scale,
        height=16,
        width=16,
        max_sequence_length=16,
        negative_prompt="a blur",
        kind=StepKind.parse(kind),
        noise_level=noise_level,
    )


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize(("kind", "noise_level"), KINDS)
def test_case_7_log_probs_are_those_of_the_engine_side_rollout_and_of_replay(
    engine: Any, ready: Any, kind: str, noise_level: float, guidance_scale: float
) -> None:
    """CASES 7, across engines: other kernels, so not 0 but at most 1e-6 in the mean."""
    asked = requests_for(spec_of(engine, kind, noise_level, guidance_scale))
    ours = Trajectory.concat(ready.generate(asked, timeout=300.0))
    theirs = Trajectory.concat(
        EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine).generate(asked)
    )

    assert ours.log_probs.shape == (6, 5)
    assert float((ours.log_probs - theirs.log_probs).abs().mean()) <= 1e-6
    assert float((ours.log_probs - engine.replay(ours).cpu()).abs().mean()) <= 1e-6
    assert torch.equal(ours.latents["image"][:, 0], theirs.latents["image"][:, 0])
    torch.testing.assert_close(ours.latents["image"], theirs.latents["image"], rtol=0.0, atol=1e-4)
    apart = (ours.media.image.int() - theirs.media.image.int()).abs()
    assert int(apart.max()) <= 1
    torch.testing.assert_close(
        ours.conditioning.prompt_embeds, theirs.conditioning.prompt_embeds, rtol=0.0, atol=1e-5
    )


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_an_ode_gives_the_same_pictures(engine: Any, ready: Any, guidance_scale: float) -> None:
    asked = requests_for(spec_of(engine, "ode", 0.0, guidance_scale))
    ours = Trajectory.concat(ready.generate(asked, timeout=300.0))
    theirs = Trajectory.concat(
        EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine).generate(asked)
    )

    torch.testing.assert_close(ours.latents["image"], theirs.latents["image"], rtol=0.0, atol=1e-4)
    assert int((ours.media.image.int() - theirs.media.image.int()).abs().max()) <= 1


def test_windows_of_a_batch_are_each_rows_own(engine: Any, ready: Any) -> None:
    spec = spec_of(engine, "sde", 0.7, 1.0)
    first, second, third = requests_for(spec)
    asked = [
        attrs.evolve(first, window=(0, 1)),
        attrs.evolve(second, window=(2,)),
        attrs.evolve(third, window=()),
    ]
    ours = ready.generate(asked, timeout=300.0)
    theirs = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine).generate(asked)

    assert [t.log_probs.shape[1] for t in ours] == [2, 1, 0]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.log_probs, other.log_probs, rtol=0.0, atol=1e-6)


def test_a_row_of_a_batch_is_the_single_request(engine: Any, ready: Any) -> None:
    asked = requests_for(spec_of(engine, "sde", 0.7, 4.5))
    together = ready.generate(asked, timeout=300.0)
    for request, trajectory in zip(asked, together, strict=True):
        alone = Trajectory.concat(
            [ready.generate([one], timeout=300.0)[0] for one in request.expand()]
        )
        torch.testing.assert_close(
            trajectory.latents["image"], alone.latents["image"], rtol=0.0, atol=1e-5
        )
        assert torch.equal(
            trajectory.conditioning.prompt_embeds[0], alone.conditioning.prompt_embeds[0]
        )


@pytest.fixture(scope="module")
def bfloat16(half_engine: Any, options: Any, push: Any) -> Iterator[VllmOmniRollout]:
    made = VllmOmniRollout(options(), engine=half_engine)
    push(made, dict(half_engine.get_per_tensor_param(adapter="default")))
    yield made
    made.close()


@pytest.mark.parametrize(("kind", "noise_level"), KINDS)
def test_the_floor_of_bfloat16_is_reported(
    half_engine: Any, bfloat16: VllmOmniRollout, report: Any, kind: str, noise_level: float
) -> None:
    """No bound of a device's: two kernels of 8 significant bits, each right."""
    asked = requests_for(spec_of(half_engine, kind, noise_level, 4.5))
    found = Trajectory.concat(bfloat16.generate(asked, timeout=300.0))
    apart = (found.log_probs - half_engine.replay(found).cpu()).abs()
    report(
        f"bfloat16, {kind}: mean |dlogp| {float(apart.mean()):.1e}, most {float(apart.max()):.1e}"
    )

    assert found.latents["image"].dtype is torch.float32
    assert 0.0 < float(apart.mean()) < 0.05
