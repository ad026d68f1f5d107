"""The real engine trained on two ranks, by torchrun in every layout and on Ray in one, against one rank.

The layouts share one start (launched_runs.py). Everything is in float64: what two ranks sample is then
stored in the same bits as what one does, so nothing but the order of sums is between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from omni_core.testing.toys import register_toys, unregister_toys
from omni_trainer.checkpoints import Checkpoints

sys.path.insert(0, str(Path(__file__).parent))
try:
    from launched_runs import LAYOUTS, RESUMED, train
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.timeout(400)  # torchrun and two processes import everything first

WEIGHTS = 1e-10
"""Of the global norm, after some steps in float64 (DESIGN: numerics)."""


@pytest.fixture(scope="module")
def overrides(tiny_sd3):
    register_toys()
    yield [
        f"model.path={tiny_sd3}",
        "model.dtype=float64",
        "model.pipeline={height: 16, width: 16, max_sequence_length: 8}",
        "rollout.sampling.guidance_scale=3.0",
        "evaluation.sampling.guidance_scale=3.0",
        "evaluation.max_prompts=3",
        "reward.name=toy",
        "algorithm.kl_coef=0.1",
        "algorithm.updates_per_rollout=2",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "trainer.device=cpu",
    ]
    unregister_toys()


@pytest.fixture(scope="module")
def alone(tmp_path_factory, overrides):
    """One rank."""
    return train(tmp_path_factory.mktemp("alone") / "run", overrides)


@pytest.fixture(scope="module")
def launched(tmp_path_factory, overrides):
    """Where the layouts' runs are."""
    out = tmp_path_factory.mktemp("launched")
    done = torchrun("launched_runs.py", out, overrides)
    assert done.returncode == 0, done.stderr[-6000:]
    return out


def torchrun(script, out, overrides, *arguments):
    """Run a script of this folder in two processes: `SCRIPT OUT OVERRIDES.json ARGUMENTS`."""
    listed = out.with_suffix(".json")
    listed.write_text(json.dumps(overrides))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = Path(__file__).with_name(script)
    return subprocess.run(
        [sys.executable, *launcher, str(path), str(out), str(listed), *arguments],
        capture_output=True,
        text=True,
        timeout=360,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def metrics(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {n: v for n, v in json.loads(line).items() if not n.startswith(("time/", "memory/"))}
        for line in lines
    ]


def weights(run_dir):
    """Of the adapter, whole: checkpoints hold each rank's parts."""
    return load_file(run_dir / "export" / "pytorch_lora_weights.safetensors")


def distance(ours, theirs):
    """|ours - theirs| / |theirs| over all tensors."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    size = sum(float(value.double().square().sum()) for value in theirs.values())
    return (apart / size) ** 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_27_a_launched_run_trains_what_one_rank_does(alone, launched, layout):
    run = launched / layout
    assert distance(weights(run), weights(alone)) <= WEIGHTS
    assert len(metrics(run)) == len(metrics(alone)) == 3
    for one, other in zip(metrics(alone), metrics(run), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert metrics(run)[1]["canary/exact"] == 0.0


def test_case_28_a_launched_run_goes_on_bit_for_bit(launched):
    assert metrics(launched / "resumed")[-1]["actor/weight_version"] == 4.0
    expected = weights(launched / RESUMED)
    for name, value in weights(launched / "resumed").items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("form", "rank", "left"),
    [
        ("lora", "0", 2),  # who drives: the partial checkpoint stays
        ("full", "1", 1),  # the driver lives on for a moment, and takes it away
    ],
)
def test_case_29_a_rank_killed_in_a_save_leaves_the_former_checkpoint(
    form, rank, left, launched, overrides, tmp_path
):
    run = tmp_path / "run"
    forms = {"lora": LAYOUTS["data"], "full": ["model.lora=null"]}
    options = [*overrides, *forms[form], "checkpoint.keep=1"]

    killed = torchrun("killed_save.py", run, options, rank)

    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr
    assert Checkpoints(run / "checkpoints", keep=1).at().step == 1
    assert len(list((run / "checkpoints").iterdir())) == left

    resumed = torchrun("killed_save.py", run, options)

    assert resumed.returncode == 0, resumed.stderr[-6000:]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    assert metrics(run)[-1]["actor/weight_version"] == 4.0
    if form == "lora":  # what was left is whole: the run ends as one that nobody killed
        expected = weights(launched / "data")
        for name, value in weights(run).items():
            assert torch.equal(value, expected[name]), name


def test_case_27_two_ray_actors_share_a_sequence(alone, overrides, tmp_path):
    """The same on Ray, where the rank that follows is an actor."""
    options = ["trainer.backend=ray", "trainer.ranks=2", *LAYOUTS["sequence"]]
    run = train(tmp_path / "run", [*overrides, *options])
    assert distance(weights(run), weights(alone)) <= WEIGHTS
    for one, other in zip(metrics(alone), metrics(run), strict=True):
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
