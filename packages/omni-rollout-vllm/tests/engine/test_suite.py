"""The real engine passes the suite of every rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.model import Guidance, Step
from omni_core.options import DiffusionSamplingConfig
from omni_core.reverse_step import Latents
from omni_core.rollout import WeightUpdate
from omni_core.testing import RolloutSuite
from omni_core.testing.samples import requests_for
from omni_core.trajectory import Conditioning, SamplingSpec


class TestVllmOmniRollout(RolloutSuite):
    """SD3, one engine, the adapter beside the base."""

    sleeps = True

    @pytest.fixture
    def rollout(self, ready: Any) -> Any:
        return ready

    @pytest.fixture
    def sampling(self, engine: Any) -> SamplingSpec:
        config = DiffusionSamplingConfig(num_inference_steps=5)
        return SamplingSpec(
            sigmas=engine.family.schedule(config).values(),
            guidance_scale=2.0,
            height=16,
            width=16,
            max_sequence_length=16,
            kind=StepKind.SDE,
            noise_level=0.7,
        )

    @pytest.fixture
    def velocity(self, engine: Any, rollout: Any) -> Any:
        del rollout

        def velocity(
            latents: Latents, step: Step, conditioning: Conditioning, guidance: Guidance
        ) -> Latents:
            with engine.eval_mode():
                return engine.denoiser.velocity(latents, step, conditioning, guidance)

        return velocity

    @pytest.fixture
    def make_update(self, adapter: dict[str, Tensor]) -> Callable[[int], WeightUpdate]:
        def make(version: int) -> WeightUpdate:
            generator = torch.Generator().manual_seed(version)
            tensors = {
                name: value + 0.1 * torch.randn(value.shape, generator=generator)
                for name, value in adapter.items()
            }
            return WeightUpdate(version=version, tensors=tensors, alpha_over_rank=2.0)

        return make

    def test_another_value_of_an_update_is_another_policy(
        self, rollout: Any, sampling: SamplingSpec, make_update: Callable[[int], WeightUpdate]
    ) -> None:
        asked = requests_for(sampling, ("a bright sign",))
        before = self.sample(rollout, asked)[0]
        rollout.pause()
        rollout.update(make_update(rollout.weight_version + 1))
        rollout.resume()
        after = self.sample(rollout, asked)[0]
        assert not torch.equal(before.latents["image"][:, 1], after.latents["image"][:, 1])
        assert torch.equal(before.latents["image"][:, 0], after.latents["image"][:, 0])
