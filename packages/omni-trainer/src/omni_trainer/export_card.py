"""`sampling.json` beside an exported adapter: how to draw with it the pictures that the trainer drew.

It holds what a stock pipeline is called with: a family that attends to its padding is another model
at another text length, and pictures of another size are other pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_trainer.config import RunConfig
from omni_trainer.evaluation import Evaluation, Pictures
from omni_trainer.run_directory import write_json

CARD = "sampling.json"


def write_card(
    directory: Path,
    config: RunConfig,
    call: Mapping[str, Any],
    evaluated: tuple[Evaluation, Pictures | None] | None,
) -> Path:
    """Write the card.

    Args:
        directory: Of the export.
        config: The run's.
        call: Keywords of the stock pipeline, as the engine's family says them.
        evaluated: Held-out scores of the exported weights, for prompts and seeds of the pictures that
            the run shows; None leaves them out.
    """
    sampling = config.evaluation.sampling
    pictures = []
    if evaluated is not None and evaluated[1] is not None:
        shown = evaluated[0].prompts[: len(evaluated[1])]
        pictures = [{"prompt": each.prompt, "seed": each.seeds[0]} for each in shown if each.seeds]
    card = {
        "model": config.model.path,
        "dtype": config.model.dtype.value,
        "call": dict(call),
        "sampler": {
            "kind": config.evaluation.kind.value,
            "noise_level": config.evaluation.noise_level,
            "schedule": sampling.schedule.value,
        },
        "pictures": pictures,
    }
    write_json(directory / CARD, card)
    return directory / CARD
