"""The nearest key of a whole run's config, for one that is unknown where it was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import attrs

from omni_core import plugins
from omni_core.options import (
    AlgorithmConfig,
    DiffusionRolloutConfig,
    EngineConfig,
    RewardConfig,
)
from omni_trainer.run_config import RunConfig

CHOICES: Mapping[str, frozenset[str]] = {
    path: frozenset(field.name for field in attrs.fields(base))
    for path, base in (
        ("engine", EngineConfig),
        ("rollout", DiffusionRolloutConfig),
        ("algorithm", AlgorithmConfig),
        ("reward", RewardConfig),
        ("reward.monitors.*", RewardConfig),
        ("reward.terms.*", RewardConfig),
    )
}
"""Places that pick a plugin, with the keys that every plugin of the group takes: they stay when
another one is picked, so that a recipe's rollout is swapped by its name alone."""

ELSEWHERE: Mapping[str, str] = {
    "save_freq": "checkpoint.every",
    "save_every": "checkpoint.every",
    "max_ckpt_to_keep": "checkpoint.keep",
    "test_freq": "evaluation.every",
    "eval_freq": "evaluation.every",
    "val_before_train": "evaluation.initial",
    "total_training_steps": "trainer.steps",
    "max_steps": "trainer.steps",
    "n_gpus_per_node": "trainer.ranks",
    "num_gpus": "trainer.ranks",
    "experiment_name": "trainer.name",
    "default_local_dir": "trainer.run_dir",
    "logger": "trainer.trackers",
    "train_batch_size": "data.prompts_per_step",
    "learning_rate": "optimizer.lr",
    "seed": "seeds.rollout",
}
"""What other systems call a key of ours: for the hint of an unknown key."""


def with_hint(line: str) -> str:
    """Name the nearest key of the whole config where the section itself has none."""
    found = re.match(r"(?P<path>[^:]*): unknown key; known: ", line)
    if not found:
        return line
    key = found["path"].rpartition(".")[2]
    names: dict[str, str] = dict(ELSEWHERE)
    for path in known_paths():
        names.setdefault(path.rpartition(".")[2], path)
    close = plugins.nearest(key, list(names))
    if close is None:
        return line
    return line.replace("unknown key; ", f"unknown key; did you mean {names[close]!r}? ", 1)


def known_paths() -> list[str]:
    """List every key of a run but the plugins' own options."""
    return list(_paths(RunConfig, ""))


def _paths(cls: Any, path: str) -> Iterator[str]:
    attrs.resolve_types(cls, include_extras=True)
    for field in attrs.fields(cls):
        here = f"{path}.{field.name}" if path else field.name
        inner = [arg for arg in (field.type, *get_args(field.type)) if attrs.has(arg)]
        if field.name in CHOICES and not path:
            yield f"{here}.name"
        elif inner:
            yield from _paths(inner[0], here)
        else:
            yield here
