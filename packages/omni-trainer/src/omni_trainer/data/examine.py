"""What can be said about prompt files before a run: lengths, targets, repeats, and prompts in both files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import attrs

from omni_core.prompt_length import PromptLength
from omni_trainer.data.records import place
from omni_trainer.data.rows import PromptFile, PromptRow

PROPORTIONS = 1.05
"""How much wider or narrower an image may be than what it is brought to, before it is told."""


@attrs.frozen(kw_only=True)
class Spread:
    """Lengths of a file's prompts."""

    least: int
    median: int
    most: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Spread:
        """Take the spread of at least one length."""
        return cls(least=min(lengths), median=statistics.median_low(lengths), most=max(lengths))


@attrs.frozen(kw_only=True)
class FileReport:
    """One file; each finding is a line that names its place."""

    rows: int
    """That can be used."""
    bad: tuple[str, ...]
    targets: int
    """Rows that have one."""
    repeats: tuple[str, ...]
    """Rows with the prompt of an earlier one, but for case and spaces."""
    characters: Spread
    tokens: Spread | None
    """None where no tokenizer was asked."""
    limit: int | None
    """Tokens that the model reads."""
    cut: tuple[str, ...]
    """Rows with more tokens than that."""
    images: int = 0
    """Rows that edit one."""
    stretched: tuple[str, ...] = ()
    """Rows whose image has other proportions than the model is run with."""


def examine(
    file: PromptFile,
    lengths: Sequence[PromptLength] | None,
    size: tuple[int, int] | None = None,
) -> FileReport:
    """Look at a file's rows.

    Args:
        file: Read with its bad rows left out.
        lengths: In tokens, one for each row; None where that is not known.
        size: Width and height that the model is run with; None where that is not known.
    """
    first: dict[object, PromptRow] = {}
    repeats = []
    for row in file.rows:
        earlier = first.setdefault(_asked(row), row)
        if earlier is not row:
            repeats.append(f"{place(file.path, row.line)}: the prompt of {earlier.line} again")
    cut = [
        f"{place(file.path, row.line)}: {length.tokens} tokens, and {length.limit} are read"
        for row, length in zip(file.rows, lengths or (), strict=lengths is not None)
        if length.cut
    ]
    return FileReport(
        rows=len(file.rows),
        bad=file.skipped,
        targets=sum(row.target is not None for row in file.rows),
        repeats=tuple(repeats),
        characters=Spread.of([len(row.prompt) for row in file.rows]),
        tokens=None if lengths is None else Spread.of([length.tokens for length in lengths]),
        limit=None if lengths is None else min(length.limit for length in lengths),
        cut=tuple(cut),
        images=sum(row.image is not None for row in file.rows),
        stretched=() if size is None else tuple(_stretched(file, size)),
    )


def _stretched(file: PromptFile, size: tuple[int, int]) -> Iterator[str]:
    wanted = size[0] / size[1]
    for row in file.rows:
        if row.image is None:
            continue
        width, height = row.image.size()
        if not 1 / PROPORTIONS <= width / height / wanted <= PROPORTIONS:
            where = place(file.path, row.line)
            yield f"{where}: {width}x{height} is stretched to the proportions of {size[0]}x{size[1]}"


def in_both(train: PromptFile, heldout: PromptFile) -> tuple[str, ...]:
    """Name the held-out rows whose prompt is trained on, but for case and spaces: what they score says little."""
    trained = {_asked(row): row for row in reversed(train.rows)}
    return tuple(
        f"{place(heldout.path, row.line)} is {place(train.path, trained[_asked(row)].line)}: "
        f"{row.prompt!r}"
        for row in heldout.rows
        if _asked(row) in trained
    )


def _asked(row: PromptRow) -> object:
    """What two rows have in common that ask for the same."""
    return " ".join(row.prompt.split()).casefold(), row.image
