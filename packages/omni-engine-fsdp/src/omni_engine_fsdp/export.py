"""A trained adapter as files that stock diffusers and PEFT load with the right scale.

Layout: `pytorch_lora_weights.safetensors` for `pipeline.load_lora_weights(directory)`, with PEFT's
configuration (rank, alpha, targets) in its metadata (without it diffusers takes alpha = rank), and `peft/` with
`adapter_config.json` and `adapter_model.safetensors` for PEFT. An engine of several experts writes one
`peft/EXPERT/` for each, and a folder of its name for each after the first: Wan2.2 takes
`load_lora_weights(directory / "transformer_2", load_into_transformer_2=True)` beside the first.
`base.json` says which weights it was trained on, and beside which encoders and codec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import diffusers
from safetensors.torch import save_file
from torch import Tensor

from omni_engine_fsdp import lora
from omni_engine_fsdp.frozen_parts import frozen_parts
from omni_engine_fsdp.lora import DEFAULT

if TYPE_CHECKING:
    from omni_engine_fsdp.engine import DiffusersFSDPEngine

WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT = "peft"
BASE = "base.json"
"""Content hash of the frozen weights, the format that they had, and fingerprints of the other components."""
PEFT_PREFIX = "base_model.model."


def write_adapter(engine: DiffusersFSDPEngine, directory: Path, adapter: str = DEFAULT) -> Path:
    """Write an adapter; all ranks call it, the first writes.

    Args:
        engine: Its LoRA is written in float32.
        directory: Made if missing.
        adapter: Which one.

    Returns:
        The file for diffusers.

    Raises:
        ValueError: no such adapter, or the engine trains without LoRA.
    """
    config = engine.model_config.lora
    if config is None:
        msg = (
            "there is no adapter to export: model.lora is null; export_pipeline writes all weights"
        )
        raise ValueError(msg)
    layers: dict[str, dict[str, Tensor]] = {name: {} for name in engine.denoiser.experts}
    for name, tensor in engine.get_per_tensor_param(adapter=adapter):
        expert, _, rest = name.partition(".")
        layers[expert][rest] = tensor.float().cpu().contiguous()
    base: dict[str, Any] = {"hash": engine.base_hash, "dtype": engine.model_config.dtype.value}
    if engine.mesh.rank == 0:
        parts = frozen_parts(engine.model_config.path, tuple(engine.denoiser.experts))
        base["parts"] = {part: attrs.asdict(found) for part, found in parts.items()}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / BASE).write_text(json.dumps(base) + "\n", encoding="utf-8")
        peft_config = lora.peft_config(config, engine.lora_targets)
        _write_diffusers(engine, directory, layers, _plain(peft_config))
        for expert, tensors in layers.items():
            folder = directory / PEFT / (expert if len(layers) > 1 else "")
            folder.mkdir(parents=True, exist_ok=True)
            peft_config.save_pretrained(str(folder))
            named = {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}
            save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory / WEIGHTS


def _write_diffusers(
    engine: DiffusersFSDPEngine,
    directory: Path,
    layers: dict[str, dict[str, Tensor]],
    metadata: dict[str, Any],
) -> None:
    """Let the pipeline's own class write, with its own key prefixes; further experts in folders of theirs."""
    pipeline: Any = getattr(diffusers, engine.family.pipeline_classes[0])
    for place, (expert, tensors) in enumerate(layers.items()):
        pipeline.save_lora_weights(
            directory / expert if place else directory,
            weight_name=WEIGHTS,
            transformer_lora_layers=tensors,
            transformer_lora_adapter_metadata=dict(metadata),
        )


def _plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = config.to_dict()
    return plain
