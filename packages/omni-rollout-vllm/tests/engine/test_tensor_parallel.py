"""Two worker processes (`mp`) with tensor parallelism over gloo sample what one worker does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.rollout import WeightMismatchError, WeightUpdate
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing.samples import requests_for
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_rollout_vllm.options import TimeLimits
from omni_rollout_vllm.rollout import VllmOmniRollout

# Three processes that wait for each other: on two busy cores a call takes minutes.
PATIENT = TimeLimits(start=600.0, batch=600.0, update=600.0, control=600.0)


@pytest.mark.timeout(900)
def test_two_workers_sample_what_one_does(
    engine: Any, ready: VllmOmniRollout, options: Any, adapter: dict[str, Tensor], push: Any
) -> None:
    spec = SamplingSpec(
        sigmas=FlowMatchSchedule.linear(4, shift=3.0).values(),
        guidance_scale=3.0,
        height=16,
        width=16,
        max_sequence_length=16,
        negative_prompt="a blur",
        kind=StepKind.SDE,
        noise_level=0.7,
    )
    asked = requests_for(spec)
    one = Trajectory.concat(ready.generate(asked, timeout=600.0))
    both = VllmOmniRollout(options(tensor_parallel=2, limits=PATIENT), engine=engine)
    try:
        push(both, adapter)
        two = Trajectory.concat(both.generate(asked, timeout=600.0))
        torch.testing.assert_close(two.latents["image"], one.latents["image"], rtol=0.0, atol=1e-4)
        assert float((two.log_probs - one.log_probs).abs().mean()) <= 1e-6
        assert two.media is not None

        both.sleep(1)
        both.wake()
        again = Trajectory.concat(both.generate(asked, timeout=600.0))
        assert torch.equal(again.latents["image"], two.latents["image"])

        both.pause()
        wrong = {name.replace("attn", "attention"): value for name, value in adapter.items()}
        with pytest.raises(WeightMismatchError, match="sent and not bound"):
            both.update(WeightUpdate(version=9, tensors=wrong, adapter="other"))
    finally:
        both.close()
