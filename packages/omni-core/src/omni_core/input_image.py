"""A picture that a sample is made from: where its file is, or the file's bytes. Loads no torch by itself."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from torch import Tensor

ORIENTATION = 0x0112
"""EXIF's tag of how a camera was held."""
TURNED = (5, 6, 7, 8)
"""Its values that swap width and height."""


@attrs.frozen(kw_only=True)
class InputImage:
    """Travels as it is, and is decoded where it is used: needs Pillow (`omni-core[images]`).

    Raises:
        ValueError: neither a path nor bytes, or both.
    """

    path: str | None = None
    """Of a file that every process can read."""
    data: bytes | None = attrs.field(default=None, repr=False)
    """Of a file: PNG, JPEG, ..."""

    def __attrs_post_init__(self) -> None:
        if (self.path is None) == (self.data is None):
            msg = "an input image has a path or the bytes of a file, one of them"
            raise ValueError(msg)

    @classmethod
    def of(cls, pixels: Tensor) -> InputImage:
        """Hold uint8 [H, W, 3] as the bytes of a PNG, which is exact."""
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(pixels.cpu().numpy()).save(file, format="PNG")
        return cls(data=file.getvalue())

    def size(self) -> tuple[int, int]:
        """Width and height in pixels, read from the file's head alone.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no picture.
        """
        with self._opened() as found:
            width, height = found.size
            turned = found.getexif().get(ORIENTATION) in TURNED
            return (height, width) if turned else (width, height)

    def pixels(self) -> Tensor:
        """Decode to uint8 [H, W, 3], RGB, the way up that its camera says.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no picture, or a broken one.
        """
        import numpy as np
        import torch
        from PIL import ImageOps

        with self._opened() as found:
            upright = ImageOps.exif_transpose(found).convert("RGB")
            return torch.from_numpy(np.array(upright))

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open it; what goes wrong in the context is said of the picture."""
        from PIL import Image

        if self.path is not None and not Path(self.path).is_file():
            msg = f"there is no file {self.path!r}"
            raise FileNotFoundError(msg)
        held = str(self.path) if self.data is None else io.BytesIO(self.data)
        try:
            with Image.open(held) as found:
                yield found
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as exc:
            msg = f"{self.path or 'a column'} holds no picture that can be read: {exc}"
            raise ValueError(msg) from exc
