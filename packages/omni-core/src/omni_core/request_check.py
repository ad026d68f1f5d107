"""What no rollout can serve, whoever samples: checked before it is queued, with what would fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from omni_core.choices import StepKind
from omni_core.trajectory import RolloutRequest, SamplingSpec

IMAGE = "image"
"""Among `ModelFamily.inputs`: prompts edit one."""


def check_once(requests: Sequence[RolloutRequest]) -> None:
    """Check that no samples are requested twice by requests that were submitted together.

    Raises:
        ValueError: some are; names the group and the samples.
    """
    names = Counter((r.group_id, tuple(s.k for s in r.samples)) for r in requests)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        group, ks = repeated[0]
        msg = f"group {group!r}: samples {list(ks)} were requested more than once"
        raise ValueError(msg)


def check_sampling(spec: SamplingSpec) -> None:
    """Check schedule, kind and numbers of a spec.

    Raises:
        ValueError: sigmas that are no schedule, an unknown kind, or a number below 0 or not finite.
    """
    spec.schedule()
    StepKind.parse(spec.kind)
    for name in ("noise_level", "guidance_scale", "guidance_scale_2"):
        value = getattr(spec, name)
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            msg = f"{name} must be a number of at least 0, got {value}"
            raise ValueError(msg)


def check_guidance(spec: SamplingSpec, second: str | None) -> None:
    """Check that a second guidance scale has something to guide.

    Args:
        spec: Asked for.
        second: `ModelFamily.second_guidance`.

    Raises:
        ValueError: the family knows one scale alone.
    """
    if spec.guidance_scale_2 is not None and second is None:
        msg = (
            f"guidance_scale_2 {spec.guidance_scale_2}: this family has one guidance scale; leave "
            "guidance_scale_2 out"
        )
        raise ValueError(msg)


def check_image(request: RolloutRequest, inputs: Sequence[str]) -> None:
    """Check that a request has an input image where the model takes one, and else none.

    Args:
        request: Asked for.
        inputs: `ModelFamily.inputs` of what samples.

    Raises:
        ValueError: it has none, or one that nothing would look at.
    """
    mistake = image_mistake(given=request.image is not None, inputs=inputs)
    if mistake is not None:
        raise ValueError(mistake)


def image_mistake(*, given: bool, inputs: Sequence[str]) -> str | None:
    """Say what is wrong with giving images, or none, to a model of these inputs; None if nothing is."""
    if given and IMAGE not in inputs:
        return (
            f"an input image is given, and this model samples from {' and '.join(inputs)} alone; leave "
            "data.image_column out"
        )
    if not given and IMAGE in inputs:
        return "this model edits images, and no input image is given; name their column: data.image_column"
    return None


def check_frame_rate(spec: SamplingSpec, frame_rate: float) -> None:
    """Check that videos are as fast as the model is run with.

    Raises:
        ValueError: they are not; names both rates.
    """
    _check_as_run("frame_rate", spec.frame_rate, frame_rate)


def check_length(spec: SamplingSpec, length: int) -> None:
    """Check that prompts are as long as the model is run with.

    Raises:
        ValueError: they are not; names both lengths.
    """
    _check_as_run("max_sequence_length", spec.max_sequence_length, length)


def _check_as_run(name: str, asked: float, run_with: float) -> None:
    if asked != run_with:
        msg = f"{name} {asked}: the model is run with {run_with} (model.pipeline.{name})"
        raise ValueError(msg)


def check_window(request: RolloutRequest) -> None:
    """Check that a request's stochastic steps can be drawn and scored.

    Raises:
        ValueError: steps that do not ascend or reach the last one, or a sampler without noise.
    """
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
