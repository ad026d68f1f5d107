"""Model families, one file each: Denoiser, Conditioner and Codec of one kind of pipeline."""

from __future__ import annotations

import logging


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out that image processors, which no family uses, do without torchvision."""
    return "requires torchvision (not installed)" not in record.getMessage()


# Here, because it comes before any family: importing a stock pipeline is what logs it.
_LOGGER = "transformers.utils.import_utils"
logging.getLogger(_LOGGER).addFilter(_is_news)  # noqa: TID251 -- theirs, not ours
