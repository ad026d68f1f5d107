"""What a rollout request may ask for: checked before it is queued, with what would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from omni_core.options import DiffusionPipelineConfig
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

LatentShapes = Callable[[DiffusionPipelineConfig], object]
"""`Codec.latent_shapes`: raises ValueError for a size that does not fit."""


def pipeline_of(spec: SamplingSpec) -> DiffusionPipelineConfig:
    """Return the sizes of a spec as a pipeline config."""
    return DiffusionPipelineConfig(
        height=spec.height,
        width=spec.width,
        max_sequence_length=spec.max_sequence_length,
        num_frames=spec.num_frames,
        frame_rate=spec.frame_rate,
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
    check_once(requests)
    checked = set()
    for request in requests:
        try:
            if (request.sampling, request.adapter) not in checked:
                _check_spec(request.sampling, engine, latent_shapes)
                with engine.use_adapter(request.adapter):
                    checked.add((request.sampling, request.adapter))
            check_window(request)
            check_image(request, engine.family.inputs)
            if request.weight_version not in (None, engine.weight_version):
                raise ValueError(
                    f"weight version {request.weight_version} was asked for; the engine is at "
                    f"{engine.weight_version}"
                )
        except ValueError as error:
            raise ValueError(f"group {request.group_id!r}: {error}") from error


def _check_spec(spec: SamplingSpec, engine: Any, latent_shapes: LatentShapes) -> None:
    check_sampling(spec)
    check_guidance(spec, engine.family.second_guidance)
    check_frame_rate(spec, engine.model_config.pipeline.frame_rate)
    check_length(spec, engine.model_config.pipeline.max_sequence_length)
    latent_shapes(pipeline_of(spec))
