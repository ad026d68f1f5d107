"""The family of docs/own_model.md, taken from the page: it equals stock, trains, and exports."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import AuraFlowPipeline

from omni_core import plugins
from omni_core.choices import StepKind
from omni_core.model import Guidance
from omni_core.options import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionSamplingConfig
from omni_core.testing.toys import register_toys, unregister_toys
from omni_engine_fsdp.sampling import SamplingBatch, SamplingRule, sample
from omni_trainer.config import load_run
from omni_trainer.run import run_training
from tiny_models.aura_flow import build_tiny_aura_flow

PAGE = Path(__file__).resolve().parents[1] / "docs" / "own_model.md"
SIZE = {"height": 16, "width": 32, "max_sequence_length": 16}
PROMPTS = ["a red sign", "blue"]
SEEDS = (3, 4)
STEPS = 3


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The page's code as a module, registered in this process."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path_factory.mktemp("own") / "own_model_of_the_page.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    plugins.registry(plugins.MODELS).register("aura_flow", module.plugin)
    register_toys()
    yield module.plugin
    unregister_toys()
    plugins.registry(plugins.MODELS).unregister("aura_flow")
    del sys.modules[file.stem]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_aura_flow(tmp_path_factory.mktemp("models") / "aura_flow")


def stock(path):
    pipeline = AuraFlowPipeline.from_pretrained(path, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline, scale):
    return pipeline(
        PROMPTS,
        negative_prompt=["photo"] * 2,
        guidance_scale=scale,
        num_inference_steps=STEPS,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type="latent",
        **SIZE,
    ).images


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_the_pages_family_equals_the_stock_pipeline(plugin, model, scale):
    family = plugin.build(
        DiffusionModelConfig(path=str(model), pipeline=DiffusionPipelineConfig(**SIZE))
    )
    guidance = Guidance(scale=scale)
    found = sample(
        family.load_denoiser(torch.float32),
        SamplingBatch(
            seeds=SEEDS,
            windows=[(), ()],
            conditioning=family.load_conditioner(torch.float32).encode(
                PROMPTS, negative_prompt="photo", guidance=guidance
            ),
        ),
        SamplingRule(
            schedule=family.schedule(DiffusionSamplingConfig(num_inference_steps=STEPS)),
            guidance=guidance,
            kind=StepKind.ODE,
            noise_level=0.0,
        ),
        shapes=family.load_codec(torch.float32).latent_shapes(family.config.pipeline),
        device=torch.device("cpu"),
    )
    final = found.latents["image"][:, -1]
    torch.testing.assert_close(final, draw(stock(model), scale), rtol=0.0, atol=1e-5)


def test_it_trains_and_its_lora_loads_in_the_stock_pipeline(plugin, model, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    values = {
        "model": {"path": str(model), "pipeline": SIZE, "lora": {"rank": 2, "alpha": 8.0}},
        "optimizer": {"lr": 1e-2},
        "rollout": {
            "samples_per_prompt": 4,
            "sampling": {"num_inference_steps": STEPS, "guidance_scale": 3.5},
        },
        "algorithm": {"name": "flow_grpo"},
        "reward": {"name": "toy"},
        "data": {"train": str(prompts), "prompts_per_step": 2},
        "trainer": {"steps": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    loaded = load_run(str(tmp_path / "run.yaml"))
    run_training(loaded.config, run_dir=tmp_path / "run", resolved=loaded.resolved)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["canary/exact"] == 0.0

    pipeline = stock(model)
    before = draw(pipeline, 1.0)
    pipeline.load_lora_weights(tmp_path / "run" / "export")
    (scale,) = pipeline.transformer.joint_transformer_blocks[0].attn.to_q.scaling.values()
    assert scale == 4.0
    assert (draw(pipeline, 1.0) - before).abs().max() > 1e-4


def test_the_page_keeps_its_word_on_length():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 130
