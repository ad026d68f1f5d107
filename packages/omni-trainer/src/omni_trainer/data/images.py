"""The picture in a column of a row: a path, or what a HF dataset stores of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_core.input_image import InputImage


def image_of(value: Any, *, column: str, folder: Path, whole: bool) -> InputImage:
    """Return a column's picture, which is there and is one.

    Args:
        value: A path, or a mapping with `bytes` and `path`.
        column: Its name, for the error.
        folder: That a relative path starts from.
        whole: Decode it, instead of looking at the file's head alone.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    image = _found(value, folder)
    if image is None:
        held = "missing" if value is None else type(value).__name__
        msg = f"image column {column!r} is {held}; a path or a stored picture is expected"
        raise ValueError(msg)
    try:
        image.pixels() if whole else image.size()
    except (FileNotFoundError, ValueError) as exc:
        msg = f"image column {column!r}: {exc}"
        raise ValueError(msg) from None
    return image


def _found(value: Any, folder: Path) -> InputImage | None:
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return InputImage(data=value["bytes"])
        value = value.get("path")
    if isinstance(value, str) and value.strip():
        # Workers may run elsewhere: the path holds from any directory.
        return InputImage(path=str((folder / Path(value).expanduser()).absolute()))
    return None
