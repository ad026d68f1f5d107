"""What the rollout and an engine's process say to each other: plain data, tensors in records.

The rollout asks (a `Request`), the engine answers each with one `Answer`, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from omni_core.records import TensorRecord
from omni_core.trajectory import Conditioning, Media, SamplingSpec
from omni_core.weight_buckets import AnyBucket


@attrs.frozen(kw_only=True)
class EngineSpec:
    """What an engine is started with."""

    model: str
    """Directory of the pipeline."""
    dtype: str
    batch_size: int
    tensor_parallel: int
    executor: str | None
    enforce_eager: bool
    adapters: int
    """That it keeps at once."""
    probe: SamplingSpec
    """One step without guidance: warms the engine up, and shows whether weights changed."""
    timeout: float
    """Seconds that one call may take, as far as the engine can tell."""


@attrs.frozen(kw_only=True)
class Row:
    """One sample to draw."""

    prompt: str
    seed: int
    window: tuple[int, ...]


@attrs.frozen(kw_only=True)
class SampleBatch:
    """Rows to denoise together."""

    name: str
    sampling: SamplingSpec
    adapter: str | None
    """None for the weights as they are."""
    rows: tuple[Row, ...]
    decode: bool


@attrs.frozen(kw_only=True, eq=False)
class SampledBatch(TensorRecord):
    """What was drawn: B rows."""

    latents: Mapping[str, Tensor]
    """Modality -> float32 [B, T+1, ...]."""
    log_probs: Tensor
    """float32 [B, T]: not a number where a step was deterministic."""
    conditioning: Mapping[str, Conditioning]
    """Prompt -> [1, ...]: of each prompt of the batch, not padded to the others."""
    media: Media | None
    effective: SamplingSpec
    """What was really used, as the pipeline was heard to use it."""


@attrs.frozen(kw_only=True)
class BeginUpdate:
    """Weights of these names are about to come: check that they fit."""

    names: tuple[str, ...]
    adapter: bool
    at_once: bool
    """Load each bucket as it comes, without a second copy (whole weights)."""


@attrs.frozen(kw_only=True)
class TakeBucket:
    """One bucket of them."""

    bucket: AnyBucket


@attrs.frozen(kw_only=True)
class EndUpdate:
    """All have come: bind them."""

    adapter: str | None
    alpha_over_rank: float
    merge: bool
    probe: bool
    """Draw the probe before and after."""


@attrs.frozen(kw_only=True)
class Bound:
    """What an engine did with an update."""

    names: tuple[str, ...]
    changed: bool | None
    """Whether the probe came out differently; None without one, or where there was nothing to compare."""


@attrs.frozen(kw_only=True)
class Sleep:
    """Give memory back."""

    level: int = 1


@attrs.frozen(kw_only=True)
class Wake:
    """Undo it."""


@attrs.frozen(kw_only=True)
class Describe:
    """Say what the engine is made of."""


@attrs.frozen(kw_only=True)
class Answer:
    """Of an engine to one request."""

    value: Any = None
    error: str | None = None
    """What it raised, in one line."""
    mismatch: bool = False
    """The error is about names of weights."""
    details: str = ""
    """The traceback."""
