"""What is asked of the engines fits what they have, before it is queued."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from omni_core.choices import StepKind
from omni_core.input_image import InputImage
from omni_core.testing.samples import requests_for
from omni_core.trajectory import SamplingSpec
from omni_rollout_vllm.request_check import Served, check_requests
from omni_rollout_vllm.rollout import VllmOmniRollout

SPEC = SamplingSpec(
    sigmas=(1.0, 0.5, 0.0),
    guidance_scale=1.0,
    height=16,
    width=16,
    max_sequence_length=16,
    kind=StepKind.SDE,
    noise_level=0.7,
)


def served(**pushed: int) -> Served:
    """What a rollout serves after adapters of some versions were pushed, the newest last."""
    rollout: Any = VllmOmniRollout.__new__(VllmOmniRollout)
    pipeline = SimpleNamespace(max_sequence_length=16, frame_rate=24.0)
    rollout.engine = SimpleNamespace(model_config=SimpleNamespace(pipeline=pipeline))
    rollout.folder = None
    rollout.family = SimpleNamespace(least_guidance=1.0, latent_shapes=lambda folder, spec: {})
    rollout._pushed = {name: SimpleNamespace(version=version) for name, version in pushed.items()}
    rollout._version = max(pushed.values())
    found: Served = rollout._served()
    return found


def test_an_adapter_of_an_older_version_is_not_sampled_with() -> None:
    both = served(default=1, old=1)
    for name in ("default", "old"):
        check_requests(requests_for(SPEC, adapter=name), both)
    newer = served(old=1, default=2)
    check_requests(requests_for(SPEC), newer)
    with pytest.raises(
        ValueError, match=r"no adapter named 'old' was pushed .* with version 2; there are: default"
    ):
        check_requests(requests_for(SPEC, adapter="old"), newer)


def test_an_input_image_is_refused() -> None:
    (request,) = requests_for(SPEC, ["make it red"])
    edit = attrs.evolve(request, image=InputImage(path="a.png"))
    with pytest.raises(ValueError, match="an input image is given, and this model samples from"):
        check_requests([edit], served(default=1))


def test_another_frame_rate_than_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match=r"frame_rate 30\.0: the model is run with 24\.0"):
        check_requests(requests_for(attrs.evolve(SPEC, frame_rate=30.0)), served(default=1))
