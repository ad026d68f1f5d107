"""Rewards within a reward: each under a name of its own, which metrics and weights go by. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import attrs

from omni_core import plugins
from omni_core.config import PluginChoice

Parts = Mapping[str, Annotated[PluginChoice, plugins.REWARDS]]
"""Name in the metrics -> reward."""

RESERVED = ("max", "mean", "min", "prompts", "retries", "reward_mean", "score", "std", "unscored")
"""What a part cannot be called: metrics have these names already."""
OF_THE_WHOLE = ("monitors", "on_error", "retries", "workers")
"""Options that the outermost reward has for all of its parts."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def check_parts(_: Any, attribute: attrs.Attribute[Any], parts: Mapping[str, PluginChoice]) -> None:
    """Check names, and that no part has options that belong to the whole: a validator of attrs.

    Raises:
        ValueError: names the part, and what fits.
    """
    for name, choice in parts.items():
        if not _NAME.fullmatch(name) or name in RESERVED:
            msg = (
                f"a part cannot be called {name!r}: letters, digits, `_` and `-` make a name, and "
                f"{', '.join(RESERVED)} are taken"
            )
            raise ValueError(msg)
        fields = attrs.fields_dict(type(choice.options))
        for key in OF_THE_WHOLE:
            if key in fields and getattr(choice.options, key) != _default(fields[key]):
                msg = (
                    f"{name}.{key} is set once, for all parts: reward.{key} instead of "
                    f"reward.{attribute.name}.{name}.{key}"
                )
                raise ValueError(msg)


def _default(field: attrs.Attribute[Any]) -> Any:
    factory = getattr(field.default, "factory", None)
    return field.default if factory is None else factory()


def parts_with_paths(parts: Parts, change: Callable[[str], str]) -> Parts:
    """Return the same parts, each path of the file system in their options changed."""
    return {
        name: attrs.evolve(choice, options=choice.options.with_paths(change))
        for name, choice in parts.items()
    }
