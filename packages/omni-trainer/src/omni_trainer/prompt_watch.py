"""Prompts that are longer than the model reads: counted at every step, and told of once."""

from __future__ import annotations

import structlog

from omni_core.prompt_length import PromptLength
from omni_trainer.samples import Samples

log = structlog.get_logger()

CUT = "rollout/cut_prompts"
SHOWN = 60
"""Characters of the longest prompt that the warning shows."""


class PromptWatch:
    """Of one run."""

    def __init__(self) -> None:
        self._told = False

    def metrics(self, samples: Samples) -> dict[str, float]:
        """Count the step's prompts whose end was not read; nothing where lengths are not known."""
        lengths = _lengths(samples)
        if not lengths:
            return {}
        cut = {prompt: length for prompt, length in lengths.items() if length.cut}
        if cut and not self._told:
            self._told = True
            longest = max(cut, key=lambda prompt: cut[prompt].tokens)
            log.warning(
                "prompts.cut",
                prompts=len(cut),
                longest=cut[longest].tokens,
                limit=cut[longest].limit,
                prompt=longest[:SHOWN],
                hint="the model reads no more of a prompt: `omni data check` lists them",
            )
        return {CUT: float(len(cut))}


def _lengths(samples: Samples) -> dict[str, PromptLength]:
    return {
        source.info.records[0].prompt: source.info.prompt_length
        for source in samples.sources
        if source.info.prompt_length is not None
    }
