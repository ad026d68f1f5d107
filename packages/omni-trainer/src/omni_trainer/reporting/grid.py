"""Grids of pictures and frames that a person can look at: tiny ones are enlarged, captions are wrapped.

Axes: N pictures, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pictures = NDArray[np.uint8]
"""[N, H, W, 3], RGB."""

LEAST_SIDE = 128
"""Pixels: smaller pictures are enlarged by a whole factor to at least this width."""
GAP = 8
FONT_SIZE = 13
CAPTION_LINES = 3
INK = (30, 30, 30)
PAPER = (255, 255, 255)


def write_grid(
    path: Path,
    images: Pictures,
    *,
    columns: int,
    titles: Sequence[str] | None = None,
    scale: int | None = None,
    heading: str | None = None,
) -> None:
    """Write pictures in rows of *columns* as a PNG.

    Args:
        path: Of the file.
        images: uint8 [N, H, W, 3], RGB, N >= 1.
        columns: Pictures in a row.
        titles: Written under each picture, in at most three lines.
        scale: Each pixel becomes a square of this side; None makes small pictures 128 wide or more.
        heading: Written above all.

    Raises:
        ValueError: not such images, or not one title for each.
    """
    _check(images, titles)
    _write(path, [[_enlarged(image, scale)] for image in images], columns, titles, heading)


def write_contact_sheet(
    path: Path, videos: Sequence[Pictures], titles: Sequence[str], *, columns: int = 2
) -> None:
    """Write some frames of each video side by side as a PNG, each with its prompt.

    Args:
        path: Of the file.
        videos: uint8 [K, H, W, 3] each, all of one shape, at least one.
        titles: One for each video.
        columns: Videos in a row.

    Raises:
        ValueError: the shapes differ, or there is not one title for each video.
    """
    _check(np.concatenate(list(videos)), None)
    if len({video.shape for video in videos}) != 1 or len(titles) != len(videos):
        shapes = sorted({video.shape for video in videos})
        msg = f"videos of one shape with a title each: got {shapes}, {len(titles)} titles"
        raise ValueError(msg)
    cells = [[_enlarged(frame, None) for frame in video] for video in videos]
    _write(path, cells, columns, titles, "frames of each video, from the first to the last")


def write_before_after_grid(
    path: Path,
    before: Pictures,
    after: Pictures,
    titles: Sequence[str],
    *,
    columns: int = 4,
    scale: int | None = None,
    heading: str = "each pair: before (left) and after (right), one seed",
) -> None:
    """Write pairs side by side, each with its prompt: the same prompt and seed before and after.

    Args:
        path: Of the file (PNG).
        before: uint8 [N, H, W, 3].
        after: The same shape.
        titles: One for each pair.
        columns: Pairs in a row.
        scale: As for `write_grid`.
        heading: Written above all.

    Raises:
        ValueError: the shapes differ, or there is not one title for each pair.
    """
    _check(before, titles)
    if before.shape != after.shape:
        msg = f"before {before.shape} and after {after.shape} must have one shape"
        raise ValueError(msg)
    cells = [
        [_enlarged(first, scale), _enlarged(second, scale)]
        for first, second in zip(before, after, strict=True)
    ]
    _write(path, cells, columns, titles, heading)


def _check(images: Pictures, titles: Sequence[str] | None) -> None:
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8 or not len(images):
        msg = f"a grid takes uint8 [N, H, W, 3] with N >= 1, got {images.dtype} {images.shape}"
        raise ValueError(msg)
    if titles is not None and len(titles) != len(images):
        msg = f"{len(titles)} titles for {len(images)} pictures"
        raise ValueError(msg)


def _enlarged(image: Pictures, scale: int | None) -> Image.Image:
    """Show every pixel as a square: nothing is smoothed over."""
    picture = Image.fromarray(np.ascontiguousarray(image))
    factor = scale or max(1, math.ceil(LEAST_SIDE / picture.width))
    size = (picture.width * factor, picture.height * factor)
    return picture.resize(size, Image.Resampling.NEAREST)


def _write(
    path: Path,
    cells: Sequence[Sequence[Image.Image]],
    columns: int,
    titles: Sequence[str] | None,
    heading: str | None,
) -> None:
    """Lay out cells of one or more pictures, all of one size, with captions below."""
    font = ImageFont.load_default(size=FONT_SIZE)
    line = FONT_SIZE + 4
    columns = min(columns, len(cells))
    width = sum(picture.width for picture in cells[0]) + 2 * (len(cells[0]) - 1)
    captions = [_wrapped(title, width, font) for title in titles or [""] * len(cells)]
    height = cells[0][0].height + line * max(len(caption) for caption in captions) + GAP
    top = GAP + (line + GAP if heading else 0)
    rows = math.ceil(len(cells) / columns)
    sheet = Image.new("RGB", (GAP + columns * (width + GAP), top + rows * height), PAPER)
    draw = ImageDraw.Draw(sheet)
    if heading:
        draw.text((GAP, GAP), heading, fill=INK, font=font)
    for place, (cell, caption) in enumerate(zip(cells, captions, strict=True)):
        row, column = divmod(place, columns)
        left, upper = GAP + column * (width + GAP), top + row * height
        x = left
        for picture in cell:
            sheet.paste(picture, (x, upper))
            x += picture.width + 2
        for number, text in enumerate(caption):
            draw.text((left, upper + cell[0].height + 2 + number * line), text, fill=INK, font=font)
    sheet.save(path, format="PNG")


def _wrapped(
    text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> list[str]:
    """Break *text* into lines that fit *width* pixels; what does not fit ends in an ellipsis."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > CAPTION_LINES:
        lines = [*lines[: CAPTION_LINES - 1], f"{lines[CAPTION_LINES - 1]} ..."]
    return [_cut(line, width, font) for line in lines]


def _cut(line: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(f"{line}...") > width:
        line = line[:-1]
    return f"{line}..."
