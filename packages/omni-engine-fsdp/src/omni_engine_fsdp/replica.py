"""A second copy of the policy in the same process, for a rollout whose weights are pushed to it.

It is an engine of the same class that only predicts, laid out over the ranks as the trained one is. What
samples is then apart from what is trained: updates may begin while it still samples.
"""

from __future__ import annotations

import time
from typing import Any

import attrs
import torch

from omni_core.rollout import UpdateReport, WeightMismatchError, WeightUpdate, check_version
from omni_engine_fsdp import sharding
from omni_engine_fsdp.lora import is_teacher
from omni_engine_fsdp.policies import REFERENCE


class Replica:
    """Built of an initialised engine, whose weights it starts with. A collective where there are ranks."""

    def __init__(self, trained: Any) -> None:
        config = attrs.evolve(trained.engine_config, keep_graph=False)
        self.engine: Any = type(trained)(trained.model_config, config, None, None)
        kept = trained.adapters if trained.has_adapter else ()  # of all weights, one copy
        adapters = [name for name in kept if not is_teacher(name)]
        for name in adapters[1:]:
            if name != REFERENCE:  # which it makes of itself
                self.engine.add_adapter(name)
        self.engine.initialize()
        self.pushed: dict[str | None, int] = {}
        """Adapter (None: all weights) -> the version that it has."""
        for adapter in adapters or [None]:
            self._bind(dict(trained.get_per_tensor_param(adapter=adapter)), adapter)
            self.pushed[adapter] = trained.weight_version
        self.engine.weight_version = trained.weight_version

    def has(self, adapter: str) -> bool:
        """Whether an adapter is of the version that samples."""
        name = adapter if self.engine.has_adapter else None
        version: int = self.engine.weight_version
        return self.pushed.get(name) == version

    def update(self, update: WeightUpdate) -> UpdateReport:
        """Take new weights, all of an adapter's or all of the model's.

        Raises:
            WeightMismatchError: names or shapes are not those that are here; nothing has changed.
            ValueError: the version does not grow, or there is no such adapter.
        """
        started = time.perf_counter()
        check_version(update, now=self.engine.weight_version, pushed=self.pushed)
        self._bind(dict(update.tensors), update.adapter)
        self.pushed[update.adapter] = update.version
        self.engine.weight_version = update.version
        return UpdateReport(
            version=update.version,
            bound=tuple(update.tensors),
            seconds=time.perf_counter() - started,
            nbytes=sharding.nbytes(update.tensors.values()),
        )

    def _bind(self, tensors: dict[str, torch.Tensor], adapter: str | None) -> None:
        engine = self.engine
        engine.prepare_weights()
        held = engine.base_parameters() if adapter is None else engine.adapter_parameters(adapter)
        found = {
            f"{e}.{name}": p for e, parameters in held.items() for name, p in parameters.items()
        }
        wrong = sorted(found.keys() ^ tensors.keys()) or [
            f"{name} {tuple(tensors[name].shape)} for {tuple(p.shape)}"
            for name, p in found.items()
            if tensors[name].shape != p.shape
        ]
        if wrong:
            sent, here = len(tensors), len(found)
            msg = (
                f"{sent} tensors were sent and {here} are here; they differ in: {', '.join(wrong)}"
            )
            raise WeightMismatchError(msg)
        with torch.no_grad():
            for name, parameter in found.items():
                value = tensors[name].to(parameter.device, parameter.dtype)
                part = sharding.local(sharding.shard_like(value, parameter))
                sharding.local(parameter.detach()).copy_(part)
