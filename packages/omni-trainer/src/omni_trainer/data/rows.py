"""What a prompt file comes to: rows that can be used, and a sentence for each that cannot."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from omni_core.input_image import InputImage


class BadRowPolicy(enum.StrEnum):
    """What happens to a file with rows that cannot be used."""

    RAISE = "raise"
    """Refuse the file and list every bad row."""
    SKIP = "skip"
    """Leave the bad rows out and list them."""


class PromptFileError(ValueError):
    """A prompt file cannot be used.

    Attributes:
        mistakes: One line for each bad row, `FILE:LINE: what is wrong`.
    """

    def __init__(self, message: str, mistakes: Sequence[str] = ()) -> None:
        super().__init__("\n".join([message, *mistakes]))
        self.mistakes = tuple(mistakes)


@attrs.frozen(kw_only=True)
class PromptRow:
    """One prompt of a file."""

    row_id: str
    """The same whenever the file is: its line number, or the value of the id column."""
    prompt: str
    target: str | None
    """What the prompt asks for, by the reward's rule; None where the reward has no such rule."""
    metadata: Mapping[str, object] = attrs.field(factory=dict)
    """The other columns of the row."""
    line: int
    """Counted from 1; where a file has no lines, the row's number."""
    image: InputImage | None = None
    """What the prompt edits, where a column of images is named."""


@attrs.frozen(kw_only=True)
class PromptFile:
    """What a file held."""

    path: Path
    rows: tuple[PromptRow, ...]
    skipped: tuple[str, ...]
    """The bad rows that were left out, `FILE:LINE: what is wrong`."""
