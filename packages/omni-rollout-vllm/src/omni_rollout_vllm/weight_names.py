"""Names of the trainer's weights and of the engine's: each is mapped, or listed as not bound.

The trainer's names are a stock diffusers module's, below the component (`transformer.`). The engine
differs in three ways: projections are packed (`to_q`, `to_k`, `to_v` into `to_qkv`), an output
projection may have lost its `.0`, and a module that was wrapped for LoRA keeps its weight below
`.base_layer`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import attrs

from omni_core.rollout import WeightMismatchError

BASE_LAYER = ".base_layer"
FACTORS = (".lora_A.weight", ".lora_B.weight")


@attrs.frozen
class Packing:
    """One packed projection: its last name, and the last names of its parts in order."""

    packed: str
    parts: tuple[str, ...]


def packings(stacked: Iterable[Sequence[object]]) -> tuple[Packing, ...]:
    """Read a model's `stacked_params_mapping`: (packed suffix, part's suffix, shard)."""
    found: dict[str, list[str]] = {}
    for packed, part, *_ in stacked:
        found.setdefault(str(packed).strip("."), []).append(str(part).strip("."))
    return tuple(Packing(name, tuple(parts)) for name, parts in found.items())


def engine_module(
    name: str, modules: Collection[str], packed: Sequence[Packing]
) -> tuple[str, str] | None:
    """Find where a trainer's module is in the engine.

    Args:
        name: Of the trainer's module, such as `transformer.blocks.0.attn.to_out.0`.
        modules: The engine's module names, without `.base_layer`.
        packed: The engine's packed projections.

    Returns:
        (the engine's module, the name that an adapter of this part has there), or None.
    """
    if name in modules:
        return name, name
    parent, _, last = name.rpartition(".")
    for packing in packed:
        whole = f"{parent}.{packing.packed}"
        if last in packing.parts and whole in modules:
            return whole, name
    if last == "0" and parent in modules:
        return parent, parent
    return None


def adapter_map(
    names: Collection[str], modules: Collection[str], packed: Sequence[Packing]
) -> dict[str, str]:
    """Map an adapter's tensors: trainer's name -> the name that the engine's LoRA manager binds.

    Args:
        names: `MODULE.lora_A.weight` and `MODULE.lora_B.weight`.
        modules: Of the engine that take adapters, without `.base_layer`.
        packed: The engine's packed projections.

    Raises:
        WeightMismatchError: a factor without its other one, or a module that the engine does not have
            or cannot adapt; lists all of them and what there is.
    """
    found: dict[str, str] = {}
    lost: list[str] = []
    for name in names:
        factor = next((f for f in FACTORS if name.endswith(f)), None)
        place = None
        if factor is not None:
            place = engine_module(name.removesuffix(factor), modules, packed)
        if factor is None or place is None:
            lost.append(name)
        else:
            found[name] = place[1] + factor
    alone = [other for name in names if (other := _other_factor(name)) not in names]
    if lost or alone:
        raise mismatch(lost, alone, sorted(found))
    return found


def _other_factor(name: str) -> str:
    for one, other in (FACTORS, FACTORS[::-1]):
        if name.endswith(one):
            return name.removesuffix(one) + other
    return name


def weight_map(
    names: Collection[str], parameters: Collection[str], packed: Sequence[Packing]
) -> dict[str, str]:
    """Map whole weights: trainer's name -> the name to give the engine's `load_weights`.

    Args:
        names: All weights of the trained component.
        parameters: The engine's parameters of that component, as they are called now.
        packed: The engine's packed projections.

    Raises:
        WeightMismatchError: a weight that the engine does not have, or one of the engine's that was
            not sent; lists both.
    """
    bare = {name.replace(f"{BASE_LAYER}.", "."): name for name in parameters}
    expected = {part: bare[name] for name in bare for part in _parts(name, packed)}
    found: dict[str, str] = {}
    lost = []
    for name in names:
        ours = name if name in expected else _without_zero(name)
        if ours in expected:
            wrapped = BASE_LAYER + "." in expected[ours]
            module, _, leaf = ours.rpartition(".")
            found[name] = f"{module}{BASE_LAYER}.{leaf}" if wrapped else ours
        else:
            lost.append(name)
    covered = {name if name in expected else _without_zero(name) for name in found}
    missing = sorted(set(expected) - covered)
    if lost or missing:
        raise mismatch(lost, missing, sorted(found))
    return found


def _parts(name: str, packed: Sequence[Packing]) -> list[str]:
    """The trainer's weights that are in one of the engine's."""
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    for packing in packed:
        if last == packing.packed:
            return [f"{parent}.{part}.{leaf}" for part in packing.parts]
    return [name]


def _without_zero(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{module.removesuffix('.0')}.{leaf}"


def mismatch(
    lost: Sequence[str], missing: Sequence[str], bound: Sequence[str]
) -> WeightMismatchError:
    """Make the error that lists both sides."""
    parts = []
    if lost:
        parts.append(f"sent and not bound: {', '.join(sorted(lost))}")
    if missing:
        parts.append(f"expected and not sent: {', '.join(sorted(missing))}")
    parts.append(f"bound ({len(bound)}): {', '.join(bound) or 'none'}")
    return WeightMismatchError("; ".join(parts))
