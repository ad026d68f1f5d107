"""Adapters read from files, to start from or as teachers: bound whole and to the same base, or refused.

Read is a directory as `export.write_adapter` makes it, or what PEFT or diffusers saved in the same layout,
safetensors alone. It has the trained adapter's rank, scale and targets; nothing of it is guessed, left
out or started anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_core.options import LoRAConfig
from omni_engine_fsdp.content_hash import content_hash
from omni_engine_fsdp.export import BASE, PEFT, PEFT_PREFIX, WEIGHTS
from omni_engine_fsdp.frozen_parts import Fingerprint

PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
LORA_METADATA = "lora_adapter_metadata"
"""Where diffusers keeps PEFT's configuration in a file's metadata."""
PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "bias": "none",
}
"""Of PEFT's configuration: what may be absent, and has to be so where it is not."""
FEW = 3
"""Names that a message lists."""


@attrs.frozen(kw_only=True, eq=False)
class AdapterFiles:
    """An adapter as its files have it."""

    title: str
    """What messages call it: `teacher 'ocr'`."""
    directory: Path
    tensors: Mapping[str, Mapping[str, Tensor]]
    """Expert -> `blocks.0.to_q.lora_A.weight` -> tensor."""
    configs: Mapping[str, Mapping[str, Any]]
    """Expert -> PEFT's configuration."""

    def digest(self) -> str:
        """Content hash of the tensors."""
        return content_hash(
            (f"{expert}.{name}", tensor)
            for expert, tensors in sorted(self.tensors.items())
            for name, tensor in sorted(tensors.items())
        )

    def wrong(self, text: str) -> ValueError:
        """Make the error that says *text* of this adapter."""
        return ValueError(f"{self.title} ({self.directory}): {text}")


def read_adapter(title: str, directory: Path, experts: Sequence[str]) -> AdapterFiles:
    """Read an adapter's files.

    Args:
        title: For messages.
        directory: Of an export; with `peft/`, that is read, else the file for diffusers.
        experts: The trained model's.

    Raises:
        FileNotFoundError: no such directory, or neither layout in it; says what is there.
        ValueError: unreadable, or without PEFT's configuration.
    """
    for root in (directory / PEFT, directory):
        folders = {expert: root / (expert if len(experts) > 1 else "") for expert in experts}
        if all((folder / PEFT_WEIGHTS).is_file() for folder in folders.values()):
            return _of_peft(title, directory, folders)
    if (directory / WEIGHTS).is_file():
        return _of_diffusers(title, directory)
    there = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else None
    held = "no such directory" if there is None else f"it holds {', '.join(there[:9]) or 'nothing'}"
    msg = (
        f"{title}: no adapter at {str(directory)!r} ({held}); expected {PEFT}/{PEFT_WEIGHTS} "
        f"or {WEIGHTS}, as `omni export` writes them"
    )
    raise FileNotFoundError(msg)


def _of_peft(title: str, directory: Path, folders: Mapping[str, Path]) -> AdapterFiles:
    tensors, configs = {}, {}
    for expert, folder in folders.items():
        read, _ = _read(title, folder / PEFT_WEIGHTS)
        tensors[expert] = {key.removeprefix(PEFT_PREFIX): value for key, value in read.items()}
        configs[expert] = _json(title, folder / PEFT_CONFIG)
    return AdapterFiles(title=title, directory=directory, tensors=tensors, configs=configs)


def _of_diffusers(title: str, directory: Path) -> AdapterFiles:
    read, metadata = _read(title, directory / WEIGHTS)
    if LORA_METADATA not in metadata:
        msg = (
            f"{title}: {directory / WEIGHTS} says no rank and alpha (its metadata has no "
            f"{LORA_METADATA!r}): its scale is not known"
        )
        raise ValueError(msg)
    tensors: dict[str, dict[str, Tensor]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for key, value in read.items():
        expert, _, rest = key.partition(".")
        tensors.setdefault(expert, {})[rest] = value
    for key, value in json.loads(metadata[LORA_METADATA]).items():
        expert, _, rest = key.partition(".")
        configs.setdefault(expert, {})[rest] = value
    return AdapterFiles(title=title, directory=directory, tensors=tensors, configs=configs)


def _read(title: str, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        msg = f"{title}: {path} cannot be read: {error}"
        raise ValueError(msg) from error


def _json(title: str, path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        msg = f"{title}: {path} cannot be read, so its scale is not known: {error}"
        raise ValueError(msg) from error
    return found


def check_adapter(
    files: AdapterFiles, expert: str, wanted: Mapping[str, Tensor], config: LoRAConfig
) -> None:
    """Check that files are an adapter like the trained one, tensor by tensor.

    Args:
        files: As read.
        expert: One of the trained model's.
        wanted: Name -> tensor of an adapter of that expert, whole.
        config: Of the trained adapter.

    Raises:
        ValueError: another rank, scale or kind; tensors that are missing, too many or of another shape.
    """
    said = files.configs.get(expert)
    if said is None or expert not in files.tensors:
        known = ", ".join(sorted(files.tensors)) or "none"
        raise files.wrong(f"no adapter of expert {expert!r}; it has {known}: another family")
    for key, ours in (("r", config.rank), ("lora_alpha", config.alpha)):
        if said.get(key) != ours:
            what = {"r": "rank", "lora_alpha": "alpha"}[key]
            raise files.wrong(f"{what} is {said.get(key)}, and model.lora.{what} is {ours}")
    unlike = [key for key, plain in PLAIN.items() if (said.get(key) or plain) != plain]
    if unlike:
        raise files.wrong(f"not a plain LoRA: {', '.join(unlike)}")
    given = files.tensors[expert]
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing or extra:
        raise files.wrong(
            f"its tensors are not those of expert {expert!r} ({len(wanted)} expected): missing "
            f"{_few(missing)}; too many {_few(extra)}: another family, or other model.lora.targets "
            f"(its own: {_few(sorted(said.get('target_modules') or []), 20)})"
        )
    for name, tensor in wanted.items():
        if given[name].shape != tensor.shape:
            raise files.wrong(
                f"{expert}.{name} is {tuple(given[name].shape)}, expected {tuple(tensor.shape)}: "
                "another model"
            )
        if not bool(given[name].isfinite().all()):
            raise files.wrong(f"{expert}.{name} is not finite")


def check_experts(files: AdapterFiles, experts: Sequence[str]) -> None:
    """Check that nothing of an adapter is left out.

    Raises:
        ValueError: it adapts what is not trained here, such as a text encoder.
    """
    extra = sorted(set(files.tensors) - set(experts))
    if extra:
        raise files.wrong(
            f"it also adapts {', '.join(extra)}; nothing but {', '.join(experts)} is trained here"
        )


def _few(names: Sequence[str], count: int = FEW) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return (", ".join(names[:count]) or "none") + more


def check_base(files: AdapterFiles, base: str | None, dtype: str) -> None:
    """Check that an adapter was trained on the model's own base, where its files say so.

    Args:
        files: As read.
        base: Content hash of the frozen weights.
        dtype: They are stored in: another has another hash, and says nothing.

    Raises:
        ValueError: another base.
    """
    said = _base_of(files)
    if said is not None and said.get("dtype") == dtype and said.get("hash") != base:
        raise files.wrong(
            "it was trained on another base: the hash of the weights that it adapts is "
            f"{said.get('hash')}, and those of model.path have {base}"
        )


def check_parts(files: AdapterFiles, parts: Mapping[str, Fingerprint]) -> None:
    """Check that a teacher was trained beside the student's own encoders and codec, where its files say so.

    Args:
        files: As read.
        parts: Component -> fingerprint, of the student's pipeline.

    Raises:
        ValueError: a component is another, or only one of the two has it.
    """
    said = (_base_of(files) or {}).get("parts")
    if not said or not parts:
        return
    theirs = {
        name: Fingerprint(hash=one["hash"], dtypes=tuple(one["dtypes"]))
        for name, one in said.items()
    }
    unlike = sorted(set(theirs) ^ set(parts))
    unlike += [name for name in theirs if name in parts and theirs[name].contradicts(parts[name])]
    if unlike:
        raise files.wrong(
            f"it was trained beside other weights of {', '.join(unlike)} than model.path has: a teacher "
            "shares the student's encoders and codec"
        )


def _base_of(files: AdapterFiles) -> dict[str, Any] | None:
    path = files.directory / BASE
    return _json(files.title, path) if path.is_file() else None
