"""Prompts from a file: good rows unchanged, bad rows by line number, raised or left out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from omni_core.input_image import InputImage
from omni_trainer.data.images import image_of
from omni_trainer.data.records import TEXT, Record, place, read_records
from omni_trainer.data.rows import BadRowPolicy, PromptFile, PromptFileError, PromptRow

if TYPE_CHECKING:
    from omni_core.reward import RewardFunction

TARGET_COLUMN = "target"
"""A row may hold its target itself; the reward's rule is then not asked."""


@attrs.frozen(kw_only=True)
class Columns:
    """What is read from which column; the others are the row's metadata."""

    prompt: str = "prompt"
    id: str | None = None
    """A text or whole number that names a row for good; None takes the line."""
    target: str | None = None
    """A text in each row; None takes `target` where a row has it, and else the reward's rule."""
    image: str | None = None
    """The picture that the prompt edits, in each row: a path from the file's own folder, or stored in the row."""

    @property
    def named(self) -> tuple[str, ...]:
        """Those that a file without columns cannot have."""
        return tuple(name for name in (self.id, self.target, self.image) if name)


def load_prompts(
    path: Path,
    *,
    reward: RewardFunction | None,
    on_bad_row: BadRowPolicy,
    columns: Columns | None = None,
    whole_images: bool = False,
) -> PromptFile:
    """Read a prompt file.

    Args:
        path: See `omni_trainer.data.records` for the kinds of files.
        reward: Takes a row's target from its prompt; a prompt that it refuses is a bad row.
        on_bad_row: A row is bad when it is blank, not UTF-8, not an object, has no prompt or one of
            spaces, repeats an id, lacks a column that is named, has no target by the reward's rule, or an
            image that is missing or none.
        columns: None takes the default names.
        whole_images: Decode every image, instead of looking at the heads of their files.

    Raises:
        FileNotFoundError: no such file.
        PromptFileError: an unknown kind of file, one that cannot be read, no usable row, or bad rows
            under `raise` (all of them).
    """
    columns = columns or Columns()
    if path.suffix.lower() == TEXT and columns.named:
        msg = f"{path}: a .txt file has no columns, so no column {columns.named[0]!r}"
        raise PromptFileError(msg)
    rows: list[PromptRow] = []
    mistakes: list[str] = []
    known: set[str] = set()
    folder = path if path.is_dir() else path.parent
    for record in read_records(path, columns.prompt):
        try:
            row = _row(record, columns, reward, folder=folder, whole=whole_images)
            if row.row_id in known:
                msg = f"id {row.row_id!r} is that of an earlier row"
                raise ValueError(msg)
        except ValueError as exc:
            mistakes.append(f"{place(path, record.line)}: {exc}")
            continue
        known.add(row.row_id)
        rows.append(row)
    if mistakes and on_bad_row is BadRowPolicy.RAISE:
        msg = f"{path}: {len(mistakes)} of {len(mistakes) + len(rows)} rows cannot be used"
        raise PromptFileError(f"{msg} (data.on_bad_row=skip leaves them out):", mistakes)
    if not rows:
        held = "no usable row" if mistakes else "no prompt: the file is empty"
        msg = f"{path} holds {held}"
        raise PromptFileError(msg, mistakes)
    return PromptFile(path=path, rows=tuple(rows), skipped=tuple(mistakes))


def _row(
    record: Record,
    columns: Columns,
    reward: RewardFunction | None,
    *,
    folder: Path,
    whole: bool,
) -> PromptRow:
    """Make a row of a record; ValueError says what is wrong with it."""
    if record.mistake is not None:
        raise ValueError(record.mistake)
    values = dict(record.values)
    prompt = _prompt(values, columns.prompt)
    row_id = str(record.line) if columns.id is None else _id(values, columns.id)
    own = _own_target(values, columns.target)
    image: InputImage | None = None
    if columns.image is not None:
        stored = values.pop(columns.image, None)
        image = image_of(stored, column=columns.image, folder=folder, whole=whole)
    return PromptRow(
        row_id=row_id,
        prompt=prompt,
        target=own if own is not None or reward is None else reward.target(prompt),
        image=image,
        metadata=values,
        line=record.line,
    )


def _prompt(values: dict[str, Any], column: str) -> str:
    prompt = values.pop(column, None)
    if not isinstance(prompt, str):
        held = "no" if prompt is None else f"{type(prompt).__name__} as"
        msg = f"{held} {column!r}; a text is expected (columns: {', '.join(values) or 'none'})"
        raise ValueError(msg)
    if not prompt.strip():
        msg = f"{column!r} is blank"
        raise ValueError(msg)
    return prompt


def _id(values: dict[str, Any], column: str) -> str:
    value = values.pop(column, None)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        msg = f"id column {column!r} is {value!r}; a text or a whole number is expected"
        raise ValueError(msg)
    return str(value)


def _own_target(values: dict[str, Any], column: str | None) -> str | None:
    own = values.pop(column or TARGET_COLUMN, None)
    if own is None and column is None:
        return None
    if not (isinstance(own, str) and own.strip()):
        msg = f"{column or TARGET_COLUMN!r} is {own!r}; a text is expected"
        raise ValueError(msg)
    return own
