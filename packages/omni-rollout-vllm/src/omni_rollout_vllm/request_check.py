"""What a rollout request may ask of an engine: checked before it is queued, with what would fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import attrs

from omni_core.choices import StepKind
from omni_core.trajectory import RolloutRequest, SamplingSpec
from omni_rollout_vllm.families import EngineFamily, Folder


@attrs.frozen(kw_only=True)
class Served:
    """What there is."""

    family: EngineFamily
    folder: Folder
    max_sequence_length: int
    adapters: Collection[str]
    weight_version: int


def check_requests(requests: Sequence[RolloutRequest], served: Served) -> None:
    """Check requests that were submitted together.

    Raises:
        ValueError: one cannot be served; names its group and what would fit.
    """
    names = Counter((r.group_id, tuple(s.k for s in r.samples)) for r in requests)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        group, ks = repeated[0]
        msg = f"group {group!r}: samples {list(ks)} were requested more than once"
        raise ValueError(msg)
    checked: set[SamplingSpec] = set()
    for request in requests:
        try:
            if request.sampling not in checked:
                _check_spec(request.sampling, served)
                checked.add(request.sampling)
            _check_window(request)
            _check_policy(request, served)
        except ValueError as error:
            msg = f"group {request.group_id!r}: {error}"
            raise ValueError(msg) from error


def _check_spec(spec: SamplingSpec, served: Served) -> None:
    spec.schedule()
    StepKind.parse(spec.kind)
    for name in ("noise_level", "guidance_scale"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0.0):
            msg = f"{name} must be a number of at least 0, got {value}"
            raise ValueError(msg)
    if spec.guidance_scale < served.family.least_guidance:
        msg = (
            f"guidance_scale {spec.guidance_scale}: {served.family.pipeline_class} guides above "
            f"{served.family.least_guidance} only; take {served.family.least_guidance} for no guidance"
        )
        raise ValueError(msg)
    if spec.max_sequence_length != served.max_sequence_length:
        msg = (
            f"max_sequence_length {spec.max_sequence_length}: the model is run with "
            f"{served.max_sequence_length} (model.pipeline.max_sequence_length)"
        )
        raise ValueError(msg)
    served.family.latent_shapes(served.folder, spec)


def _check_window(request: RolloutRequest) -> None:
    window, spec = request.window, request.sampling
    if not window:
        return
    if list(window) != sorted(set(window)):
        msg = f"window: steps must ascend, got {list(window)}"
        raise ValueError(msg)
    spec.schedule().check_window(window[0], window[-1] + 1, where="window")
    if StepKind.parse(spec.kind) is StepKind.ODE or spec.noise_level == 0.0:
        msg = (
            f"window {list(window)}: kind {spec.kind.value!r} at noise level {spec.noise_level} is "
            "deterministic and has no log-prob; take a stochastic kind with a noise level above 0, "
            "or an empty window"
        )
        raise ValueError(msg)


def _check_policy(request: RolloutRequest, served: Served) -> None:
    if request.adapter not in served.adapters:
        known = ", ".join(sorted(served.adapters)) or "none"
        msg = f"no adapter named {request.adapter!r} was pushed to this rollout; there are: {known}"
        raise ValueError(msg)
    if request.weight_version not in (None, served.weight_version):
        msg = (
            f"weight version {request.weight_version} was asked for; the rollout is at "
            f"{served.weight_version}"
        )
        raise ValueError(msg)
