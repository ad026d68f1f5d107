"""A run's whole configuration: how it is loaded and checked.

Everything that can be wrong is found here, before anything starts and all at once; torch is not
imported. Where each value came from is kept beside it. The sections are in run_config, the rules
between them in config_rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs

from omni_core import config as core
from omni_core import plugins
from omni_core.config import ConfigError, Resolved
from omni_core.recipe import Recipe
from omni_trainer.config_hints import CHOICES, known_paths, with_hint
from omni_trainer.config_rules import broken_rules, engine_name
from omni_trainer.launched import launched_ranks
from omni_trainer.run_config import (
    Backend,
    DataConfig,
    EvaluationConfig,
    ResumeMode,
    RunConfig,
    SeedsConfig,
    TrainerConfig,
)

__all__ = [
    "DEFAULTS",
    "Backend",
    "DataConfig",
    "EvaluationConfig",
    "LoadedRun",
    "ResumeMode",
    "RunConfig",
    "SeedsConfig",
    "TrainerConfig",
    "changes",
    "check",
    "engine_name",
    "known_paths",
    "load_run",
    "trained_with",
]

DEFAULTS = core.Layer(
    source="default", values={"engine": {"name": "fsdp2"}, "rollout": {"name": "engine"}}
)


@attrs.frozen(kw_only=True)
class LoadedRun:
    """A checked config and where it came from."""

    config: RunConfig
    resolved: Resolved
    source: str
    """The recipe's name, or the file's path."""


# -- loading ----------------------------------------------------------------------------------------


def load_run(source: str, overrides: Sequence[str] = ()) -> LoadedRun:
    """Read a recipe or a YAML file, lay the overrides over it, and check all of it.

    Args:
        source: Name of a recipe, or path of a YAML file (anything with a `/` or ending in .yaml, .yml).
        overrides: `dotted.key=value`.

    Raises:
        ConfigError: every mistake, one a line, each with its path.
        PluginNotFoundError: no such recipe; lists those that are installed.
        FileNotFoundError: no such file.
    """
    added = {text[1:].partition("=")[0].strip() for text in overrides if text.startswith("+")}
    layers = [
        DEFAULTS,
        _read(source),
        *_of_the_launcher(),
        core.parse_overrides([text.removeprefix("+") for text in overrides]),
    ]
    resolved = core.merge(layers, choices=CHOICES)
    return LoadedRun(config=check(resolved.values, added=added), resolved=resolved, source=source)


def _is_file(source: str) -> bool:
    return "/" in source or source.endswith((".yaml", ".yml"))


def recipe_of(source: str) -> Recipe | None:
    """Build the recipe that *source* names; None where it is a file.

    Raises:
        PluginNotFoundError: no such recipe; lists those that are installed.
    """
    if _is_file(source):
        return None
    plugin = plugins.registry(plugins.RECIPES).get(source)
    return cast(Recipe, plugin.build(plugin.options()))


def _of_the_launcher() -> list[core.Layer]:
    """One rank in each process that a launcher such as torchrun started."""
    ranks = launched_ranks()
    values = {"trainer": {"backend": Backend.LOCAL.value, "ranks": ranks}}
    return [core.Layer(source="launcher", values=values)] if ranks > 1 else []


def _read(source: str) -> core.Layer:
    recipe = recipe_of(source)
    if recipe is None:
        path = Path(source).expanduser()
        if not path.is_file():
            msg = f"config file {source!r} does not exist"
            raise FileNotFoundError(msg)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as exc:
            raise ConfigError([f"{source}: not UTF-8 (byte {exc.start})"]) from None
        return core.read_yaml(text, source=source)
    return core.read_yaml(recipe.yaml, source=f"recipe {source}")


def check(values: Mapping[str, Any], *, added: Collection[str] = ()) -> RunConfig:
    """Build the config of plain values.

    Args:
        values: As YAML has them.
        added: Paths that were written as `+path`, which is a mistake whatever they are.

    Raises:
        ConfigError: every mistake at once: keys, types, choices, and what does not fit together.
    """
    attrs.resolve_types(RunConfig, include_extras=True)
    fields = {field.name: field for field in attrs.fields(RunConfig)}
    mistakes = [
        f"{key}: unknown key; known: {', '.join(fields)}" for key in values if key not in fields
    ]
    sections: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            sections[name], wrong = _section(name, field.type, values[name])
            mistakes += wrong
        elif field.default is attrs.NOTHING:
            mistakes.append(f"{name}: required and missing")
            sections[name] = None
        else:
            factory = getattr(field.default, "factory", None)
            sections[name] = field.default if factory is None else factory()
    mistakes += [f"{path}: {text}" for path, text in broken_rules(sections, values)]
    for path in added:
        if not any(line.startswith(f"{path}:") for line in mistakes):
            mistakes.append(f"{path}: a key that exists is set without `+`: write {path}=...")
    if mistakes:
        raise ConfigError([with_hint(line) for line in mistakes])
    return RunConfig(**sections)


def _section(name: str, cls: Any, raw: Any) -> tuple[Any, list[str]]:
    """Structure one section; unknown keys alone do not keep it from the rules between sections."""
    try:
        return core.converter.structure(raw, cls), []
    except ConfigError as exc:
        mistakes = [f"{name}.{line}" for line in exc.mistakes]
    except (ValueError, TypeError, plugins.PluginNotFoundError, plugins.PluginError) as exc:
        return None, [f"{name}: {exc.args[0] if exc.args else type(exc).__name__}"]
    unknown = [line.partition(": ")[0] for line in mistakes if ": unknown key; " in line]
    if len(unknown) < len(mistakes):
        return None, mistakes
    try:
        return core.converter.structure(_without(raw, unknown, name), cls), mistakes
    except (ConfigError, ValueError):
        return None, mistakes


def _without(values: Mapping[str, Any], paths: Collection[str], path: str) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        here = f"{path}.{key}"
        if here not in paths:
            kept[key] = _without(value, paths, here) if isinstance(value, Mapping) else value
    return kept


# -- what a resumed run goes on with ----------------------------------------------------------------

_MAY_DIFFER = frozenset({"model.path", "data.train", "data.heldout"})
"""A file may have moved: what it holds is compared elsewhere."""
_SECTIONS = frozenset(
    {"model", "engine", "optimizer", "rollout", "algorithm", "reward", "data", "seeds"}
)


def trained_with(config: RunConfig) -> dict[str, Any]:
    """Return every value that training depends on, by its path: plain data for a checkpoint."""
    return {
        path: value
        for path, value in core.leaves(core.unstructure(config))
        if path.partition(".")[0] in _SECTIONS and path not in _MAY_DIFFER
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Say `before -> now` of every value that differs, by its path; nothing where *before* is empty."""
    paths = [*before, *(path for path in now if path not in before)] if before else []
    return {
        path: f"{before.get(path)} -> {now.get(path)}"
        for path in paths
        if before.get(path) != now.get(path)
    }
