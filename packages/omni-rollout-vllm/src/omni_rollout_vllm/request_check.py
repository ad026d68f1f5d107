"""What a rollout request may ask of an engine: checked before it is queued, with what would fit."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from omni_core.request_check import (
    check_frame_rate,
    check_guidance,
    check_image,
    check_length,
    check_once,
    check_sampling,
    check_window,
)
from omni_core.trajectory import RolloutRequest, SamplingSpec
from omni_rollout_vllm.families import EngineFamily, Folder


@attrs.frozen(kw_only=True)
class Served:
    """What there is."""

    family: EngineFamily
    folder: Folder
    max_sequence_length: int
    frame_rate: float
    adapters: Collection[str]
    """Those that are of the version that samples."""
    weight_version: int


def check_requests(requests: Sequence[RolloutRequest], served: Served) -> None:
    """Check requests that were submitted together.

    Raises:
        ValueError: one cannot be served; names its group and what would fit.
    """
    check_once(requests)
    checked: set[SamplingSpec] = set()
    for request in requests:
        try:
            if request.sampling not in checked:
                _check_spec(request.sampling, served)
                checked.add(request.sampling)
            check_window(request)
            check_image(request, inputs=("text",))
            _check_policy(request, served)
        except ValueError as error:
            msg = f"group {request.group_id!r}: {error}"
            raise ValueError(msg) from error


def _check_spec(spec: SamplingSpec, served: Served) -> None:
    check_sampling(spec)
    check_guidance(spec, second=None)
    if spec.guidance_scale < served.family.least_guidance:
        msg = (
            f"guidance_scale {spec.guidance_scale}: {served.family.pipeline_class} guides above "
            f"{served.family.least_guidance} only; take {served.family.least_guidance} for no guidance"
        )
        raise ValueError(msg)
    check_frame_rate(spec, served.frame_rate)
    check_length(spec, served.max_sequence_length)
    served.family.latent_shapes(served.folder, spec)


def _check_policy(request: RolloutRequest, served: Served) -> None:
    if request.adapter not in served.adapters:
        known = ", ".join(sorted(served.adapters)) or "none"
        msg = (
            f"no adapter named {request.adapter!r} was pushed to this rollout with version "
            f"{served.weight_version}; there are: {known}"
        )
        raise ValueError(msg)
    if request.weight_version not in (None, served.weight_version):
        msg = (
            f"weight version {request.weight_version} was asked for; the rollout is at "
            f"{served.weight_version}"
        )
        raise ValueError(msg)
