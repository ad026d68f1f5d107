"""Adapters are read, injected and given their first weights before an engine shards what they adapt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import structlog
import torch
from torch import nn

from omni_core import resources
from omni_core.options import LoRAConfig
from omni_core.seeds import derive_seed
from omni_engine_fsdp import adapter_files, lora
from omni_engine_fsdp.adapter_files import AdapterFiles
from omni_engine_fsdp.lora import DEFAULT

log = structlog.get_logger()


@attrs.frozen(kw_only=True)
class AdapterSetup:
    """The named adapters of a model, `default` among them, which alone is trained."""

    config: LoRAConfig
    dtype: torch.dtype
    """Of the adapters' weights, whatever the base's is."""
    seed: int
    followers: Sequence[str]
    """Adapters that start equal to `default`."""
    teachers: Mapping[str, Path]
    """Name -> directory of a frozen adapter that others trained."""

    def read(self, experts: tuple[str, ...]) -> dict[str, AdapterFiles]:
        """Read the files of the adapters that do not start from a seed or from `default`.

        Returns:
            Adapter -> its files, each with all of *experts*.

        Raises:
            ValueError: an adapter is of other experts.
            FileNotFoundError: it is not where it should be.
        """
        found = {}
        if self.config.path is not None:
            path = resources.resolve(self.config.path)
            found[DEFAULT] = adapter_files.read_adapter("model.lora.path", path, experts)
        for name, directory in self.teachers.items():
            read = adapter_files.read_adapter(f"teacher {name!r}", directory, experts)
            found[lora.teacher_adapter(name)] = read
        for files in found.values():
            adapter_files.check_experts(files, experts)
        return found

    def inject(self, name: str, expert: nn.Module, targets: Sequence[str]) -> None:
        """Add every adapter to the modules of an expert that match; `default` is trainable after.

        Raises:
            ValueError: a target matches nothing.
        """
        counts = lora.check_targets(expert, targets, name=name)
        log.info("engine.lora_targets", expert=name, matched=counts)
        for adapter in (DEFAULT, *self.followers, *map(lora.teacher_adapter, self.teachers)):
            lora.inject(
                expert,
                self.config,
                targets,
                adapter=adapter,
                seed=derive_seed("expert", self.seed, name),
                dtype=self.dtype,
            )
        for layer in lora.layers_of(expert).values():
            layer.set_adapter(DEFAULT)  # makes it trainable, and freezes every other adapter

    def bind(self, name: str, expert: nn.Module, read: Mapping[str, AdapterFiles]) -> None:
        """Give adapters of an expert the weights of their files.

        Raises:
            ValueError: an adapter is of another rank, scale or set of targets.
        """
        for adapter, files in read.items():
            wanted = lora.parameters_of(expert, adapter)
            adapter_files.check_adapter(files, name, wanted, self.config)
            lora.bind(expert, files.tensors[name], adapter=adapter, dtype=self.dtype)
