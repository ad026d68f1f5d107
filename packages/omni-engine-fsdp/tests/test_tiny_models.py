from __future__ import annotations

from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline

from tiny_models.sd3 import build_tiny_sd3


def test_a_tiny_pipeline_is_small_and_the_same_for_a_seed(tiny_sd3: Path, tmp_path: Path) -> None:
    again = build_tiny_sd3(tmp_path / "again")
    other = build_tiny_sd3(tmp_path / "other", seed=1)
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (again / weights).read_bytes() == (tiny_sd3 / weights).read_bytes()
    assert (other / weights).read_bytes() != (tiny_sd3 / weights).read_bytes()
    assert sum(f.stat().st_size for f in tiny_sd3.rglob("*") if f.is_file()) < 1_000_000


def test_a_tiny_pipeline_can_be_stored_in_bfloat16(tmp_path: Path) -> None:
    path = build_tiny_sd3(tmp_path / "bf16", dtype=torch.bfloat16, shift=1.0)
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        path, local_files_only=True, dtype=torch.bfloat16
    )
    assert pipeline.transformer.dtype == torch.bfloat16
    assert pipeline.scheduler.config.shift == 1.0
