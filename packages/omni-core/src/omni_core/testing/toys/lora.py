"""Low-rank adapters on linear layers: named, float32 beside frozen weights, switched by one attribute.

Names are of the form `blocks.0.up.lora_A.default`; A is [rank, in], B is [out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_core.options import LoRAConfig
from omni_core.seeds import derive_seed


class LoRALinear(nn.Module):
    """base(x) + alpha / rank * B A x, of the active adapter (None: the base alone)."""

    def __init__(self, base: nn.Linear, config: LoRAConfig) -> None:
        super().__init__()
        self.base = base
        self.config = config
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.active: str | None = None

    def add(self, adapter: str, seed: int) -> None:
        """Make an adapter: A drawn from *seed*, B zero."""
        rank, weight = self.config.rank, self.base.weight
        drawn = torch.empty(rank, weight.shape[1], dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        if self.config.init == "gaussian":
            drawn.normal_(0.0, 1.0 / rank, generator=generator)
        else:
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5.0), generator=generator)
        self.lora_A[adapter] = nn.Parameter(drawn.to(weight.dtype))
        self.lora_B[adapter] = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        output: Tensor = self.base(input)
        if self.active is None:
            return output
        low = F.linear(input, self.lora_A[self.active].to(input.dtype))
        scale = self.config.alpha / self.config.rank
        return output + scale * F.linear(low, self.lora_B[self.active].to(input.dtype))


def inject(module: nn.Module, config: LoRAConfig, targets: tuple[str, ...]) -> None:
    """Freeze *module* and wrap every linear layer whose name ends with a target.

    Raises:
        ValueError: a target matches no layer; lists how many each matched.
    """
    module.requires_grad_(False)
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    matched = {
        target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets
    }
    if not all(matched.values()):
        counts = ", ".join(f"{target}: {len(names)}" for target, names in matched.items())
        msg = f"model.lora.targets: a target matches no linear layer ({counts}); layers: {linear}"
        raise ValueError(msg)
    for name in sorted({name for names in matched.values() for name in names}):
        parent, _, last = name.rpartition(".")
        base = module.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(module.get_submodule(parent), last, LoRALinear(base, config))


def layers(module: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, LoRALinear)}


def add_adapter(module: nn.Module, adapter: str, *, seed: int) -> None:
    """Make *adapter* on every layer, whose start follows from *seed* and the layer's name."""
    for name, layer in layers(module).items():
        layer.add(adapter, derive_seed("lora", seed, name))


def tensors(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    """The adapter's parameters, by name.

    Raises:
        ValueError: no such adapter; lists those that exist.
    """
    found: dict[str, Tensor] = {}
    for name, layer in layers(module).items():
        if adapter not in layer.lora_A:
            known = ", ".join(layer.lora_A) or "none"
            msg = f"no adapter named {adapter!r}; adapters: {known}"
            raise ValueError(msg)
        found[f"{name}.lora_A.{adapter}"] = layer.lora_A[adapter]
        found[f"{name}.lora_B.{adapter}"] = layer.lora_B[adapter]
    return found


def products(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    """What the adapter adds to each weight that it adapts, by the weight's name: alpha / rank * B A."""
    found = {}
    for name, layer in layers(module).items():
        down, up = layer.lora_A[adapter].detach(), layer.lora_B[adapter].detach()
        found[f"{name}.base.weight"] = (up @ down) * (layer.config.alpha / layer.config.rank)
    return found


@contextmanager
def active(module: nn.Module, adapter: str | None) -> Iterator[None]:
    """Run with *adapter* (None: the base), and with what was active before on leaving."""
    if adapter is not None:
        tensors(module, adapter)
    former = {name: layer.active for name, layer in layers(module).items()}
    try:
        for layer in layers(module).values():
            layer.active = adapter
        yield
    finally:
        for name, layer in layers(module).items():
            layer.active = former[name]


def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Write the values of *source* into *target*, by name."""
    with torch.no_grad():
        for name, value in source.items():
            target[name].copy_(value)
