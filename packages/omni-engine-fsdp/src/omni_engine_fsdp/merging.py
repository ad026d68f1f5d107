"""An adapter added to the weights it adapts, and the weights put back from a copy.

Subtracting what was added would leave them changed in the last bits, so a copy of every adapted weight is
held while the adapter is merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from omni_engine_fsdp import sharding

Copies = list[tuple[Tensor, Tensor]]
"""(this rank's part of a weight, what it was)."""


@torch.no_grad()
def merge(layers: Iterable[LoraLayer], adapter: str, copies: Copies) -> None:
    """Add an adapter to the weights of *layers*, in place. A collective where weights are sharded.

    Args:
        layers: Whose sharded weights are what the modules hold (`prepare_weights`).
        adapter: One that each of them has.
        copies: What `restore` takes is added to it layer by layer, so that it is whole where one fails.
    """
    for layer in layers:
        weight: Any = layer.get_base_layer().weight
        part = sharding.local(weight.detach())
        added = sharding.local(sharding.shard_like(_delta(layer, adapter), weight)).to(part.device)
        copies.append((part, part.clone()))
        # In the adapter's precision, and rounded once.
        part.copy_(part.to(added.dtype) + added)


@torch.no_grad()
def restore(copies: Copies) -> None:
    """Put the weights back, bit for bit."""
    for part, before in copies:
        part.copy_(before)


def _delta(layer: LoraLayer, adapter: str) -> Tensor:
    """What the adapter adds to the weight of a linear or a convolution, whole."""
    modules: tuple[Any, Any] = (layer.lora_A[adapter], layer.lora_B[adapter])
    down, up = (sharding.whole(module.weight.detach()) for module in modules)
    weight: Any = layer.get_base_layer().weight
    return added(down, up, scale=layer.scaling[adapter]).reshape(weight.shape)


def added(down: Tensor, up: Tensor, *, scale: float) -> Tensor:
    """What an adapter adds to a weight: scale * B A, [out, the rest flattened].

    Args:
        down: A, [rank, in], or [rank, in, k, k] of a convolution.
        up: B, [out, rank], or [out, rank, 1, 1]: a convolution of 1 x 1, so that the product of the
            flattened ones holds for both kinds.
        scale: alpha / rank.
    """
    product: Tensor = up.flatten(1) @ down.flatten(1)
    return product * scale
