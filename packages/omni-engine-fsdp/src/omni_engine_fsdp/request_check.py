"""What a rollout request may ask for: checked before it is queued, with what would fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from omni_core.choices import StepKind
from omni_core.options import DiffusionPipelineConfig
from omni_core.trajectory import RolloutRequest, SamplingSpec

LatentShapes = Callable[[DiffusionPipelineConfig], object]
"""`Codec.latent_shapes`: raises ValueError for a size that does not fit."""


def pipeline_of(spec: SamplingSpec) -> DiffusionPipelineConfig:
    """Return the sizes of a spec as a pipeline config."""
    return DiffusionPipelineConfig(
        height=spec.height,
        width=spec.width,
        max_sequence_length=spec.max_sequence_length,
        num_frames=spec.num_frames,
    )


def check_requests(
    requests: Sequence[RolloutRequest], *, engine: Any, latent_shapes: LatentShapes
) -> None:
    """Check requests that were submitted together.

    Args:
        requests: Of one rank.
        engine: Whose adapters, weight version and text length they must fit.
        latent_shapes: Of the engine's codec.

    Raises:
        ValueError: one cannot be served; names its group and what would fit.
    """
    names = Counter((r.group_id, tuple(s.k for s in r.samples)) for r in requests)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        group, ks = repeated[0]
        raise ValueError(f"group {group!r}: samples {list(ks)} were requested more than once")
    checked = set()
    for request in requests:
        try:
            if (request.sampling, request.adapter) not in checked:
                _check_spec(request.sampling, engine, latent_shapes)
                with engine.use_adapter(request.adapter):
                    checked.add((request.sampling, request.adapter))
            _check_window(request)
            if request.weight_version not in (None, engine.weight_version):
                raise ValueError(
                    f"weight version {request.weight_version} was asked for; the engine is at "
                    f"{engine.weight_version}"
                )
        except ValueError as error:
            raise ValueError(f"group {request.group_id!r}: {error}") from error


def _check_spec(spec: SamplingSpec, engine: Any, latent_shapes: LatentShapes) -> None:
    spec.schedule()
    StepKind.parse(spec.kind)
    for name in ("noise_level", "guidance_scale"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} must be a number of at least 0, got {value}")
    length = engine.model_config.pipeline.max_sequence_length
    if spec.max_sequence_length != length:
        raise ValueError(
            f"max_sequence_length {spec.max_sequence_length}: the model is run with {length} "
            "(model.pipeline.max_sequence_length)"
        )
    latent_shapes(pipeline_of(spec))


def _check_window(request: RolloutRequest) -> None:
    window, spec = request.window, request.sampling
    if not window:
        return
    if list(window) != sorted(set(window)):
        raise ValueError(f"window: steps must ascend, got {list(window)}")
    spec.schedule().check_window(window[0], window[-1] + 1, where="window")
    if StepKind.parse(spec.kind) is StepKind.ODE or spec.noise_level == 0.0:
        raise ValueError(
            f"window {list(window)}: kind {spec.kind.value!r} at noise level {spec.noise_level} is "
            "deterministic and has no log-prob; take a stochastic kind with a noise level above 0, "
            "or an empty window"
        )
