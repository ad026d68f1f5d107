"""A recipe is YAML that holds only what differs from the defaults, and says how far it was tried."""

from __future__ import annotations

import enum

import attrs


class Standing(enum.StrEnum):
    """How far a recipe was tried."""

    SMOKE = "smoke"
    """It runs; nothing is claimed about what is learned."""
    VALIDATED = "validated"
    """It was run to its end on the hardware named, and learned what the summary says."""
    NOT_RUN = "not run here"
    """Published settings; weights or hardware to run it were not at hand."""


@attrs.frozen(kw_only=True)
class Recipe:
    """What the plugin of `omni.recipes` builds."""

    yaml: str
    """The run's values, one YAML mapping."""
    summary: str
    standing: Standing
    hardware: str
    global_batch: str
    """Samples a step, independent of the device count, such as `48 prompts x 24`."""
    source: str = ""
    """Where published settings come from, and what differs from them."""


@attrs.frozen
class NoOptions:
    """Options of a plugin that has none."""
