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

from omni_core.options import DType
from omni_engine_fsdp import PPODiffusersFSDPEngine, pipeline_export


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


def velocity(module: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found: Tensor = module(
            hidden_states=torch.randn(2, 8, 4, 4, generator=generator).to(dtype),
            timestep=torch.tensor([978.26, 500.0]),
            encoder_hidden_states=torch.randn(2, 24, 32, generator=generator).to(dtype),
            pooled_projections=torch.randn(2, 16, generator=generator).to(dtype),
            return_dict=False,
        )[0]
    return found.float()


def stock(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return SD3Transformer2DModel.from_pretrained(
        path, subfolder="transformer", local_files_only=True, dtype=dtype
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


def test_case_23_a_merged_pipeline_gives_the_trainers_output(
    trained: PPODiffusersFSDPEngine, tiny_sd3: Path, tmp_path: Path
) -> None:
    """CASES 23: the file differs from the base, and forward equals adapter-on (1e-5)."""
    assert trained.export_pipeline(tmp_path / "merged") == tmp_path / "merged"
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "merged", local_files_only=True)
    ours = velocity(trained.denoiser.experts["transformer"])
    assert float((velocity(pipeline.transformer) - ours).abs().max()) <= 1e-5
    base = stock(tiny_sd3).state_dict()
    differing = {
        name.removesuffix(".weight")
        for name, value in pipeline.transformer.state_dict().items()
        if not torch.equal(value, base[name])
    }
    adapted = {
        name for name in trained.adapter_parameters("default")["transformer"] if "_B" in name
    }
    # The last block's queries of the text are used by nobody, so their B stays 0.
    unused = "transformer_blocks.1.attn.add_q_proj"
    assert differing == {name.removesuffix(".lora_B.weight") for name in adapted} - {unused}


def test_case_23_an_adapter_that_adds_nothing_merges_to_the_base(
    build_engine: Any, tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 23, in several files: every tensor of the stock module is there, as it was."""
    monkeypatch.setattr(pipeline_export, "FILE_BYTES", 60_000)
    build_engine(tiny_sd3).export_pipeline(tmp_path)
    assert len(list((tmp_path / "transformer").glob("*-of-*.safetensors"))) > 1
    base = stock(tiny_sd3).state_dict()
    merged = stock(tmp_path).state_dict()
    assert merged.keys() == base.keys()
    for name, value in base.items():
        assert torch.equal(merged[name], value), name


def test_case_22_all_weights_are_exported_as_a_pipeline(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    """CASES 22 where every weight is trained in bf16: stock in bf16 gives the trainer's own output."""
    engine = build_engine(tiny_sd3, lora=None, dtype=DType.BFLOAT16, optimizer=ranks.LR)
    engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    engine.export_pipeline(tmp_path)
    module = stock(tmp_path, dtype=torch.bfloat16)
    ours = velocity(engine.denoiser.experts["transformer"], torch.bfloat16)
    assert float((velocity(module, torch.bfloat16) - ours).abs().max()) <= 1e-2
    assert not any(path.suffix == ".bin" for path in tmp_path.rglob("*"))


def test_a_pipeline_replaces_nothing_but_a_pipeline(
    trained: PPODiffusersFSDPEngine, tiny_sd3: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"is model\.path itself"):
        trained.export_pipeline(tiny_sd3)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files than a pipeline"):
        trained.export_pipeline(tmp_path)


def test_a_pipeline_has_to_know_every_expert(
    ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    ranks.register_two_experts()
    try:
        engine = ranks.build(tiny_sd3, family="two_experts")
        with pytest.raises(
            ValueError, match="high, low is no component of StableDiffusion3Pipeline"
        ):
            engine.export_pipeline(tmp_path)
    finally:
        ranks.plugins.registry(ranks.plugins.MODELS).unregister("two_experts")


def test_what_has_no_adapter_exports_none(
    build_engine: Any, tiny_sd3: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"model\.lora is null"):
        build_engine(tiny_sd3, lora=None).export_adapter(tmp_path)
