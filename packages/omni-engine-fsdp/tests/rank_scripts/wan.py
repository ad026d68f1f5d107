"""One rank of test_wan_ranks.py: gradients of its own rows on a Wan of two experts, written to a folder.

`wan.py MODEL OUT`; one rank holds all rows, of two the first those of high noise.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.engine import LossInputs, LossTerms, TrainBatch
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
    LoRAConfig,
)
from omni_core.testing.samples import requests_for, train_batch
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import (
    EngineRollout,
    EngineRolloutConfig,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
)
from omni_engine_fsdp.sharding import shard_like, whole

SIZE = DiffusionPipelineConfig(height=16, width=32, max_sequence_length=12, num_frames=3)
LORA = LoRAConfig(rank=2, alpha=8.0)
FORMS: dict[str, tuple[LoRAConfig | None, dict[str, Any]]] = {
    "sharded": (LORA, {"shard_base": "shard"}),
    "replicated": (LORA, {"shard_base": "replicate", "shard_trained": "replicate"}),
    "full": (None, {"shard_base": "shard"}),
}


def built(path: Path, lora: LoRAConfig | None, **options: Any) -> PPODiffusersFSDPEngine:
    """An engine whose LoRA, in float64, is not at its start, where A has no gradient.

    All weights are trained in float32: diffusers keeps some of Wan's in that, whatever is asked for.
    """
    dtype = DType.FLOAT32 if lora is None else DType.FLOAT64
    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(path=str(path), pipeline=SIZE, lora=lora, dtype=dtype),
        FSDPEngineConfig(device="cpu", micro_batch_size=2, **options),
        None,
        None,
    )
    engine.initialize()
    generator = torch.Generator().manual_seed(9)
    for name, parameter in engine.trained().items():
        if "lora_B" in name:
            value = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1
            with torch.no_grad():
                parameter.copy_(shard_like(value, parameter))
    return engine


def sampled(engine: PPODiffusersFSDPEngine) -> TrainBatch:
    """Two groups of two, the first drawn at the first step, the second at the last that is drawn."""
    rollout = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    config = DiffusionSamplingConfig(num_inference_steps=4, guidance_scale=3.0)
    spec = SamplingSpec(
        sigmas=rollout.schedule(config).values(),
        guidance_scale=3.0,
        height=SIZE.height,
        width=SIZE.width,
        num_frames=SIZE.num_frames,
        max_sequence_length=SIZE.max_sequence_length,
        kind=StepKind.SDE,
        noise_level=0.7,
    )
    asked = requests_for(spec, ("a red sign", "blue"))
    asked = [attrs.evolve(each, window=(step,)) for each, step in zip(asked, (0, 2), strict=True)]
    return train_batch(Trajectory.concat(rollout.generate(asked, decode=False)))


def loss(inputs: LossInputs) -> LossTerms:
    """-A log p."""
    return LossTerms(terms=-inputs.advantages * inputs.current.require_log_prob())


def gradients(engine: PPODiffusersFSDPEngine, batch: TrainBatch) -> dict[str, Tensor]:
    """Whole gradients."""
    with engine.train_mode():
        engine.forward_backward_batch(batch, loss)
    return {
        name: whole(parameter.grad).contiguous()
        for name, parameter in engine.trained().items()
        if parameter.grad is not None
    }


def main(path: Path, out: Path, rank: int, ranks: int) -> list[list[str]]:
    """Every form; returns the experts that each of the rank's rows needs."""
    rows = torch.tensor([[0, 1], [2, 3]][rank] if ranks == 2 else [0, 1, 2, 3])
    needed = []
    for form, (lora, options) in FORMS.items():
        engine = built(path, lora, **options)
        batch = sampled(engine).select(rows)
        schedule = batch.trajectory.effective.schedule()
        sigmas = schedule.at(batch.trajectory.step_indices.flatten())[0].tolist()
        needed.append([engine.denoiser.expert_at(sigma) for sigma in sigmas])
        save_file(gradients(engine, batch), out / f"{form}.{rank}-{ranks}.safetensors")
    return needed


if __name__ == "__main__":
    place, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=place,
        world_size=count,
        timeout=timedelta(seconds=60),
    )
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), place, count)))
    dist.barrier()
    dist.destroy_process_group()
