"""A whole pipeline directory with the trained weights in it, as stock diffusers loads it.

Every component of the pipeline at `model.path` is copied, but for the weights of the experts: those are
the policy's, LoRA merged, in the format that the trainer computes in. Nothing but safetensors is carried
along.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from omni_engine_fsdp import sharding
from omni_engine_fsdp.families.folder import INDEX, PipelineFolder
from omni_engine_fsdp.lora import DEFAULT, lora_name
from omni_engine_fsdp.precision import compute_dtype

if TYPE_CHECKING:
    from omni_engine_fsdp.engine import DiffusersFSDPEngine

WEIGHTS = "diffusion_pytorch_model"
WEIGHTS_INDEX = f"{WEIGHTS}.safetensors.index.json"
FILE_BYTES = 5 * 1024**3
"""Largest file of weights."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5", "*.onnx")
NOTICES = ("LICENSE*", "NOTICE*", "README*")
"""Files of the pipeline's root that go along with it."""


def write_pipeline(engine: DiffusersFSDPEngine, directory: Path, adapter: str = DEFAULT) -> Path:
    """Write a policy as a pipeline; all ranks call it, the first writes.

    Args:
        engine: Its experts have the names of the pipeline's components.
        directory: Made if missing; files of an earlier export in it are replaced.
        adapter: Which policy.

    Returns:
        The directory.

    Raises:
        ValueError: no such policy, an expert that is no component, or a directory that holds something
            else.
    """
    folder = PipelineFolder.open(engine.model_config.path)
    experts = engine.denoiser.experts
    _check(folder, directory, tuple(experts))
    first = engine.mesh.rank == 0
    if first:
        _copy_components(folder, directory, tuple(experts))
    sizes: dict[str, dict[str, int]] = {name: {} for name in experts}
    dtype = compute_dtype(engine.model_config.dtype)
    for name, expert in experts.items():
        for key, tensor in _saved(expert):
            sizes[name][key] = tensor.numel() * dtype.itemsize
    writers = {name: _Writer(directory / name, found) for name, found in sizes.items()}
    for full, tensor in engine.get_per_tensor_param(adapter=adapter, merged=True):
        expert_name, _, key = full.partition(".")
        if first:  # the others only take part in gathering
            writers[expert_name].add(key, tensor.to(dtype))
    if first:
        for name, expert in experts.items():
            for key, buffer in _buffers(expert):
                writers[name].add(key, buffer.to(dtype) if buffer.is_floating_point() else buffer)
            writers[name].finish()
    return directory


def _check(folder: PipelineFolder, directory: Path, experts: Sequence[str]) -> None:
    foreign = [name for name in experts if name not in folder.components]
    if foreign:
        msg = (
            f"{', '.join(foreign)} is no component of {folder.pipeline_class} "
            f"({', '.join(folder.components)}): a pipeline cannot hold its weights"
        )
        raise ValueError(msg)
    if directory.resolve() == folder.root.resolve():
        msg = f"{directory} is model.path itself: export the pipeline to another directory"
        raise ValueError(msg)
    if directory.is_dir() and any(directory.iterdir()) and not (directory / INDEX).is_file():
        msg = f"{directory} holds other files than a pipeline: choose an empty directory"
        raise ValueError(msg)


def _copy_components(folder: PipelineFolder, directory: Path, experts: Sequence[str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder.root / INDEX, directory / INDEX)
    for pattern in NOTICES:
        for path in folder.root.glob(pattern):
            shutil.copyfile(path, directory / path.name)
    for name in folder.components:
        if not (folder.root / name).is_dir():
            continue  # null in all but name, or a part that is loaded from elsewhere
        shutil.rmtree(directory / name, ignore_errors=True)
        weights = ("*.safetensors", "*.index.json") if name in experts else ()
        ignored = shutil.ignore_patterns(*PICKLES, *weights)
        shutil.copytree(folder.root / name, directory / name, ignore=ignored)


def _buffers(expert: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint of the stock module holds."""
    for prefix, module in expert.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _saved(expert: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a checkpoint of the stock module holds, under its names there; maybe sharded."""
    for name, parameter in expert.named_parameters():
        if lora_name(name) is None:
            yield name.replace(".base_layer.", "."), parameter
    yield from _buffers(expert)


class _Writer:
    """Writes an expert's tensors as they come, into files of at most so many bytes."""

    def __init__(self, directory: Path, sizes: Mapping[str, int]) -> None:
        self.directory = directory
        self.parts = _parts(sizes, FILE_BYTES)
        self.total = sum(sizes.values())
        self._part_of = {name: i for i, part in enumerate(self.parts) for name in part}
        self._waiting: list[dict[str, Tensor]] = [{} for _ in self.parts]

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, and write its file if that was the last of it."""
        place = self._part_of[name]
        own = sharding.whole(tensor.detach()).cpu()
        # A view of a larger tensor, or of one that changes, must not be kept.
        self._waiting[place][name] = own.clone(memory_format=torch.contiguous_format)
        if len(self._waiting[place]) == len(self.parts[place]):
            path = self.directory / self._file(place)
            save_file(self._waiting[place], path, metadata={"format": "pt"})
            self._waiting[place] = {}

    def finish(self) -> None:
        """Write the index of several files."""
        left = [name for waiting in self._waiting for name in waiting]
        assert not left, left  # every tensor that was announced has come
        if len(self.parts) > 1:
            where = {name: self._file(place) for name, place in self._part_of.items()}
            index: dict[str, Any] = {"metadata": {"total_size": self.total}, "weight_map": where}
            path = self.directory / WEIGHTS_INDEX
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _file(self, place: int) -> str:
        count = len(self.parts)
        return f"{WEIGHTS}-{place + 1:05}-of-{count:05}.safetensors" if count > 1 else _ONE


_ONE = f"{WEIGHTS}.safetensors"


def _parts(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Deal names into parts of at most *most* bytes, in order; a larger tensor is a part of its own."""
    parts: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if parts[-1] and held + size > most:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts
