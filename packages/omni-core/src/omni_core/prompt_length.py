"""How long a prompt is for a model's text encoder. Imports no torch."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class PromptLength:
    """One prompt, counted before anything is cut off."""

    tokens: int
    """Special tokens included."""
    limit: int
    """Tokens that the encoder reads; what comes after them has no effect."""

    @property
    def cut(self) -> bool:
        """Whether the end of the prompt is not read."""
        return self.tokens > self.limit
