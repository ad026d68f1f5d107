"""The suite of omni_core.testing on a stranger's engine: one rank, two ranks, and a run of two ranks."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from omni_core import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    LoRAConfig,
    SamplingSpec,
)
from omni_core.testing import EngineSuite, OnRanks
from omni_core.testing.toys import ToyRollout, ToyRolloutConfig
from omni_fork_example.ddp import DDPEngine
from omni_fork_example.options import DDPOptions


class TestDDP(EngineSuite):
    lora = LoRAConfig(rank=4, alpha=8.0)
    dtype = "float32"

    @pytest.fixture
    def make_engine(self):
        model = DiffusionModelConfig(
            path="toy",
            family="toy",
            dtype=self.dtype,
            lora=self.lora,
            pipeline=DiffusionPipelineConfig(height=16, width=12, max_sequence_length=8),
        )

        def make(*, micro_batch_size=8, optimizer=None):
            options = DDPOptions(micro_batch_size=micro_batch_size)
            engine = DDPEngine(model, options, optimizer, CheckpointConfig())
            engine.initialize()
            return engine

        return make

    @pytest.fixture
    def make_rollout(self):
        return lambda engine: ToyRollout(ToyRolloutConfig(batch_size=4), engine=engine)

    @pytest.fixture
    def sampling(self, engine):
        sampling = DiffusionSamplingConfig(num_inference_steps=5)
        return SamplingSpec(
            sigmas=engine.family.stock_schedule(sampling).values(),
            guidance_scale=1.5,
            height=16,
            width=12,
            max_sequence_length=8,
            kind="sde",
            noise_level=0.7,
        )


class TestDDPOnTwoRanks(OnRanks, TestDDP):
    pytestmark = pytest.mark.timeout(300)  # the first test waits for all of the file
    dtype = "float64"
    gradient_bound = 1e-12

    def test_every_rank_is_one_of_two(self, engine):
        assert dist.get_world_size() == engine.get_data_parallel_size() == 2
        assert engine.get_data_parallel_rank() == dist.get_rank()
        assert engine.parallel is not None

    def test_a_rank_without_rows_is_an_error_on_both(self, engine, whole_batch):
        own = whole_batch.select(torch.arange(2 * (1 - dist.get_rank())))
        with pytest.raises(ValueError, match="a rank has no row"):
            engine.train_batch(own, self.policy_loss)


class TestDDPOfEveryWeightOnTwoRanks(TestDDPOnTwoRanks):
    lora = None


RUN = """
model: {path: toy, family: toy, pipeline: {height: 16, width: 16}, lora: {rank: 4, alpha: 8}}
engine: {name: fork_ddp, micro_batch_size: 5}
optimizer: {lr: 1e-2}
rollout:
  name: toy
  samples_per_prompt: 4
  batch_size: 4
  sampling: {num_inference_steps: 4, guidance_scale: 1.0}
algorithm: {name: fork_reinforce, noise_level: 0.7}
reward: {name: fork_redness}
data: {train: prompts.txt, prompts_per_step: 2}
trainer: {steps: 2, name: run}
"""


def trained(folder: Path, *launcher: str) -> list[dict[str, float]]:
    """Metrics of a run of the toy family."""
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN)
    (folder / "prompts.txt").write_text("".join(f"a red sign number {i}\n" for i in range(4)))
    script = str(Path(__file__).with_name("with_toys.py"))
    done = subprocess.run(
        [sys.executable, *launcher, script, "train", "run.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_two_ranks_train_what_one_does(tmp_path):
    one = trained(tmp_path / "one")
    two = trained(
        tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    )

    assert [line["step"] for line in two] == [line["step"] for line in one] == [1, 2]
    for ours, theirs in zip(two, one, strict=True):
        for name in ("reward/mean", "actor/loss", "actor/log_prob", "actor/grad_norm"):
            assert math.isclose(ours[name], theirs[name], rel_tol=1e-4, abs_tol=1e-6), name
