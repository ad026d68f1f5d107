"""What a recipe may say about the rewards that ship here. Imports no torch."""

from __future__ import annotations

from typing import Any

import attrs

from omni_core.options import RewardConfig, positive
from omni_trainer.targets import RULES


@attrs.frozen(kw_only=True)
class OCRRewardConfig(RewardConfig):
    """How pictures are read; a target is taken from the prompt by `target_rule`."""

    target_rule: str | None = attrs.field(default=None)
    """`quoted` (None): the one part in double quotes; `first_quoted`: the first of several."""
    detect: bool = False
    """Find the lines of text first and read each, for pictures of scenes; without it a picture is
    read as one line, which is right (and several times faster) where the text fills it."""
    batch_size: int = attrs.field(default=32, validator=positive)
    """Lines read together."""
    threads: int = attrs.field(default=1, validator=positive)
    """Threads of one worker's recognition model."""

    @target_rule.validator
    def _known(self, _: Any, value: str | None) -> None:
        if value is not None and value not in RULES:
            msg = f"{value!r} is none of {', '.join(RULES)}"
            raise ValueError(msg)
