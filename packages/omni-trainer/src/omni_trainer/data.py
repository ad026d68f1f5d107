"""Prompts from a file: good rows unchanged, bad rows by line number, and an order that can be resumed.

A `.txt` file holds one prompt a line, a `.jsonl` file one JSON object a line. Files are UTF-8, with or
without a byte order mark, with LF or CRLF line ends. HF `datasets` reads the lines; a JSON line is
parsed by itself, so one broken line neither hides the others nor changes their values.
"""

from __future__ import annotations

import enum
import glob
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from omni_core.reward import RewardFunction

TARGET_COLUMN = "target"
"""A JSONL row may hold its target itself; the reward's rule is then not asked."""


class BadRowPolicy(enum.StrEnum):
    """What happens to a file with rows that cannot be used."""

    RAISE = "raise"
    """Refuse the file and list every bad row."""
    SKIP = "skip"
    """Leave the bad rows out and list them."""


class Tail(enum.StrEnum):
    """What happens to the rows of an epoch that do not fill a batch."""

    CARRY = "carry"
    """The next epoch's first rows fill it up."""
    DROP = "drop"
    """They are left out of this epoch."""


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
    """The other columns of a JSONL row."""
    line: int
    """Counted from 1."""


@attrs.frozen(kw_only=True)
class PromptFile:
    """What a file held."""

    path: Path
    rows: tuple[PromptRow, ...]
    skipped: tuple[str, ...]
    """The bad rows that were left out, `FILE:LINE: what is wrong`."""


def load_prompts(
    path: Path,
    *,
    reward: RewardFunction | None,
    on_bad_row: BadRowPolicy,
    prompt_column: str = "prompt",
    id_column: str | None = None,
) -> PromptFile:
    """Read a prompt file.

    Args:
        path: `.txt` or `.jsonl`.
        reward: Takes a row's target from its prompt; a prompt that it refuses is a bad row.
        on_bad_row: A row is bad when it is blank, not UTF-8, not a JSON object, has no prompt or one of
            spaces, repeats an id, or has no target by the reward's rule.
        prompt_column: Key of the prompt in a JSONL row.
        id_column: Key of a text or whole number that names a JSONL row for good; None takes the line.

    Raises:
        FileNotFoundError: no such file.
        PromptFileError: an unknown kind of file, no usable row, or bad rows under `raise` (all of them).
    """
    if not path.is_file():
        msg = f"prompt file {str(path)!r} does not exist"
        raise FileNotFoundError(msg)
    columns = _columns(path, prompt_column, id_column)
    rows: list[PromptRow] = []
    mistakes: list[str] = []
    known: set[str] = set()
    for line, text in enumerate(_lines(path), 1):
        try:
            row = _row(line, text, columns, reward)
            if row.row_id in known:
                msg = f"id {row.row_id!r} is that of an earlier row"
                raise ValueError(msg)
        except ValueError as exc:
            mistakes.append(f"{path.name}:{line}: {exc}")
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


@attrs.frozen
class _Columns:
    prompt: str
    id: str | None


def _columns(path: Path, prompt_column: str, id_column: str | None) -> _Columns | None:
    """Return the keys of a JSONL file, None for a text file."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return _Columns(prompt_column, id_column)
    if kind != ".txt":
        msg = (
            f"{path}: the suffix {kind!r} is not known; prompt files are .txt (a prompt a line) "
            "and .jsonl (a JSON object a line)"
        )
        raise PromptFileError(msg)
    if id_column is not None:
        msg = f"{path}: a .txt file has no columns, so no id column {id_column!r}"
        raise PromptFileError(msg)
    return None


def _lines(path: Path) -> Iterator[str]:
    """Yield every line, blank ones included; bytes that are not UTF-8 come as U+FFFD."""
    if path.stat().st_size == 0:
        return
    import datasets  # takes a second, and only a run needs it

    # Streaming copies nothing; the cache directory takes a lock file.
    with tempfile.TemporaryDirectory(prefix="omni-prompts-") as cache:
        rows = datasets.load_dataset(
            "text",
            data_files=[glob.escape(str(path.absolute()))],
            split="train",
            streaming=True,
            cache_dir=cache,
            encoding="utf-8-sig",
            encoding_errors="replace",
        )
        for row in rows:
            yield row["text"]


def _row(
    line: int, text: str, columns: _Columns | None, reward: RewardFunction | None
) -> PromptRow:
    """Make a row of a line; ValueError says what is wrong with it."""
    if "\ufffd" in text:
        msg = "not UTF-8 (or it holds U+FFFD, the mark of text that once was not)"
        raise ValueError(msg)
    if not text.strip():
        msg = "blank"
        raise ValueError(msg)
    if columns is None:
        return PromptRow(row_id=str(line), prompt=text, target=_target(text, reward), line=line)
    values = _object(text)
    prompt = values.pop(columns.prompt, None)
    if not isinstance(prompt, str):
        held = "no" if prompt is None else f"{type(prompt).__name__} as"
        msg = f"{held} {columns.prompt!r}; a text is expected (columns: {', '.join(values) or 'none'})"
        raise ValueError(msg)
    if not prompt.strip():
        msg = f"{columns.prompt!r} is blank"
        raise ValueError(msg)
    own = values.pop(TARGET_COLUMN, None)
    if own is not None and not (isinstance(own, str) and own.strip()):
        msg = f"{TARGET_COLUMN!r} is {own!r}; a text is expected"
        raise ValueError(msg)
    return PromptRow(
        row_id=str(line) if columns.id is None else _id(values, columns.id),
        prompt=prompt,
        target=own if own is not None else _target(prompt, reward),
        metadata=values,
        line=line,
    )


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as exc:
        msg = f"not JSON: {exc.msg} (column {exc.colno})"
        raise ValueError(msg) from None
    if not isinstance(values, dict):
        msg = f"expected a JSON object, got {type(values).__name__}"
        raise ValueError(msg)
    return values


def _id(values: dict[str, Any], column: str) -> str:
    value = values.pop(column, None)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        msg = f"id column {column!r} is {value!r}; a text or a whole number is expected"
        raise ValueError(msg)
    return str(value)


def _target(prompt: str, reward: RewardFunction | None) -> str | None:
    return None if reward is None else reward.target(prompt)


# -- order ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class PromptBatch:
    """The prompts of one step."""

    rows: tuple[PromptRow, ...]
    epoch: int
    """Of the first row, counted from 0; a carried tail is joined by rows of the next."""
    occurrences: tuple[int, ...]
    """For each row, how often it came before in this batch (a file smaller than a batch repeats)."""


class PromptSampler:
    """Deals batches of *batch_size* rows, each epoch in an order of its own.

    The order of epoch e depends on the seed and e alone, so the state is two numbers.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        *,
        batch_size: int,
        seed: int,
        tail: Tail,
        shuffle: bool = True,
    ) -> None:
        if not rows:
            msg = "there is no prompt to sample from"
            raise ValueError(msg)
        if tail is Tail.DROP and batch_size > len(rows):
            msg = (
                f"data.tail: a batch of {batch_size} prompts never fills from {len(rows)} rows with tail drop; "
                f"take at most {len(rows)}, or tail carry"
            )
            raise PromptFileError(msg)
        self._rows = tuple(rows)
        self._batch_size = batch_size
        self._seed = seed
        self._tail = tail
        self._shuffle = shuffle
        self._identity = _identity(rows, seed, shuffle)
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that start in the first epoch: ceil(rows / batch) carried, floor dropped."""
        whole, rest = divmod(len(self._rows), self._batch_size)
        return whole + (1 if rest and self._tail is Tail.CARRY else 0)

    def next(self) -> PromptBatch:
        """Deal the next batch."""
        if (
            self._tail is Tail.DROP and self._position + self._batch_size > len(self._rows)
        ) or self._position == len(self._rows):
            self._turn()
        epoch = self._epoch
        rows: list[PromptRow] = []
        while len(rows) < self._batch_size:
            if self._position == len(self._rows):
                self._turn()
            rows.append(self._rows[self._order[self._position]])
            self._position += 1
        seen: Counter[str] = Counter()
        occurrences = []
        for row in rows:
            occurrences.append(seen[row.row_id])
            seen[row.row_id] += 1
        return PromptBatch(rows=tuple(rows), epoch=epoch, occurrences=tuple(occurrences))

    def state(self) -> dict[str, Any]:
        """Plain data from which `load_state` goes on."""
        return {"epoch": self._epoch, "position": self._position, **self._identity}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where *state* was taken.

        Raises:
            ValueError: it was taken from other rows, or with another seed or order.
        """
        differs = [
            f"{key} {state.get(key)!r}, now {now!r}"
            for key, now in self._identity.items()
            if state.get(key) != now
        ]
        if differs:
            msg = f"the prompts are not those of the checkpoint: {'; '.join(differs)}"
            raise ValueError(msg)
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._permutation(self._epoch)

    def _turn(self) -> None:
        self._epoch += 1
        self._position = 0
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> list[int]:
        from omni_core.seeds import derive_seed  # torch, which a config has no use for

        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(derive_seed("prompt-order", self._seed, epoch)).shuffle(order)
        return order


def _identity(rows: Sequence[PromptRow], seed: int, shuffle: bool) -> dict[str, Any]:
    """Say what an order belongs to."""
    from omni_core.seeds import derive_seed

    parts = [part for row in rows for part in (row.row_id, row.prompt)]
    digest = f"{derive_seed('prompts', *parts):016x}"
    return {"rows": len(rows), "digest": digest, "seed": seed, "shuffle": shuffle}
