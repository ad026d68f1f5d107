"""Lengths of prompts in tokens, by a tokenizer's directory on the local disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_core.prompt_length import PromptLength

UNBOUNDED = 10**9
"""A tokenizer without a limit of its own states a number far above this."""


class TokenCounter:
    """Counts as the tokenizer does, its special tokens included."""

    def __init__(self, directory: Path, limit: int | None) -> None:
        """Load it.

        Args:
            directory: With the files of a Hugging Face tokenizer.
            limit: Tokens that are read; None takes the tokenizer's own limit.

        Raises:
            ModuleNotFoundError: the extra `tokens` is not installed.
            FileNotFoundError: no such directory.
            ValueError: it holds no tokenizer, or one without a limit where none is given.
        """
        if not directory.is_dir():
            msg = f"there is no directory {str(directory)!r}"
            raise FileNotFoundError(msg)
        try:
            import transformers
        except ModuleNotFoundError as exc:
            msg = "counting tokens needs transformers: pip install omni-trainer[tokens]"
            raise ModuleNotFoundError(msg, name=exc.name) from exc
        auto: Any = transformers.AutoTokenizer
        try:
            self._tokenizer: Any = auto.from_pretrained(str(directory), local_files_only=True)
        except OSError as exc:
            msg = f"{directory} holds no tokenizer: {exc}"
            raise ValueError(msg) from exc
        own = int(self._tokenizer.model_max_length)
        if limit is None and own > UNBOUNDED:
            msg = f"the tokenizer in {directory} states no limit: say it with --max-tokens"
            raise ValueError(msg)
        self._limit = limit or own

    def __call__(self, prompts: Sequence[str]) -> list[PromptLength]:
        """Count the tokens of each prompt."""
        rows = self._tokenizer(list(prompts), verbose=False)["input_ids"]
        return [PromptLength(tokens=len(row), limit=self._limit) for row in rows]
