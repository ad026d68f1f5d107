"""`omni models`: the installed model families, what each supports, and which rollouts sample from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from omni_core import plugins as core
from omni_trainer.commands.catalogue import Offer, offers
from omni_trainer.commands.terminal import console, print_table

HEADINGS = (
    "family",
    "package",
    "pipelines",
    "tasks",
    "latents",
    "text",
    "guidance",
    "experts",
    "LoRA targets",
    "rollouts",
)


def models() -> int:
    """List the families; 1 if one is broken, or none is installed."""
    rollouts = [offer for offer in offers(core.ROLLOUTS, use=core.Plugin.load) if offer.plugin]
    rows: list[list[str | Text]] = []
    broken = 0
    for offer in offers(core.MODELS, use=core.Plugin.load):
        if offer.plugin is None:
            broken += 1
            rows.append([offer.name, offer.distribution, Text(f"broken: {offer.error}", "red")])
        else:
            rows.append([offer.name, offer.distribution, *facts(offer.result, rollouts)])
    if not rows:
        console().print(
            "no model family is installed; `pip install omni-engine-fsdp` provides some"
        )
        return 1
    print_table(HEADINGS, rows)
    return 1 if broken else 0


def facts(family: Any, rollouts: Sequence[Offer]) -> list[str]:
    """Say what a family declares: the columns after its name and package.

    Args:
        family: A subclass of `omni_core.model.ModelFamily`.
        rollouts: Loaded rollouts.
    """
    return [
        ", ".join(family.pipeline_classes),
        ", ".join(family.tasks),
        ", ".join(family.modalities),
        family.text_layout.value,
        family.guidance.value,
        ", ".join(family.expert_names),
        ", ".join(family.lora_targets) or "-",
        ", ".join(offer.name for offer in rollouts if samples(offer.result, family)) or "-",
    ]


def samples(rollout: Any, family: Any) -> bool:
    """Whether a rollout samples from a family's pipelines."""
    served: tuple[str, ...] | None = rollout.pipeline_classes
    return served is None or bool(set(served) & set(family.pipeline_classes))
