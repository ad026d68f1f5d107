"""An engine's weights by name: the sharded ones that are trained, and whole tensors for whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from omni_core.options import DiffusionModelConfig
from omni_engine_fsdp import lora, merging, sharding
from omni_engine_fsdp.content_hash import content_hash
from omni_engine_fsdp.lora import DEFAULT
from omni_engine_fsdp.policies import PolicyMixin


class WeightsMixin(PolicyMixin):
    """Reads the weights of an engine; modules hold gathered copies, so always through `parameters`."""

    model_config: DiffusionModelConfig
    units: Mapping[str, Sequence[FSDPModule]]
    """Expert -> its FSDP units, the root first."""

    @property
    def weights_device(self) -> torch.device:
        """Where whole tensors are given: the engine's device, or host memory while weights rest there."""
        raise NotImplementedError

    def trained(self) -> dict[str, nn.Parameter]:
        """Return every trained parameter (sharded) as `expert.name`."""
        return {
            f"{expert}.{name}": parameter
            for expert, parameters in self.parameters.items()
            for name, parameter in parameters.items()
            if parameter.requires_grad
        }

    def replicated(self) -> list[nn.Parameter]:
        """Return the trained parameters that every rank keeps whole."""
        return [p for p in self.trained().values() if not sharding.is_sharded(p)]

    def prepare_weights(self) -> None:
        """Free gathered copies, so that what modules hold are the sharded weights themselves."""
        for units in (self.units, *(copy.units for copy in self.copies.values())):
            for own in units.values():
                sharding.reshard(own)

    @cached_property
    def base_hash(self) -> str | None:
        """Content hash of the frozen weights; None where every weight is trained. A collective."""
        if self.model_config.lora is None:
            return None
        return content_hash(self.get_per_tensor_param(adapter=None))

    def get_per_tensor_param(
        self, *, adapter: str | None = DEFAULT, merged: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors one at a time, detached, all on `weights_device`; a collective.

        Names are the expert's, a dot, and the name that a stock module or LoRA file has:
        `transformer.blocks.0.to_q.lora_A.weight`, or `transformer.blocks.0.to_q.weight`.

        Args:
            adapter: Whose: with LoRA its tensors alone, else all weights of that policy. None is all
                weights but the adapters, which are not merged.
            merged: All weights, the adapter's product added to those that it adapts.

        Raises:
            ValueError: no such adapter.
        """
        self.prepare_weights()
        if adapter is not None and merged and self.layers:
            yield from self._merged(adapter)
            return
        found = self.base_parameters() if adapter is None else self.adapter_parameters(adapter)
        for expert, parameters in found.items():
            for name, parameter in parameters.items():
                yield f"{expert}.{name}", self._whole(parameter)

    def _merged(self, adapter: str) -> Iterator[tuple[str, Tensor]]:
        config = self.model_config.lora
        assert config is not None  # there are layers
        adapters = self.adapter_parameters(adapter)
        for expert, parameters in self.base_parameters().items():
            for name, parameter in parameters.items():
                weight = self._whole(parameter)
                factors = lora.factors_of(adapters[expert], name)
                if factors is not None:
                    down, up = map(self._whole, factors)
                    added = merging.added(down, up, scale=config.alpha / config.rank)
                    # In the adapter's precision, and rounded once.
                    weight = (weight + added.reshape(weight.shape)).to(weight.dtype)
                yield f"{expert}.{name}", weight

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        # With `offload: all` what is sharded lies in host memory, and what is not on the device.
        return sharding.whole(parameter.detach()).to(self.weights_device)
