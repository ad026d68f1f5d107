"""What makes a step faster does not change what is trained: the shipped pipeline, in one process."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from omni_core.config import ConfigError
from omni_engine_fsdp.families.sd3 import SD3Conditioner
from omni_trainer.config import load_run
from omni_trainer.run import run_training

STEPS = 2


def train(run_dir, *overrides):
    loaded = load_run("smoke", [f"trainer.steps={STEPS}", *overrides])
    run_training(loaded.config, run_dir=run_dir, resolved=loaded.resolved)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    adapter = load_file(next((run_dir / "export").rglob("*.safetensors")))
    return [line for line in lines if "actor/grad_norm" in line], adapter


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain") / "run")


def apart(ours, theirs):
    """|ours - theirs| / |theirs| of all tensors together."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[n] - t).double().square().sum()) for n, t in theirs.items())
    return (difference / sum(float(t.double().square().sum()) for t in theirs.values())) ** 0.5


def test_kept_graphs_train_what_training_forwards_train(tmp_path, plain):
    lines, adapter = train(tmp_path / "run", "engine.keep_graph=true")

    for ours, theirs in zip(lines, plain[0], strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-5)
        assert (ours["actor/ratio_min"], ours["actor/ratio_max"]) == (1.0, 1.0)
        assert ours["rollout/old_log_probs_recomputed"] == 0.0
    assert lines[0]["canary/exact"] == 0.0
    assert apart(adapter, plain[1]) <= 1e-4


def test_a_merged_adapter_samples_what_trains_the_same(tmp_path, plain):
    lines, adapter = train(tmp_path / "run", "rollout.merge_lora=true", "trainer.canary_every=1")

    assert 0.0 < lines[1]["canary/exact"] <= 1e-5  # at first the adapter is zero
    for ours, theirs in zip(lines, plain[0], strict=True):
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-2)
    assert apart(adapter, plain[1]) <= 1e-2


def test_scores_do_not_depend_on_when_they_are_made(tmp_path, plain, monkeypatch):
    """Nor is a prompt encoded more than once for its samples, which this run counts besides."""
    encoded = []
    original = SD3Conditioner.encode

    def counting(self, prompts, **how):
        encoded.append(len(prompts))
        return original(self, prompts, **how)

    monkeypatch.setattr(SD3Conditioner, "encode", counting)
    run = ("trainer.overlap_rewards=false", "data.heldout=null")
    lines, adapter = train(tmp_path / "run", *run)

    assert [li["reward/mean"] for li in lines] == [li["reward/mean"] for li in plain[0]]
    assert apart(adapter, plain[1]) == 0.0
    assert encoded == [2] * STEPS  # prompts of a step, with 4 samples each


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.updates_per_rollout=2"], "algorithm.updates_per_rollout is 2"),
        (["algorithm.name=awm"], "noised again"),
        (["rollout.name=vllm_omni"], "weights that are pushed to it"),
        (["rollout.merge_lora=true"], "rollout.merge_lora"),
    ],
)
def test_graphs_that_cannot_be_kept_are_refused_before_anything_starts(overrides, reason):
    with pytest.raises(ConfigError) as caught:
        load_run("smoke", ["engine.keep_graph=true", *overrides])

    (line,) = (line for line in caught.value.mistakes if line.startswith("engine.keep_graph: "))
    assert reason in line
