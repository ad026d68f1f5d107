"""`sampling.json` beside an exported adapter: how to draw with it the pictures that the trainer drew.

It holds what a stock pipeline is called with: a family that attends to its padding is another model
at another text length, and pictures of another size are other pictures.
"""

from __future__ import annotations

from pathlib import Path

from omni_trainer.config import RunConfig
from omni_trainer.evaluation import Evaluation, Pictures
from omni_trainer.run_directory import write_json

CARD = "sampling.json"


def write_card(
    directory: Path, config: RunConfig, evaluated: tuple[Evaluation, Pictures | None] | None
) -> Path:
    """Write the card.

    Args:
        directory: Of the export.
        config: The run's.
        evaluated: Held-out scores of the exported weights, for prompts and seeds of the pictures that
            the run shows; None leaves them out.
    """
    sampling, pipeline = config.evaluation.sampling, config.model.pipeline
    pictures = []
    if evaluated is not None and evaluated[1] is not None:
        shown = evaluated[0].prompts[: len(evaluated[1])]
        pictures = [{"prompt": each.prompt, "seed": each.seeds[0]} for each in shown if each.seeds]
    card = {
        "model": config.model.path,
        "dtype": config.model.dtype.value,
        "call": {
            "height": pipeline.height,
            "width": pipeline.width,
            "max_sequence_length": pipeline.max_sequence_length,
            "num_inference_steps": sampling.num_inference_steps,
            "guidance_scale": sampling.guidance_scale,
            "negative_prompt": sampling.negative_prompt,
        },
        "sampler": {
            "kind": config.evaluation.kind.value,
            "noise_level": config.evaluation.noise_level,
            "schedule": sampling.schedule.value,
        },
        "pictures": pictures,
    }
    write_json(directory / CARD, card)
    return directory / CARD
