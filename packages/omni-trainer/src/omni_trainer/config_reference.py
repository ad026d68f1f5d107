"""Every key that a run's configuration may hold, read from the attrs classes: name, type, default, meaning.

Sections that pick a plugin are described once for each plugin that is installed. Nothing heavy is imported:
options modules hold no backend.
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import attrs

from omni_core import config, plugins
from omni_trainer.run_config import RunConfig

REQUIRED = "required"
_NULL = re.compile(r"\bNone\b")
_PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text"}


@attrs.frozen(kw_only=True)
class Key:
    """One key that a user may write."""

    path: str
    """Dotted, as an override takes it; `[]` stands for an item of a list."""
    type: str
    default: str
    """As YAML; `required` where there is none."""
    meaning: str
    """The field's docstring; empty where the name says it all."""


@attrs.frozen(kw_only=True)
class Section:
    """Keys that are read together."""

    title: str
    """`trainer`, or `algorithm: flow_grpo` for a plugin's own options."""
    summary: str
    keys: tuple[Key, ...]


def sections() -> Iterator[Section]:
    """Describe the whole configuration, a section at a time, in the order of `RunConfig`."""
    hints = get_type_hints(RunConfig, include_extras=True)
    for field in attrs.fields(RunConfig):
        group = _group(hints[field.name])
        if group is None:
            cls = hints[field.name]
            yield Section(
                title=field.name, summary=_summary(cls), keys=tuple(keys(cls, field.name))
            )
            continue
        for name, plugin in _installed(group).items():
            yield Section(
                title=f"{field.name}: {name}",
                summary=plugin.summary,
                keys=tuple(keys(plugin.options, field.name)),
            )


def _group(hint: Any) -> str | None:
    """Group of a field that picks a plugin, `X | None` included."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated and get_args(part)[0] is config.PluginChoice:
            return str(get_args(part)[1])
    return None


def _installed(group: str) -> Mapping[str, plugins.Plugin]:
    """Name as the configuration writes it -> plugin; an engine serves several model types by one name."""
    known = plugins.registry(group)
    found: dict[str, plugins.Plugin] = {}
    for name in known.names():
        found.setdefault(
            name.rpartition(".")[2] if group == plugins.ENGINES else name, known.get(name)
        )
    return found


def keys(cls: type[Any], path: str) -> Iterator[Key]:
    """Describe the fields of an attrs class, nested classes in their place.

    Args:
        cls: Any attrs class of options.
        path: Dotted path that its keys stand below.
    """
    hints = get_type_hints(cls, include_extras=True)
    said = _docstrings(cls)
    for field in attrs.fields(cls):
        hint, own = hints[field.name], f"{path}.{field.name}"
        nested = _nested(hint)
        if nested is None or _is_list(hint) or _optional(hint):
            yield Key(
                path=own,
                type=type_name(hint),
                default=_default(field),
                meaning=_NULL.sub("null", said.get(field.name) or _of_type(hint)),
            )
        if nested is not None:
            yield from keys(nested, own + ("[]" if _is_list(hint) else ""))


def _nested(hint: Any) -> type[Any] | None:
    """The attrs class that a field holds: itself, `X | None` or a tuple of them."""
    for part in (hint, *get_args(hint)):
        if inspect.isclass(part) and attrs.has(part) and part is not config.PluginChoice:
            return part
    return None


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is tuple


def _optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def type_name(hint: Any) -> str:
    """Say a field's type the way that a user writes it in YAML."""
    if get_origin(hint) is Annotated:
        return "plugin"
    if _optional(hint):
        parts = [type_name(part) for part in get_args(hint) if part is not type(None)]
        return " or ".join([*parts, "null"])
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in get_args(hint))
    if _is_list(hint):
        return f"list of {type_name(get_args(hint)[0])}"
    if get_origin(hint) is not None:
        return "mapping"
    if issubclass(hint, enum.Enum):
        return ", ".join(str(member.value) for member in hint)
    return _PLAIN.get(hint, "mapping")


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return REQUIRED
    factory = getattr(field.default, "factory", None)
    value = config.unstructure(field.default if factory is None else factory())
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _of_type(hint: Any) -> str:
    """What the class of a field says, where the field says nothing itself."""
    for part in (hint, *get_args(hint)):
        if inspect.isclass(part) and (attrs.has(part) or issubclass(part, enum.Enum)):
            return _summary(part)
    return ""


def _summary(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _docstrings(cls: type[Any]) -> Mapping[str, str]:
    """Field -> the docstring under it, of the class and what it derives from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not attrs.has(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = _text(after)
                if text:
                    found[field.target.id] = text
    return found


def _text(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""
