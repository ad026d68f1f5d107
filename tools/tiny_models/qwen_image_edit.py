"""A QwenImageEditPipeline of random weights: the tiny Qwen-Image, with an encoder that sees pictures.

Its tokenizer knows single characters, so that the stock template alone is some 300 tokens long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import QwenImageEditPipeline

from tiny_models.qwen_image import parts, text_encoder
from tiny_models.saved import saved
from tiny_models.text import qwen_tokenizer

TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def build_tiny_qwen_image_edit(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a QwenImageEditPipeline of random weights.

    Args:
        directory: Made if missing.
        seed: Of the weights.
        dtype: What the weights are stored in.

    Returns:
        *directory*.
    """
    return saved(_qwen_image_edit, directory, seed=seed, dtype=dtype)


def _qwen_image_edit() -> QwenImageEditPipeline:
    tokenizer = qwen_tokenizer(*TOKENS.values())
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    return QwenImageEditPipeline(
        **parts(),
        text_encoder=text_encoder(**ids),
        tokenizer=tokenizer,
        processor=_processor(tokenizer),
    )


class Qwen2VLProcessor(transformers.Qwen2VLProcessor):  # type: ignore[misc]
    """Without videos, which need torchvision; a folder says that it is the stock one."""

    __module__ = transformers.Qwen2VLProcessor.__module__

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        super().__init__(image_processor, tokenizer)


def _processor(tokenizer: Any) -> Qwen2VLProcessor:
    pictures = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=4 * 56 * 56)
    return Qwen2VLProcessor(pictures, tokenizer)
