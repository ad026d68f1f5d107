"""One rank of test_rollout_ranks.py: samples its part of some groups and replays it; prints JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from omni_core.choices import StepKind
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    LoRAConfig,
)
from omni_core.trajectory import RolloutRequest, SampleRecord, SamplingSpec, Trajectory
from omni_engine_fsdp.call_plan import CallPlanError
from omni_engine_fsdp.options import EngineRolloutConfig, FSDPEngineConfig
from omni_engine_fsdp.ppo import PPODiffusersFSDPEngine
from omni_engine_fsdp.rollout import EngineRollout


def built(path: Path) -> PPODiffusersFSDPEngine:
    """An engine whose base is sharded: every forward is a collective."""
    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(
            path=str(path),
            pipeline=DiffusionPipelineConfig(height=16, width=16, max_sequence_length=16),
            lora=LoRAConfig(rank=2, alpha=8.0),
        ),
        FSDPEngineConfig(device="cpu", shard_base="shard"),
        None,
        None,
    )
    engine.initialize()
    return engine


def request(spec: SamplingSpec, group: str, ks: range, window: tuple[int, ...]) -> RolloutRequest:
    """Samples of one group."""
    samples = tuple(
        SampleRecord(group_id=group, row_id=group, k=k, seed=100 + k, prompt=f"a {group} sign")
        for k in ks
    )
    return RolloutRequest(samples=samples, sampling=spec, window=window)


def summary(found: list[Trajectory]) -> list[dict[str, object]]:
    """What the test compares."""
    return [
        {
            "group": t.records[0].group_id,
            "ks": [record.k for record in t.records],
            "final": t.latents["image"][:, -1].flatten(1).tolist(),
            "log_probs": t.log_probs.tolist(),
            "places": [[p.batch, p.place, p.size] for p in t.places],
        }
        for t in found
    ]


def disagreement(rollout: EngineRollout, spec: SamplingSpec, rank: int) -> str | None:
    """Rank 1 samples while rank 0 replays: the error that each gets."""
    (sampled,) = rollout.generate([request(spec, "red", range(2), (0,))], decode=False)
    try:
        if rank:
            rollout.generate([request(spec, "blue", range(2), (0,))], decode=False)
        else:
            rollout.engine.replay(sampled)
    except CallPlanError as error:
        return str(error)
    return None


def main(path: Path) -> object:
    """Sample 5 rows on the first rank and 3 on the second; then rows on the first rank alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine = built(path)
    rollout = EngineRollout(EngineRolloutConfig(batch_size=2), engine=engine)
    sampling = DiffusionSamplingConfig(num_inference_steps=4)
    spec = SamplingSpec(
        sigmas=rollout.schedule(sampling).values(),
        guidance_scale=2.0,
        height=16,
        width=16,
        max_sequence_length=16,
        kind=StepKind.SDE,
        noise_level=0.7,
    )
    parts = [
        [request(spec, "red", range(3), (0, 1)), request(spec, "blue", range(2), (1, 2))],
        [request(spec, "blue", range(2, 5), (1, 2))],
    ]
    found = rollout.generate(parts[rank] if ranks == 2 else [*parts[0], *parts[1]])
    joined = Trajectory.concat(found)
    green = [request(spec, "green", range(3), (0,))] if rank == 0 else []
    return {
        "found": summary(found),
        "exact": torch.equal(engine.replay(joined), joined.log_probs),
        "alone": summary(rollout.generate(green)),
        "disagreement": disagreement(rollout, spec, rank) if ranks == 2 else None,
    }


if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
    dist.barrier()
    dist.destroy_process_group()
