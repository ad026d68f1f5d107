"""`omni config show | validate | describe`: what a run would be, and what it may hold; nothing is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from rich.text import Text

from omni_core import config
from omni_core.recipe import Recipe
from omni_trainer import config_reference
from omni_trainer.commands.terminal import print_table
from omni_trainer.config import load_run, recipe_of


def show(source: str, overrides: Sequence[str], *, as_yaml: bool) -> int:
    """Print every value of the resolved config with the layer that it came from."""
    loaded = load_run(source, overrides)
    values = config.unstructure(loaded.config)
    if as_yaml:
        sys.stdout.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return 0
    recipe = recipe_of(source)
    if recipe is not None:
        _print_recipe(source, recipe)
    rows = []
    for path, value in config.leaves(values):
        origin = config.source_of(path, loaded.resolved.sources)
        style = "dim" if origin == "default" else ""
        rows.append([Text(path, style), Text(origin, style), Text(_said(value), style)])
    print_table(["key", "from", "value"], rows)
    return 0


def _print_recipe(name: str, recipe: Recipe) -> None:
    """Print what a recipe claims, and what of it is not as published."""
    print(f"{name}: {recipe.summary}")
    print(f"standing: {recipe.standing.value}; {recipe.hardware}; {recipe.global_batch} a step")
    if recipe.source:
        print(f"settings: {recipe.source}")
    print()


def _said(value: Any) -> str:
    """Write one leaf the way that an override takes it."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def describe(wanted: str | None) -> int:
    """Print every key with its type, default and meaning; 2 where nothing is called *wanted*.

    Args:
        wanted: Only keys below this path, or those of a plugin (`flow_grpo`, `algorithm: flow_grpo`).
    """
    found = False
    for section in config_reference.sections():
        keys = [key for key in section.keys if _is_wanted(key.path, section.title, wanted)]
        if not keys:
            continue
        if found:
            print()
        found = True
        print(f"{section.title} -- {section.summary}")
        rows = [[key.path, key.type, key.default, key.meaning] for key in keys]
        print_table(["key", "type", "default", "meaning"], rows)
    if not found:
        titles = ", ".join(section.title for section in config_reference.sections())
        sys.stderr.write(f"no key or section is called {wanted!r}; sections: {titles}\n")
        return 2
    return 0


def _is_wanted(path: str, title: str, wanted: str | None) -> bool:
    if wanted is None or wanted in (title, title.partition(": ")[2]):
        return True
    return path == wanted or path.startswith((f"{wanted}.", f"{wanted}[]."))


def validate(source: str, overrides: Sequence[str]) -> int:
    """Load the config and say that it fits; mistakes are raised, all of them at once."""
    load_run(source, overrides)
    print(f"{source} is valid")
    return 0
