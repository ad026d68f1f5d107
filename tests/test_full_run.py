"""Runs that train every weight or keep an average, and what bf16 does to old log-probs: the whole system."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file

from omni_core.config import ConfigError
from omni_core.testing.toys import register_toys, unregister_toys
from omni_trainer import cli
from omni_trainer.config import load_run
from omni_trainer.run import export_run, run_training

FULL = "model.lora=null"


@pytest.fixture(scope="module")
def train(tiny_sd3):
    """Train the tiny random SD3 for a few steps, brightness as the reward."""
    register_toys()

    def run(run_dir, *overrides):
        small = "{height: 16, width: 16, max_sequence_length: 8}"
        loaded = load_run(
            "smoke",
            [
                f"model.path={tiny_sd3}",
                f"model.pipeline={small}",
                "reward.name=toy",
                "evaluation.max_prompts=2",
                *overrides,
            ],
        )
        return run_training(loaded.config, run_dir=run_dir, resolved=loaded.resolved).run_dir

    yield run
    unregister_toys()


def metrics(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def saved(run_dir, prefix):
    """Weights of the newest checkpoint whose names begin so, without that."""
    found = {}
    for file in sorted((run_dir / "checkpoints").rglob("*.safetensors")):
        found.update(load_file(file))
    start = f"weights.{prefix}"
    return {n.removeprefix(start): value for n, value in found.items() if n.startswith(start)}


@pytest.fixture(scope="module")
def full(train, tmp_path_factory):
    """Every weight, with a KL to the start and a moving average that is evaluated."""
    return train(
        tmp_path_factory.mktemp("full") / "run",
        FULL,
        "algorithm.kl_coef=0.1",
        "algorithm.updates_per_rollout=2",
        "optimizer.lr=1e-3",
        "optimizer.ema.decay=0.5",
        "evaluation.policy=ema",
    )


def test_case_24_every_weight_is_trained_against_its_start(full):
    """CASES 24: the first update's KL is 0, so the first step's mean is below the second's."""
    lines = metrics(full)
    assert lines[1]["canary/exact"] == 0.0
    assert 0.0 < lines[1]["actor/kl"] < lines[2]["actor/kl"]
    assert lines[2]["actor/weight_version"] == 4.0


def test_the_average_is_evaluated_and_exported(full, tmp_path, capsys):
    trained, average = saved(full, "transformer."), saved(full, "ema:transformer.")
    assert trained.keys() == average.keys()
    assert cli.main(["export", str(full), "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f'DiffusionPipeline.from_pretrained("{tmp_path}")\n')
    written = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, value in average.items():
        assert torch.equal(written[name], value), name
    assert (tmp_path / "sampling.json").is_file()
    again = export_run(full, output=tmp_path / "trained", policy="default")
    stock = SD3Transformer2DModel.from_pretrained(again, subfolder="transformer")
    for name, value in stock.named_parameters():
        assert torch.equal(value, trained[name]), name


def test_a_lora_run_exports_its_average_and_merges_it(train, tmp_path):
    run_dir = train(tmp_path / "run", "optimizer.ema={}", "evaluation.policy=ema")
    exported = load_file(run_dir / "export" / "pytorch_lora_weights.safetensors")
    average = saved(run_dir, "transformer.")
    for name, value in exported.items():
        own = name.removeprefix("transformer.").removesuffix(".weight")
        assert torch.equal(value, average[f"{own}.ema.weight"]), name
    merged = export_run(run_dir, merged=True)
    assert merged == run_dir / "export" / "pipeline"
    assert (merged / "model_index.json").is_file()


@pytest.mark.parametrize("lora", [(), (FULL,)], ids=["lora", "full"])
def test_bf16_is_too_coarse_for_a_clip_so_old_log_probs_are_recomputed(train, tmp_path, lora):
    run_dir = train(
        tmp_path / "run",
        *lora,
        "model.dtype=bfloat16",
        "algorithm.clip_ratio=1e-5",
        "algorithm.updates_per_rollout=2",
        "engine.micro_batch_size=3",
        "data.heldout=null",
    )
    for line in metrics(run_dir):
        assert line["rollout/old_log_probs_recomputed"] == 1.0
    assert metrics(run_dir)[0]["canary/floor"] >= 1e-6
    assert metrics(run_dir)[0]["actor/ratio_min"] <= 1.0 <= metrics(run_dir)[0]["actor/ratio_max"]


def test_policies_that_nobody_keeps_are_mistakes(tiny_sd3):
    with pytest.raises(
        ConfigError, match=r"evaluation\.policy: 'ema' is no policy of this run: default; "
    ):
        load_run("smoke", ["evaluation.policy=ema"])
    with pytest.raises(
        ConfigError, match=r"optimizer\.ema: algorithm 'awm' keeps a moving average"
    ):
        load_run("tiny_awm", ["optimizer.ema={}"])
