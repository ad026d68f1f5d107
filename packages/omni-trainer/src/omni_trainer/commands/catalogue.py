"""`omni recipes` and `omni plugins`: what is installed, broken plugins included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs
from rich.text import Text

from omni_core import plugins as core
from omni_trainer.commands.terminal import console, print_table


@attrs.frozen(kw_only=True)
class Offer:
    """One plugin as a listing shows it."""

    group: str
    name: str
    distribution: str
    plugin: core.Plugin | None = None
    """None if it cannot be used; `error` says why."""
    result: Any = None
    """What `use` made of it."""
    error: str = ""


def offers(
    *groups: str, use: Callable[[core.Plugin], Any] = lambda plugin: None
) -> Iterator[Offer]:
    """Yield every plugin of *groups* (all, if none is named); a broken one is told, not raised.

    Args:
        groups: Entry-point groups.
        use: Called with each plugin: what it raises makes the plugin broken too.
    """
    for group in groups or core.GROUPS:
        for point in sorted(entry_points(group=group), key=lambda point: point.name):
            yield _offer(group, point, use)


def _offer(group: str, point: EntryPoint, use: Callable[[core.Plugin], Any]) -> Offer:
    offer = Offer(
        group=group,
        name=point.name,
        distribution=point.dist.name if point.dist is not None else "?",
    )
    try:
        plugin = core.registry(group).get(point.name)
        return attrs.evolve(offer, plugin=plugin, result=use(plugin))
    except Exception as exc:  # noqa: BLE001 -- a stranger's module may raise anything
        return attrs.evolve(offer, error=f"{type(exc).__name__}: {exc}")


def plugins(*, load: bool) -> int:
    """List the plugins of every group; 1 if any is broken.

    Args:
        load: Also import the implementations, to find those that cannot be.
    """
    rows: list[list[str | Text]] = []
    broken = 0
    for offer in offers(use=core.Plugin.load) if load else offers():
        start = [offer.group, offer.name, offer.distribution]
        if offer.plugin is None:
            broken += 1
            rows.append([*start, "-", Text(f"broken: {offer.error}", "red")])
        else:
            rows.append([*start, str(offer.plugin.api), offer.plugin.summary])
    print_table(["group", "name", "package", "contract", "summary"], rows)
    return 1 if broken else 0


def recipes() -> int:
    """List the recipes with their standing, hardware and global batch; 1 if one is broken."""
    from omni_core.recipe import Recipe

    def build(plugin: core.Plugin) -> Recipe:
        recipe = plugin.build(plugin.options())
        if not isinstance(recipe, Recipe):
            msg = f"{plugin.target} built {type(recipe).__name__}, not a Recipe"
            raise core.PluginError(msg)
        return recipe

    rows: list[list[str | Text]] = []
    broken = 0
    for offer in offers(core.RECIPES, use=build):
        recipe = offer.result
        if offer.plugin is None:
            broken += 1
            rows.append([offer.name, Text("broken", "red"), "-", "-", Text(offer.error, "red")])
        else:
            facts = [recipe.standing.value, recipe.hardware, recipe.global_batch, recipe.summary]
            rows.append([offer.name, *facts])
    if not rows:
        console().print("no recipe is installed; `pip install omni-configs` provides some")
        return 1
    print_table(["recipe", "standing", "hardware", "batch", "summary"], rows)
    return 1 if broken else 0
