"""Plain mappings (YAML, `dotted.key=value`) become frozen attrs classes, strictly.

Unknown keys, wrong types and bad choices are errors with the full path and the nearest name, and all
mistakes of a config are reported at once. Each value's source is kept beside it.
"""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import attrs
import yaml
from cattrs import Converter, IterableValidationError

from omni_core import plugins

T = TypeVar("T")


class ConfigError(ValueError):
    """The config does not fit; each line of the message says what and where.

    Attributes:
        mistakes: The lines, one for each mistake.
    """

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


BY_NAME = "by name"


@attrs.frozen(kw_only=True)
class PluginChoice:
    """A plugin picked by name, its options already checked.

    Annotate a field with the group it picks from: `reward: Annotated[PluginChoice, "omni.rewards"]`.
    In YAML: `reward: {name: ocr, workers: 2}`. With `BY_NAME` as a third part of the annotation a text
    alone is a name too: `trackers: [tensorboard, {name: wandb, project: signs}]`.
    """

    group: str
    name: str
    options: Any

    @property
    def plugin(self) -> plugins.Plugin:
        """The plugin itself, found again by name."""
        return _find(self.group, self.name)


def _find(group: str, name: str) -> plugins.Plugin:
    """Engines are named `model_type.backend`, while a config names the backend alone."""
    registry = plugins.registry(group)
    if group == plugins.ENGINES and "." not in name:
        full = [known for known in registry.names() if known.partition(".")[2] == name]
        if full:
            return registry.get(full[0])
        backends = sorted({known.partition(".")[2] for known in registry.names()})
        close = plugins.nearest(name, backends)
        hint = f"; did you mean {close!r}?" if close else ""
        package = plugins.GROUP_PROVIDERS[group]
        msg = (
            f"no engine backend named {name!r}; installed: {', '.join(backends) or 'none'}{hint}"
            f"{'' if backends else f'; `pip install {package}` usually provides fsdp2'}"
        )
        raise plugins.PluginNotFoundError(msg)
    return registry.get(name)


# -- structuring ----------------------------------------------------------------------------------

converter = Converter()
_SAY = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _strict(kind: type[Any]) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not right:
            msg = f"expected {_SAY[kind]}, got {value!r}"
            raise ValueError(msg)
        return value

    return hook


for _kind in (int, float, str, bool):
    converter.register_structure_hook(_kind, _strict(_kind))
converter.register_structure_hook(
    Path, lambda value, _: Path(_strict(str)(value, str)).expanduser()
)
converter.register_unstructure_hook(Path, str)


def _member(value: Any, cls: Any) -> Any:
    known = [str(member.value) for member in cls]
    if value in known:
        return cls(value)
    close = plugins.nearest(str(value), known)
    hint = f"; did you mean {close!r}?" if close else ""
    msg = f"{value!r} is none of {', '.join(known)}{hint}"
    raise ValueError(msg)


converter.register_structure_hook(enum.StrEnum, _member)
converter.register_unstructure_hook(enum.StrEnum, lambda member: member.value)


def _is_optional(cls: Any) -> bool:
    return get_origin(cls) in (Union, types.UnionType) and type(None) in get_args(cls)


@converter.register_structure_hook_factory(_is_optional)
def _optional_hook(cls: Any) -> Callable[[Any, Any], Any]:
    inner = [arg for arg in get_args(cls) if arg is not type(None)]
    if len(inner) != 1:
        msg = f"config fields may be `T | None`, not {cls}"
        raise TypeError(msg)
    return lambda value, _: None if value is None else converter.structure(value, inner[0])


def _is_tuple(cls: Any) -> bool:
    return get_origin(cls) is tuple and len(get_args(cls)) == 2 and get_args(cls)[1] is Ellipsis


@converter.register_structure_hook_factory(_is_tuple)
def _tuple_hook(cls: Any) -> Callable[[Any, Any], Any]:
    inner: Any = get_args(cls)[0]

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, str) or not isinstance(value, Sequence):
            msg = f"expected a list, got {value!r}"
            raise ValueError(msg)
        return tuple(converter.structure(value, list[inner]))

    return hook


def _is_mapping(cls: Any) -> bool:
    return get_origin(cls) in (dict, Mapping) and get_args(cls)[0] is str


@converter.register_structure_hook_factory(_is_mapping)
def _mapping_hook(cls: Any) -> Callable[[Any, Any], dict[str, Any]]:
    inner: Any = get_args(cls)[1]

    def hook(raw: Any, _: Any) -> dict[str, Any]:
        if not isinstance(raw, Mapping):
            msg = f"expected a mapping, got {raw!r}"
            raise ValueError(msg)
        mistakes: list[str] = []
        values = {}
        for key, value in raw.items():
            with _collect(mistakes, str(key)):
                values[converter.structure(key, str)] = converter.structure(value, inner)
        if mistakes:
            raise ConfigError(mistakes)
        return values

    return hook


@converter.register_structure_hook_factory(attrs.has)
def _class_hook(cls: Any) -> Callable[[Any, Any], Any]:
    """Structure field by field, so that one mistake does not hide the others."""
    attrs.resolve_types(cls, include_extras=True)
    fields = {field.name: field for field in attrs.fields(cls) if field.init}

    def hook(raw: Any, _: Any) -> Any:
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, Mapping):
            msg = f"expected a mapping of {', '.join(fields) or 'nothing'}, got {raw!r}"
            raise ValueError(msg)
        mistakes = [_unknown_key(str(key), list(fields)) for key in raw if key not in fields]
        values = {}
        for name, field in fields.items():
            if name in raw:
                with _collect(mistakes, name):
                    values[name] = _field(cls, field, raw[name])
            elif field.default is attrs.NOTHING:
                mistakes.append(f"{name}: required and missing")
        if mistakes:
            raise ConfigError(mistakes)
        return cls(**values)

    return hook


def _field(cls: Any, field: Any, raw: Any) -> Any:
    value = converter.structure(raw, field.type)
    if field.validator is not None:
        # Validators look at their own value alone; cross-field rules have a place of their own.
        field.validator(object.__new__(cls), field, value)
    return value


_OF_ATTRS = re.compile(r"^'\w+' must be ([<>]=? \S+): (.*)$", re.DOTALL)


@contextmanager
def _collect(mistakes: list[str], path: str) -> Iterator[None]:
    """Turn what is raised inside into lines that start with *path*."""
    try:
        yield
    except ConfigError as exc:
        joint = (line if line.startswith("[") else f".{line}" for line in exc.mistakes)
        mistakes.extend(f"{path}{line}" for line in joint)
    except IterableValidationError as exc:
        items, _ = exc.group_exceptions()
        for inner, place in items:
            with _collect(mistakes, f"{path}[{place.index}]"):
                raise inner from None
    except (ValueError, TypeError, plugins.PluginNotFoundError, plugins.PluginError) as exc:
        said = str(exc.args[0]) if exc.args else type(exc).__name__
        # A validator of attrs names the field alone, whose path stands before it.
        said = _OF_ATTRS.sub(r"must be \1, not \2", said)
        mistakes.append(f"{path}: {said}")


def _is_choice(cls: Any) -> bool:
    return get_origin(cls) is Annotated and get_args(cls)[0] is PluginChoice


@converter.register_structure_hook_factory(_is_choice)
def _choice_hook(cls: Any) -> Callable[[Any, Any], PluginChoice]:
    group: str = get_args(cls)[1]
    by_name = BY_NAME in get_args(cls)[2:]

    def hook(raw: Any, _: Any) -> PluginChoice:
        if by_name and isinstance(raw, str):
            raw = {"name": raw}
        if isinstance(raw, PluginChoice) and raw.group == group:
            return raw
        if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
            msg = f"expected `name:` of a {group} plugin and its options, got {raw!r}"
            raise ValueError(msg)
        rest = {key: value for key, value in raw.items() if key != "name"}
        try:
            found = _find(group, raw["name"])
        except (plugins.PluginNotFoundError, plugins.PluginError) as exc:
            raise ConfigError([f"name: {exc.args[0]}"]) from None
        options = converter.structure(rest, found.options)
        return PluginChoice(group=group, name=raw["name"], options=options)

    return hook


@converter.register_unstructure_hook
def _choice_back(choice: PluginChoice) -> dict[str, Any]:
    return {"name": choice.name, **converter.unstructure(choice.options)}


def structure(raw: Mapping[str, Any], cls: type[T]) -> T:
    """Build *cls* from *raw*.

    Raises:
        ConfigError: names every mistake, each with its full path.
    """
    try:
        return converter.structure(raw, cls)
    except ConfigError:
        raise
    except (ValueError, TypeError) as exc:  # of the whole: not a mapping, or a rule of the class
        raise ConfigError([str(exc)]) from None


def unstructure(config: Any) -> Any:
    """Turn a config into plain data: dicts, lists, texts and numbers."""
    return converter.unstructure(config)


def _unknown_key(key: str, known: list[str]) -> str:
    close = plugins.nearest(key.lstrip("+"), known)
    hint = f"did you mean {close!r}? " if close else ""
    return f"{key}: unknown key; {hint}known: {', '.join(known) or 'none'}"


# -- layers ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-4` is a number, a key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *anchor`; a key beside it overrides the anchor's
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                msg = f"a key is a text, got {key!r}"
                raise yaml.constructor.ConstructorError(None, None, msg, key_node.start_mark)
            if key in seen:
                msg = f"key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, msg, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?(?:[eE][-+]?\d+)$|^[-+]?\.\d+(?:[eE][-+]?\d+)?$"),
    list("-+0123456789."),
)


@attrs.frozen(kw_only=True)
class Layer:
    """Values of one source; a later layer overrides an earlier one, key by key."""

    source: str
    """Shown as provenance: `recipe quickstart`, `run.yaml`, `command line`."""

    values: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Resolved:
    """Merged values and, for each leaf's dotted path, the source it came from."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]


def read_yaml(text: str, *, source: str) -> Layer:
    """Parse one YAML document that holds a mapping.

    Raises:
        ConfigError: not YAML, or not a mapping; names *source* and the line.
    """
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as exc:
        raise ConfigError([f"{source}: {' '.join(str(exc).split())}"]) from None
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError([f"{source}: expected a mapping at the top, got {type(values).__name__}"])
    return Layer(source=source, values=values)


def parse_overrides(arguments: Iterable[str], *, source: str = "command line") -> Layer:
    """Turn `dotted.key=value` arguments into a layer; a value is read as YAML.

    Raises:
        ConfigError: an argument has no `=` or an empty key; all of them at once.
    """
    values: dict[str, Any] = {}
    mistakes = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            mistakes.append(f"{argument!r}: expected dotted.key=value")
            continue
        try:
            value = yaml.load(text, Loader=_Loader) if text.strip() else None
        except yaml.YAMLError as exc:
            mistakes.append(f"{argument!r}: {' '.join(str(exc).split())}")
            continue
        place = values
        for part in parts[:-1]:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = place[part] = {}
            place = inner
        place[parts[-1]] = value
    if mistakes:
        raise ConfigError(mistakes)
    return Layer(source=source, values=values)


def merge(
    layers: Sequence[Layer], *, choices: Mapping[str, Collection[str]] | None = None
) -> Resolved:
    """Lay the layers over each other; mappings merge key by key, everything else is replaced.

    Where a later layer picks another plugin (another `name`), the earlier one's own options go with
    it, and what every plugin of the group takes stays.

    Args:
        layers: The first is overridden by all others.
        choices: Paths that pick a plugin, with the keys that all plugins of the group take; a last
            part `*` stands for any key. None takes every mapping with a `name` for one, without such
            keys.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        _lay(values, layer.values, sources, layer.source, choices)
    return Resolved(values=values, sources=sources)


def _lay(
    base: dict[str, Any],
    over: Mapping[str, Any],
    sources: dict[str, str],
    source: str,
    choices: Mapping[str, Collection[str]] | None,
    path: str = "",
) -> None:
    kept = _kept(path, choices)
    picks_another = "name" in over and "name" in base and over["name"] != base["name"]
    if kept is not None and picks_another:
        for key in [key for key in base if key not in kept]:
            del base[key]
            _forget(sources, f"{path}.{key}" if path else str(key))
    for key, value in over.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and (value or isinstance(base.get(key), dict)):
            inner = base.get(key)
            if not isinstance(inner, dict):
                _forget(sources, here)
                inner = base[key] = {}
            _lay(inner, value, sources, source, choices, here)
        else:
            _forget(sources, here)
            base[key] = value
            sources[here] = source


def _kept(path: str, choices: Mapping[str, Collection[str]] | None) -> Collection[str] | None:
    """Keys that stay when the plugin at *path* is swapped; None where no plugin is picked."""
    if choices is None:
        return ()
    return choices.get(path, choices.get(f"{path.rpartition('.')[0]}.*"))


def _forget(sources: dict[str, str], path: str) -> None:
    for known in [k for k in sources if k == path or k.startswith(f"{path}.")]:
        del sources[known]


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of plain data with its dotted path."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, values


def source_of(path: str, sources: Mapping[str, str]) -> str:
    """Say where the value at *path* came from: its own layer, a parent's, or `default`."""
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return "default"
