from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor

from omni_engine_fsdp import PPODiffusersFSDPEngine


@pytest.fixture(scope="module")
def trained(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> PPODiffusersFSDPEngine:
    """r 2, alpha 8, two steps."""
    engine: PPODiffusersFSDPEngine = build_engine(tiny_sd3, optimizer=ranks.LR)
    for _ in range(2):
        engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    return engine


@pytest.fixture(scope="module")
def exported(trained: PPODiffusersFSDPEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    file = trained.export_adapter(folder)
    assert file == folder / "pytorch_lora_weights.safetensors"
    return folder


def velocity(module: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found: Tensor = module(
            hidden_states=torch.randn(2, 8, 4, 4, generator=generator),
            timestep=torch.tensor([978.26, 500.0]),
            encoder_hidden_states=torch.randn(2, 24, 32, generator=generator),
            pooled_projections=torch.randn(2, 16, generator=generator),
            return_dict=False,
        )[0]
    return found


def stock(path: Path) -> Any:
    return SD3Transformer2DModel.from_pretrained(
        path, subfolder="transformer", local_files_only=True
    )


def test_case_22_a_stock_pipeline_loads_the_adapter_with_its_scale(
    trained: PPODiffusersFSDPEngine, exported: Path, tiny_sd3: Path
) -> None:
    """CASES 22: r 2, alpha 8, two steps: outputs equal the trainer's within 1e-5, scale 4.0."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_sd3, local_files_only=True)
    base = velocity(pipeline.transformer)
    pipeline.load_lora_weights(exported)
    layer = pipeline.transformer.transformer_blocks[0].attn.to_q
    assert list(layer.scaling.values()) == [4.0]
    ours = velocity(trained.denoiser.experts["transformer"])
    theirs = velocity(pipeline.transformer)
    assert float((theirs - ours).abs().max()) <= 1e-5
    assert float((base - ours).abs().max()) > 1e-3


def test_peft_loads_the_adapter_with_its_scale(
    trained: PPODiffusersFSDPEngine, exported: Path, tiny_sd3: Path
) -> None:
    module = PeftModel.from_pretrained(stock(tiny_sd3), exported / "peft", local_files_only=True)
    ours = velocity(trained.denoiser.experts["transformer"])
    assert float((velocity(module) - ours).abs().max()) <= 1e-5


def test_files_say_what_they_are(exported: Path) -> None:
    with safe_open(exported / "pytorch_lora_weights.safetensors", framework="pt") as opened:
        names = set(opened.keys())
        metadata = opened.metadata()
    assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in names
    assert len(names) == 2 * 15
    said = json.loads(metadata["lora_adapter_metadata"])
    assert (said["transformer.r"], said["transformer.lora_alpha"]) == (2, 8.0)
    config = json.loads((exported / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 8.0)
    assert "attn.to_q" in config["target_modules"]


def test_what_has_no_adapter_exports_none(
    build_engine: Any, tiny_sd3: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"model\.lora is null"):
        build_engine(tiny_sd3, lora=None).export_adapter(tmp_path)
