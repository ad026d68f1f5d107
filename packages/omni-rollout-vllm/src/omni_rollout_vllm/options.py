"""Options of the rollout `vllm_omni`. Imports no torch."""

from __future__ import annotations

import enum

import attrs

from omni_core.options import DiffusionRolloutConfig, not_negative, positive


class AdapterForm(enum.StrEnum):
    """How a LoRA reaches the engine."""

    ADAPTER = "adapter"
    """As an adapter beside the base, which stays as it is."""
    MERGED = "merged"
    """Added to the base weights, for engines and models that take no adapters."""


class Executor(enum.StrEnum):
    """Where the engine's workers run."""

    AUTO = "auto"
    """In the engine's process where one worker is enough, else in processes of their own."""
    INLINE = "uni"
    """In the engine's process."""
    PROCESSES = "mp"
    """In processes of their own: needed for tensor parallelism."""


@attrs.frozen(kw_only=True)
class TimeLimits:
    """Seconds that a call of the engine may take; past it the engine is ended, and started again."""

    start: float = attrs.field(default=900.0, validator=positive)
    """Start of an engine, weights included."""
    batch: float = attrs.field(default=900.0, validator=positive)
    """One sampling batch."""
    update: float = attrs.field(default=300.0, validator=positive)
    """Each call of a weight update."""
    control: float = attrs.field(default=120.0, validator=positive)
    """Sleep, wake and close."""


@attrs.frozen(kw_only=True)
class VllmOmniRolloutConfig(DiffusionRolloutConfig):
    """Sampling in vLLM-Omni engines, each in a process of its own."""

    replicas: int = attrs.field(default=1, validator=positive)
    """Engines of one trainer rank, or of one server; each takes the next batch when it is free."""
    tensor_parallel: int = attrs.field(default=1, validator=positive)
    """Workers that one engine's transformer is spread over."""
    executor: Executor = attrs.field(default=Executor.AUTO, converter=Executor)
    adapter_form: AdapterForm = attrs.field(default=AdapterForm.ADAPTER, converter=AdapterForm)
    enforce_eager: bool = True
    """Run the transformer without compiling it."""
    probe: bool = True
    """After a push of other weights, check that one denoising step comes out differently."""
    max_restarts: int = attrs.field(default=2, validator=not_negative)
    """Engines that may be lost before the rollout gives up."""
    limits: TimeLimits = attrs.field(factory=TimeLimits)

    @property
    def keeps_adapters(self) -> bool:
        """Not where they are merged: the weights hold one at a time."""
        return self.adapter_form is not AdapterForm.MERGED
