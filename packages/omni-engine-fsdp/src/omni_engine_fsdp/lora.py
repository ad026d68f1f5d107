"""Named LoRA adapters beside frozen weights: injected by PEFT, started from a seed of their own.

Whoever looks in from outside finds every parameter's requires_grad as it was: PEFT's own switches
(which adapter is active, whether any is) leave frozen adapters trainable, so the map is recorded and
put back around each of them, also by an exception. LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from omni_core.choices import Policy
from omni_core.options import LoRAConfig
from omni_core.seeds import derive_seed
from omni_engine_fsdp import merging, sharding

DEFAULT = "default"
"""The adapter that is trained; every other one is frozen."""


def teacher_adapter(teacher: str) -> str:
    """Name a teacher's adapter beside `default`, `old` and `ema`."""
    return f"teacher_{teacher}"


def is_teacher(adapter: str) -> bool:
    """Whether an adapter's name is a teacher's."""
    return adapter.startswith(teacher_adapter(""))


def check_targets(expert: nn.Module, targets: Sequence[str], *, name: str) -> dict[str, int]:
    """Check that every target pattern matches a module that LoRA can adapt.

    Args:
        expert: Before adapters are injected.
        targets: Suffixes of module names, whole dotted parts.
        name: The expert's, for the message.

    Returns:
        Target -> number of modules that it matches.

    Raises:
        ValueError: a pattern matches nothing; names it, and how many modules each matched.
    """
    modules = [key for key, m in expert.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    counts = {
        target: sum(key == target or key.endswith(f".{target}") for key in modules)
        for target in targets
    }
    missing = [target for target, count in counts.items() if not count]
    if not targets or missing:
        matched = ", ".join(f"{target!r} matched {count}" for target, count in counts.items())
        wrong = ", ".join(repr(target) for target in missing) or "an empty list"
        msg = (
            f"model.lora.targets: {wrong} matches no linear module of expert {name!r} "
            f"({len(modules)} there; {matched or 'no pattern'})"
        )
        raise ValueError(msg)
    return counts


def peft_config(config: LoRAConfig, targets: Sequence[str]) -> LoraConfig:
    """Say in PEFT's words what is injected; an export carries it too."""
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type] # PEFT multiplies by alpha / r
        target_modules=list(targets),
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
    )


def inject(
    expert: nn.Module,
    config: LoRAConfig,
    targets: Sequence[str],
    *,
    adapter: str,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Add an adapter to the matching modules of an expert, and start its weights.

    Args:
        expert: Changed in place.
        config: Rank, alpha, start.
        targets: Checked by `check_targets`.
        adapter: Its name.
        seed: The weights follow from it and from the modules' names alone: the same on every rank.
        dtype: Of the adapter's weights, whatever the base's is.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT draws weights of its own first, and warns that a second adapter is one.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        inject_adapter_in_model(peft_config(config, targets), expert, adapter)
    for name, layer in layers_of(expert).items():
        down, up = _factors(layer, adapter)
        generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
        start = torch.empty(down.shape, dtype=torch.float32)
        if config.init == "gaussian":
            nn.init.normal_(start, std=1 / config.rank, generator=generator)
        else:
            nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
        down.data = start.to(device=down.device, dtype=dtype)
        up.data = torch.zeros_like(up, dtype=dtype)


def parameters_of(expert: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return an adapter's parameters in an expert, by their names without the adapter's."""
    split = ((lora_name(name), parameter) for name, parameter in expert.named_parameters())
    return {said[1]: parameter for said, parameter in split if said and said[0] == adapter}


def bind(
    expert: nn.Module, tensors: Mapping[str, Tensor], *, adapter: str, dtype: torch.dtype
) -> None:
    """Give an injected adapter the values of *tensors*, before it is sharded.

    Args:
        expert: Changed in place.
        tensors: One for each of `parameters_of(expert, adapter)`, of its shape.
        adapter: Its name.
        dtype: Of the adapter's weights.
    """
    for name, parameter in parameters_of(expert, adapter).items():
        parameter.data = tensors[name].to(device=parameter.device, dtype=dtype)


def _factors(layer: LoraLayer, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B of a layer, whose product is added to its weight."""
    modules: tuple[Any, Any] = (layer.lora_A[adapter], layer.lora_B[adapter])
    return modules[0].weight, modules[1].weight


def factors_of(
    adapter: Mapping[str, nn.Parameter], weight: str
) -> tuple[nn.Parameter, nn.Parameter] | None:
    """Find A and B of the weight of that name among an adapter's parameters; None if it is not adapted."""
    module, _, leaf = weight.rpartition(".")
    names = (f"{module}.lora_A.{leaf}", f"{module}.lora_B.{leaf}")
    if leaf != "weight" or names[0] not in adapter:
        return None
    return adapter[names[0]], adapter[names[1]]


def layers_of(expert: nn.Module) -> dict[str, LoraLayer]:
    """Return the adapted modules of an expert by name."""
    return {name: m for name, m in expert.named_modules() if isinstance(m, LoraLayer)}


def lora_name(name: str) -> tuple[str, str] | None:
    """Split a parameter's name into its adapter and the name without it; None for other weights.

    `block.to_q.lora_A.old.weight` -> (`old`, `block.to_q.lora_A.weight`).
    """
    module, found, rest = name.partition(".lora_")
    if not found:
        return None
    kind, adapter, leaf = rest.split(".", 2)
    return adapter, f"{module}.lora_{kind}.{leaf}"


def base_of(expert: nn.Module) -> list[nn.Parameter]:
    """Return an expert's weights but the adapters', which all lie alike so that one can be copied to another."""
    return [p for name, p in expert.named_parameters() if lora_name(name) is None]


def adapters_of(expert: nn.Module) -> list[nn.Parameter]:
    """Return the weights of every adapter of an expert."""
    return [p for name, p in expert.named_parameters() if lora_name(name) is not None]


@contextmanager
def switched(layers: Sequence[LoraLayer], switch: Callable[[LoraLayer], None]) -> Iterator[None]:
    """Hold PEFT's switches in another position, every requires_grad left as it is."""
    before = [(list(layer.active_adapters), layer.disable_adapters) for layer in layers]
    try:
        _keeping_grad(layers, switch)
        yield
    finally:
        former = iter(before)

        def back(layer: LoraLayer) -> None:
            active, disabled = next(former)
            layer.set_adapter(active)
            layer.enable_adapters(not disabled)

        _keeping_grad(layers, back)


def _keeping_grad(layers: Sequence[LoraLayer], switch: Callable[[LoraLayer], None]) -> None:
    modules = [cast(nn.Module, layer) for layer in layers]
    wanted = [(p, p.requires_grad) for module in modules for p in module.parameters()]
    for layer in layers:
        switch(layer)
    for parameter, value in wanted:
        parameter.requires_grad_(value)


class LoRAAdapterMixin:
    """Named policy adapters (`default`, `old`, ...) on every expert of an engine's denoiser."""

    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    """Expert -> name -> sharded parameter."""
    layers: Sequence[LoraLayer]
    """Adapted modules of all experts."""

    def prepare_weights(self) -> None:
        """Free gathered copies, so that what modules hold are the sharded weights themselves."""
        raise NotImplementedError

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that exist; the first is trained. Empty without LoRA."""
        names: dict[str, None] = {}
        for layer in self.layers:
            names.update(dict.fromkeys(layer.lora_A))
        return tuple(names)

    def copy_adapter(self, source: str, target: str) -> None:
        """Make *target* equal to *source*.

        Raises:
            ValueError: no such adapter; lists those that exist.
        """
        for old, new in self._pairs(source, target):
            new.copy_(old)

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        """target <- decay * target + (1 - decay) * source.

        Raises:
            ValueError: no such adapter, or a decay outside [0, 1].
        """
        if not 0.0 <= decay <= 1.0:
            msg = f"decay must be within [0, 1], got {decay}"
            raise ValueError(msg)
        for new, average in self._pairs(source, target):
            average.mul_(decay).add_(new, alpha=1.0 - decay)

    @contextmanager
    def use_adapter(self, name: str) -> Iterator[None]:
        """Predict with another adapter.

        Raises:
            ValueError: no such adapter.
        """
        layers = self.layers
        self._require_adapter(name)
        if all(list(layer.active_adapters) == [name] for layer in layers):
            yield
            return
        with switched(layers, lambda layer: layer.set_adapter(name)):
            yield

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Predict with the base model; every requires_grad is as before, also after an exception."""
        with switched(self.layers, lambda layer: layer.enable_adapters(False)):
            yield

    @contextmanager
    def merged_adapter(self, name: str) -> Iterator[None]:
        """Predict with an adapter added to the weights: its own products are not computed at each call.

        The weights come back bit for bit, also after an exception; nothing is trained inside. A
        collective where weights are sharded.

        Raises:
            ValueError: no such adapter.
        """
        self._require_adapter(name)
        self.prepare_weights()
        copies: merging.Copies = []
        try:
            merging.merge(self.layers, name, copies)
            with self.disable_adapter():
                yield
        finally:
            self.prepare_weights()
            merging.restore(copies)

    @contextmanager
    def use_policy(self, policy: Policy) -> Iterator[None]:
        """Predict as another policy does: `old` and `ema` are adapters, the reference is one or the base.

        Raises:
            ValueError: there is no such adapter.
        """
        name = DEFAULT if policy is Policy.CURRENT else policy.value
        base = policy is Policy.REFERENCE and name not in self.adapters
        with self.disable_adapter() if base else self.use_adapter(name):
            yield

    def _require_adapter(self, name: str) -> None:
        if name not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            msg = f"no adapter named {name!r}; there are: {known}"
            raise ValueError(msg)

    def adapter_parameters(self, adapter: str) -> dict[str, dict[str, nn.Parameter]]:
        """Return an adapter's sharded parameters: expert -> name without the adapter's -> parameter.

        Raises:
            ValueError: no such adapter.
        """
        self._require_adapter(adapter)
        found: dict[str, dict[str, nn.Parameter]] = {}
        for expert, parameters in self.parameters.items():
            split = ((lora_name(name), parameter) for name, parameter in parameters.items())
            found[expert] = {
                said[1]: parameter for said, parameter in split if said and said[0] == adapter
            }
        return found

    def base_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return all weights but the adapters': expert -> name without adapters -> parameter."""
        return {
            expert: {
                name.replace(".base_layer.", "."): parameter
                for name, parameter in parameters.items()
                if lora_name(name) is None
            }
            for expert, parameters in self.parameters.items()
        }

    def _pairs(self, source: str, target: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's parts of every tensor of two adapters, to be written to."""
        sources, targets = self.adapter_parameters(source), self.adapter_parameters(target)
        self.prepare_weights()
        for expert, parameters in sources.items():
            for name, parameter in parameters.items():
                target_parameter = targets[expert][name]
                yield (
                    sharding.local(parameter.detach()),
                    sharding.local(target_parameter.detach()),
                )
