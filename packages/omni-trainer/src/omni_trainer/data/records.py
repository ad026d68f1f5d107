"""Raw rows of a prompt file, each with its line: what a kind of file holds before its columns are read.

| suffix | a row is | its number |
|---|---|---|
| `.txt` | a line, the prompt itself | the line |
| `.jsonl` | a line with a JSON object | the line |
| `.csv` | a record below the header; every value is a text, an empty one is none | its first line |
| `.json` | an object of the one list in the file | its place, from 1 |
| `.parquet` | a row | its place, from 1 |
| a directory | a row of a HF dataset (`save_to_disk`) | its place, from 1 |

Texts are UTF-8, with or without a byte order mark, with LF or CRLF line ends. HF `datasets` reads lines,
parquet and directories; pictures and sounds in them stay encoded.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from omni_trainer.data.rows import PromptFileError

REPLACED = "\ufffd"
"""What bytes that are not UTF-8 are read as."""
NOT_UTF8 = "not UTF-8 (or it holds U+FFFD, the mark of text that once was not)"
TEXT = ".txt"


@attrs.frozen(kw_only=True)
class Record:
    """One row, or why it is none."""

    line: int
    """Its number, counted from 1."""
    values: dict[str, Any] = attrs.field(factory=dict)
    mistake: str | None = None


def read_records(path: Path, prompt_column: str) -> Iterator[Record]:
    """Yield every row, bad ones included.

    Args:
        path: A file, or the directory of a HF dataset.
        prompt_column: What a line of a text file is called.

    Raises:
        FileNotFoundError: there is nothing at *path*.
        PromptFileError: an unknown kind of file, or one that cannot be read at all.
    """
    if not path.exists():
        msg = f"prompt file {str(path)!r} does not exist"
        raise FileNotFoundError(msg)
    if path.is_dir():
        yield from _dataset(path)
    elif path.suffix.lower() == TEXT:
        yield from _text(path, prompt_column)
    else:
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            msg = (
                f"{path}: the suffix {path.suffix!r} is not known; prompt files are .txt (a prompt a "
                "line), .jsonl, .json, .csv, .parquet, or the directory of a HF dataset"
            )
            raise PromptFileError(msg)
        yield from reader(path)


def place(path: Path, line: int) -> str:
    """Say where a row is: `FILE:LINE`, or `FILE row N` where there are no lines."""
    lines = path.suffix.lower() in (TEXT, ".jsonl", ".csv")
    return f"{path.name}:{line}" if lines else f"{path.name} row {line}"


# -- lines ------------------------------------------------------------------------------------------


def _text(path: Path, prompt_column: str) -> Iterator[Record]:
    for line, text in enumerate(_lines(path), 1):
        mistake = _line_mistake(text)
        yield Record(line=line, values={prompt_column: text}, mistake=mistake)


def _jsonl(path: Path) -> Iterator[Record]:
    """Parse each line by itself: a broken one neither hides the others nor changes their values."""
    for line, text in enumerate(_lines(path), 1):
        mistake = _line_mistake(text)
        if mistake is not None:
            yield Record(line=line, mistake=mistake)
            continue
        try:
            values = json.loads(text)
        except json.JSONDecodeError as exc:
            yield Record(line=line, mistake=f"not JSON: {exc.msg} (column {exc.colno})")
            continue
        yield _object(line, values)


def _lines(path: Path) -> Iterator[str]:
    """Yield every line, blank ones included; bytes that are not UTF-8 come as U+FFFD."""
    if path.stat().st_size == 0:
        return
    with _streamed("text", path, encoding="utf-8-sig", encoding_errors="replace") as rows:
        for row in rows:
            yield row["text"]


def _line_mistake(text: str) -> str | None:
    if REPLACED in text:
        return NOT_UTF8
    return None if text.strip() else "blank"


def _object(line: int, values: Any) -> Record:
    if not isinstance(values, dict):
        return Record(line=line, mistake=f"expected a JSON object, got {type(values).__name__}")
    return Record(line=line, values=values)


# -- whole files ------------------------------------------------------------------------------------


def _json(path: Path) -> Iterator[Record]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig") or "[]")
    except UnicodeDecodeError as exc:
        msg = f"{path}: not UTF-8 (byte {exc.start})"
        raise PromptFileError(msg) from None
    except json.JSONDecodeError as exc:
        msg = f"{path}:{exc.lineno}: not JSON: {exc.msg} (one object a line is a .jsonl file)"
        raise PromptFileError(msg) from None
    if not isinstance(found, list):
        msg = f"{path}: expected a list of objects, got {type(found).__name__}"
        raise PromptFileError(msg)
    for line, values in enumerate(found, 1):
        yield _object(line, values)


def _csv(path: Path) -> Iterator[Record]:
    """Every value as the text that it is: no guess of a type turns "07" into 7."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            _check_header(path, header)
            line = reader.line_num + 1
            for cells in reader:
                yield _cells(line, header, cells)
                line = reader.line_num + 1
        except csv.Error as exc:
            msg = f"{path}:{reader.line_num}: not CSV: {exc}"
            raise PromptFileError(msg) from None


def _check_header(path: Path, header: list[str]) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice or not all(name.strip() for name in header):
        held = f"{', '.join(map(repr, twice))} twice" if twice else "a column without a name"
        msg = f"{path}:1: the header names {held}"
        raise PromptFileError(msg)


def _cells(line: int, header: list[str], cells: list[str]) -> Record:
    if not any(cells):
        return Record(line=line, mistake="blank")
    if REPLACED in "".join(cells):
        return Record(line=line, mistake=NOT_UTF8)
    if len(cells) != len(header):
        return Record(line=line, mistake=f"{len(cells)} values for {len(header)} columns")
    return Record(
        line=line, values={key: cell or None for key, cell in zip(header, cells, strict=True)}
    )


def _parquet(path: Path) -> Iterator[Record]:
    try:
        with _streamed("parquet", path) as rows:
            for line, values in enumerate(_encoded(rows), 1):
                yield Record(line=line, values=dict(values))
    except (OSError, ValueError) as exc:
        msg = f"{path} cannot be read as parquet: {exc}"
        raise PromptFileError(msg) from exc


def _dataset(path: Path) -> Iterator[Record]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path.absolute()))
    except (OSError, ValueError) as exc:
        msg = f"{path} is no directory of a HF dataset (one that save_to_disk wrote): {exc}"
        raise PromptFileError(msg) from None
    if isinstance(found, datasets.DatasetDict):
        splits = ", ".join(str(path / name) for name in found)
        msg = f"{path} holds several splits; name one: {splits}"
        raise PromptFileError(msg)
    for line, values in enumerate(_encoded(found), 1):
        yield Record(line=line, values=dict(values))


def _encoded(rows: Any) -> Any:
    """Leave pictures, sounds and videos as the bytes or paths that they are stored as."""
    for name, feature in (rows.features or {}).items():
        if getattr(feature, "decode", False):
            rows = rows.cast_column(name, dataclasses.replace(feature, decode=False))
    return rows


@contextmanager
def _streamed(kind: str, path: Path, **options: Any) -> Iterator[Any]:
    """Open a file by a builder of `datasets`, without copying it and without network."""
    import datasets  # takes a second, and only a run needs it

    # Streaming copies nothing; the cache directory takes a lock file.
    with tempfile.TemporaryDirectory(prefix="omni-prompts-") as cache:
        yield datasets.load_dataset(
            kind,
            data_files=[glob.escape(str(path.absolute()))],
            split="train",
            streaming=True,
            cache_dir=cache,
            **options,
        )


_READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    ".csv": _csv,
    ".json": _json,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
"""Suffix -> reader of files with columns."""
