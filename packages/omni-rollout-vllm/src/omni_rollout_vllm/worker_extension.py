"""What is mixed into the engine's workers (`worker_extension_cls`): names are checked, weights are bound.

Methods are called on every worker by `collective_rpc`; each returns plain data. All names that are
passed begin with `omni_`, so that they meet none of the worker's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase
from vllm_omni.lora.request import LoRARequest

from omni_core.rollout import WeightMismatchError
from omni_core.weight_buckets import AnyBucket
from omni_rollout_vllm.weight_names import (
    BASE_LAYER,
    FACTORS,
    Packing,
    adapter_map,
    mismatch,
    packings,
    weight_map,
)

IN_MEMORY = "/omni-rollout-adapter-in-memory"


def lora_request(name: str, number: int) -> LoRARequest:
    """Name an adapter for the engine; its tensors come from memory."""
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=IN_MEMORY)


class WeightsExtension:
    """Holds an update while it arrives, bucket by bucket."""

    model_runner: Any
    lora_manager: Any
    _arrived: dict[str, Tensor]
    _names: dict[str, str]

    def omni_call(self, method: str, *args: Any) -> dict[str, Any]:
        """Call one of the methods below; a mismatch comes back as text, which every executor carries.

        Returns:
            `result`, or `mismatch` with the message.
        """
        try:
            return {"result": getattr(self, method)(*args)}
        except WeightMismatchError as error:
            return {"mismatch": str(error)}

    # -- names -------------------------------------------------------------------------------------

    def omni_map(self, names: Sequence[str], adapter: bool) -> dict[str, str]:
        """Map the names of an update that is about to come.

        Raises:
            WeightMismatchError: they are not the engine's; lists both sides.
        """
        pipeline = self.model_runner.pipeline
        parts = sorted({name.partition(".")[0] for name in names})
        absent = [part for part in parts if not hasattr(pipeline, part)]
        if absent or not parts:
            have = [name for name, _ in pipeline.named_children()]
            msg = f"components {absent} were sent; the pipeline has {have}"
            raise WeightMismatchError(msg)
        packed = self._packings()
        if adapter:
            self._names = adapter_map(names, self._adaptable(parts), packed)
        else:
            parameters = [f"{part}.{name}" for part in parts for name, _ in self._parameters(part)]
            self._names = weight_map(names, parameters, packed)
        self._arrived = {}
        return dict(self._names)

    def _packings(self) -> tuple[Packing, ...]:
        stacked: list[Sequence[object]] = []
        for module in self.model_runner.pipeline.modules():
            stacked += getattr(module, "stacked_params_mapping", None) or []
        return packings(stacked)

    def _adaptable(self, parts: Sequence[str]) -> set[str]:
        return {
            name.removesuffix(BASE_LAYER)
            for name, module in self.model_runner.pipeline.named_modules()
            if isinstance(module, LinearBase | BaseLayerWithLoRA)
            and name.partition(".")[0] in parts
        }

    def _parameters(self, part: str) -> Iterator[tuple[str, Tensor]]:
        yield from getattr(self.model_runner.pipeline, part).named_parameters()

    # -- arrival -----------------------------------------------------------------------------------

    def omni_take(self, bucket: AnyBucket) -> int:
        """Copy a bucket's tensors out; returns how many there are now."""
        for name, value in bucket.read():
            self._arrived[name] = value.clone()
        return len(self._arrived)

    def omni_load(self, bucket: AnyBucket) -> int:
        """Load a bucket of whole weights at once, without a second copy; returns how many."""
        with torch.no_grad():
            self.model_runner.pipeline.load_weights(
                (self._names[name], value) for name, value in bucket.read()
            )
        return len(bucket.slots)

    # -- binding -----------------------------------------------------------------------------------

    def omni_bind_adapter(self, name: str, number: int, alpha_over_rank: float) -> list[str]:
        """Let the engine's LoRA manager take what arrived; returns the trainer's names that it bound.

        Raises:
            WeightMismatchError: the manager left some out.
        """
        tensors = {self._names[theirs]: value for theirs, value in self._arrived.items()}
        modules = {mapped.removesuffix(f) for mapped in tensors for f in FACTORS if f in mapped}
        rank = next(len(value) for mapped, value in tensors.items() if mapped.endswith(FACTORS[0]))
        config = {
            "r": rank,
            "lora_alpha": alpha_over_rank * rank,
            "target_modules": sorted(module.partition(".")[2] for module in modules),
            "bias": "none",
        }
        pipeline = self.model_runner.pipeline
        pipeline.hold_adapter(number, config, tensors)
        self.lora_manager.remove_adapter(number)
        request = lora_request(name, number)
        try:
            self.lora_manager.set_active_adapter(request, 1.0)
        except ValueError as error:  # its own count of modules that it left out
            raise WeightMismatchError(str(error)) from error
        bound = [theirs for theirs, ours in self._names.items() if theirs in self._arrived]
        self._arrived = {}
        return bound

    def omni_merge_adapter(self, root: str, alpha_over_rank: float) -> list[str]:
        """Add what arrived to the base weights on disk, and load the sums.

        Args:
            root: The pipeline folder that the base weights are read from.
            alpha_over_rank: Scale of the adapter.

        Returns:
            The trainer's names that were bound.
        """
        factors = dict(self._arrived)
        modules = sorted({name.removesuffix(f) for name in factors for f in FACTORS if f in name})
        wrapped = {
            name
            for name, module in self.model_runner.pipeline.named_modules()
            if isinstance(module, BaseLayerWithLoRA)
        }
        if wrapped:
            msg = f"an adapter is loaded beside the weights ({len(wrapped)} modules): do not merge, too"
            raise WeightMismatchError(msg)

        def merged() -> Iterator[tuple[str, Tensor]]:
            for module in modules:
                down, up = (factors[module + factor] for factor in FACTORS)
                base = _read_weight(Path(root), f"{module}.weight")
                change = alpha_over_rank * (up.float() @ down.float())
                ours = self._names[module + FACTORS[0]].removesuffix(FACTORS[0])
                yield f"{ours}.weight", (base.float() + change).to(base.dtype)

        with torch.no_grad():
            self.model_runner.pipeline.load_weights(merged())
        self._arrived = {}
        return sorted(factors)

    def omni_check_loaded(self, names: Sequence[str], loaded: int) -> list[str]:
        """Say which whole weights are bound: all that were mapped, if as many were loaded.

        Raises:
            WeightMismatchError: fewer came.
        """
        if loaded != len(names):
            raise mismatch(sorted(set(names))[loaded:], [], sorted(names)[:loaded])
        return list(self._names)

    def omni_module_names(self) -> dict[str, Any]:
        """Name the parameters, the adaptable modules and what is packed."""
        pipeline = self.model_runner.pipeline
        return {
            "parameters": [name for name, _ in pipeline.named_parameters()],
            "adaptable": sorted(self._adaptable(list(pipeline._dit_modules))),
            "packings": self._packings(),
        }


def _read_weight(root: Path, name: str) -> Tensor:
    """Read one weight of a component from its safetensors files.

    Raises:
        KeyError: no file has it.
    """
    component, _, rest = name.partition(".")
    for file in sorted((root / component).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if rest in opened.keys():  # noqa: SIM118 -- it is no mapping
                found: Tensor = opened.get_tensor(rest)
                return found
    msg = f"{root / component}: no safetensors file has {rest}"
    raise KeyError(msg)
