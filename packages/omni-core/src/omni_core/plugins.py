"""Plugins are found by name through entry points, and imported only when one is built.

A distribution offers a plugin by pointing an entry point at a `Plugin`: a light record with the
contract version it was written for, the class of its options and the import path of the code that
does the work. `Plugin.build` alone imports that code, so listing plugins or checking a config pulls
in no backend. Built-ins take the same road as strangers; `register` serves code of this process.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs

API = 1
"""Contract version; raised by one whenever a plugin written for the old contract would break."""

ENGINES = "omni.engines"
ROLLOUTS = "omni.rollouts"
MODELS = "omni.models"
ALGORITHMS = "omni.algorithms"
REWARDS = "omni.rewards"
RECIPES = "omni.recipes"
TRACKERS = "omni.trackers"
GROUPS = (ENGINES, ROLLOUTS, MODELS, ALGORITHMS, REWARDS, RECIPES, TRACKERS)

PROVIDERS: Mapping[tuple[str, str], str] = {
    (ENGINES, "diffusion.fsdp2"): "omni-engine-fsdp",
    (ENGINES, "diffusion_forward.fsdp2"): "omni-engine-fsdp",
    (ROLLOUTS, "engine"): "omni-engine-fsdp",
    (ROLLOUTS, "vllm_omni"): "omni-rollout-vllm",
    (MODELS, "flux"): "omni-engine-fsdp",
    (MODELS, "flux2"): "omni-engine-fsdp",
    (MODELS, "sana"): "omni-engine-fsdp",
    (MODELS, "sd3"): "omni-engine-fsdp",
    (MODELS, "z_image"): "omni-engine-fsdp",
    (REWARDS, "http"): "omni-trainer",
    (REWARDS, "jpeg_compressibility"): "omni-trainer",
    (REWARDS, "ocr"): "omni-trainer",
    (REWARDS, "pickscore"): "omni-trainer",
    (REWARDS, "python"): "omni-trainer",
    (REWARDS, "weighted"): "omni-trainer",
    (TRACKERS, "jsonl"): "omni-trainer",
    (TRACKERS, "mlflow"): "omni-trainer",
    (TRACKERS, "tensorboard"): "omni-trainer",
    (TRACKERS, "wandb"): "omni-trainer",
    (RECIPES, "quickstart"): "omni-configs",
}
"""The pip package that usually provides a name: for the error that says it is missing."""

GROUP_PROVIDERS: Mapping[str, str] = {
    ENGINES: "omni-engine-fsdp",
    ROLLOUTS: "omni-engine-fsdp",
    MODELS: "omni-engine-fsdp",
    ALGORITHMS: "omni-core",
    REWARDS: "omni-trainer",
    RECIPES: "omni-configs",
    TRACKERS: "omni-trainer",
}


class PluginError(RuntimeError):
    """A plugin exists but cannot be used: its contract, its type or its name clashes."""


class PluginNotFoundError(LookupError):
    """No installed distribution offers the plugin."""


@attrs.frozen(kw_only=True)
class Plugin:
    """One named implementation and the options it takes."""

    api: int
    """The contract that the plugin was written for: a number, never `API` itself."""

    options: type[Any]
    """attrs class of the options; its module imports no backend."""

    target: str = attrs.field(validator=attrs.validators.matches_re(r"[\w.]+:[\w.]+"))
    """`module:attribute` of the implementation, imported by `build` and `load`."""

    devices: tuple[str, ...] = ()
    """Device types that it serves; empty means any."""

    summary: str = ""
    """One line for `omni plugins`."""

    standalone: bool = False
    """A rollout that can be built where there is no training engine: it then gets a `PolicyCard` instead,
    and weights are pushed to it (`rollout.servers`)."""

    def load(self) -> Any:
        """Import the implementation and return it (a class or a factory)."""
        module, _, path = self.target.partition(":")
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return found

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Import the implementation and call it with what its group's contract passes."""
        return self.load()(*args, **kwargs)


def nearest(name: str, known: list[str]) -> str | None:
    """Return the known name that *name* was probably meant to be, if any is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return close[0] if close else None


class Registry:
    """The plugins of one entry-point group, and those registered in this process."""

    def __init__(self, group: str) -> None:
        self.group = group
        self._registered: dict[str, Plugin] = {}
        self._loaded: dict[str, Plugin] = {}

    def register(self, name: str, plugin: Plugin) -> None:
        """Add *plugin* for this process alone.

        Raises:
            PluginError: the name is taken, by an installed plugin or an earlier call.
        """
        if name in self._registered or name in self._entry_points():
            msg = f"{self.group} already has a plugin named {name!r}; choose another name"
            raise PluginError(msg)
        self._registered[name] = _checked(self.group, name, plugin)

    def unregister(self, name: str) -> None:
        """Take back what `register` added."""
        del self._registered[name]

    def registered(self) -> dict[str, Plugin]:
        """Return what `register` added: worker processes of this run need it too."""
        return dict(self._registered)

    def names(self) -> list[str]:
        """Name every plugin, importing none."""
        return sorted({*self._entry_points(), *self._registered})

    def distribution(self, name: str) -> str:
        """Say which distribution offers *name* ('this process' for a registered one)."""
        point = self._entry_points().get(name)
        return point.dist.name if point is not None and point.dist is not None else "this process"

    def get(self, name: str) -> Plugin:
        """Return the plugin called *name*.

        Raises:
            PluginNotFoundError: unknown; lists what is installed, the nearest name and the pip
                package that usually provides it.
            PluginError: two distributions offer the name, the entry point cannot be imported, or the
                plugin is not one of this contract.
        """
        if name in self._registered:
            return self._registered[name]
        if name not in self._loaded:
            point = self._entry_points().get(name)
            if point is None:
                raise PluginNotFoundError(self._unknown(name))
            self._loaded[name] = _checked(self.group, name, _loaded(self.group, point))
        return self._loaded[name]

    def _entry_points(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            other = found.get(point.name)
            if other is not None and (other.value, _dist(other)) != (point.value, _dist(point)):
                msg = (
                    f"two packages offer {self.group}:{point.name}: {_dist(other)} ({other.value}) "
                    f"and {_dist(point)} ({point.value}); uninstall one or rename its plugin"
                )
                raise PluginError(msg)
            found[point.name] = point
        return found

    def _unknown(self, name: str) -> str:
        known = self.names()
        close = nearest(name, known)
        package = PROVIDERS.get((self.group, name))
        hint = f"; did you mean {close!r}?" if close else ""
        if package:
            hint += f"; `pip install {package}` usually provides it"
        elif not known:
            hint += f"; `pip install {GROUP_PROVIDERS.get(self.group, '?')}` provides some"
        return (
            f"no {self.group} plugin named {name!r}; installed: {', '.join(known) or 'none'}{hint}"
        )


def _loaded(group: str, point: EntryPoint) -> object:
    try:
        return point.load()
    except (ImportError, AttributeError) as exc:
        msg = f"{group}:{point.name} of {_dist(point)} ({point.value}) cannot be imported: {exc}"
        raise PluginError(msg) from exc


def _dist(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "?"


def _checked(group: str, name: str, plugin: object) -> Plugin:
    if not isinstance(plugin, Plugin):
        msg = f"{group}:{name} points at {type(plugin).__name__}, not at an omni_core Plugin"
        raise PluginError(msg)
    if plugin.api != API:
        msg = (
            f"{group}:{name} was written for plugin contract {plugin.api}; this omni-core has "
            f"contract {API}: install a release of it that was made for this omni-core"
        )
        raise PluginError(msg)
    return plugin


_REGISTRIES: dict[str, Registry] = {group: Registry(group) for group in GROUPS}


def registry(group: str) -> Registry:
    """Return the one registry of *group*.

    Raises:
        PluginNotFoundError: no such group.
    """
    try:
        return _REGISTRIES[group]
    except KeyError:
        msg = f"no plugin group named {group!r}; groups: {', '.join(GROUPS)}"
        raise PluginNotFoundError(msg) from None


class EngineRegistry:
    """The only way an engine is chosen: by model type, backend and device.

    Engines are plugins of `omni.engines` named `model_type.backend`.
    """

    @staticmethod
    def register(model_type: str, backend: str, plugin: Plugin) -> None:
        """Add an engine for this process alone."""
        registry(ENGINES).register(f"{model_type}.{backend}", plugin)

    @staticmethod
    def get(model_type: str, backend: str, device: str) -> Plugin:
        """Return the engine's plugin.

        Args:
            model_type: `diffusion`, `diffusion_forward`, ... as the algorithm's source declares.
            backend: `fsdp2`, ...
            device: The device type that it has to run on.

        Raises:
            PluginNotFoundError: no such engine, or none for the device.
        """
        name = f"{model_type}.{backend}"
        plugin = registry(ENGINES).get(name)
        if plugin.devices and device not in plugin.devices:
            msg = f"engine {name!r} runs on {', '.join(plugin.devices)}, not on {device!r}"
            raise PluginNotFoundError(msg)
        return plugin

    @staticmethod
    def new(
        model_type: str,
        backend: str,
        device: str,
        *,
        model_config: Any,
        engine_config: Any,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> Any:
        """Build the engine: `Engine(model_config, engine_config, optimizer_config, checkpoint_config)`."""
        plugin = EngineRegistry.get(model_type, backend, device)
        return plugin.build(model_config, engine_config, optimizer_config, checkpoint_config)
