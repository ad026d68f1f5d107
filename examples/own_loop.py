"""FlowGRPO by hand: an engine, its rollout and a reward of one line. No trainer, no Ray.

    python examples/own_loop.py PIPELINE_DIRECTORY [STEPS]

needs omni-core and omni-engine-fsdp alone. The reward is how bright a picture is; the trained LoRA goes
to ./own_loop_export.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from omni_core import (
    CheckpointConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    EngineRegistry,
    LoRAConfig,
    OptimizerConfig,
    RolloutRequest,
    SampleRecord,
    SamplingSpec,
    TrainBatch,
    Trajectory,
    sample_seed,
)
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.device import resolve
from omni_core.losses import ConfiguredLoss, algorithm
from omni_engine_fsdp import EngineRollout, EngineRolloutConfig, FSDPEngineConfig

PROMPTS = ['A bus that reads "47"', 'A road sign that reads "12"']
SAMPLES = 8

model = DiffusionModelConfig(
    path=sys.argv[1],
    lora=LoRAConfig(rank=8, alpha=16),
    pipeline=DiffusionPipelineConfig(height=32, width=32, max_sequence_length=16),
)
sampling = DiffusionSamplingConfig(num_inference_steps=6, guidance_scale=1.0)
options = FlowGRPOOptions(noise_level=0.7, clip_ratio=2e-3)
loss = DiffusionLossConfig(name="flow_grpo", options=options)
policy_gradient = algorithm(loss)

engine = EngineRegistry.new(
    "diffusion",
    "fsdp2",
    resolve().type,
    model_config=model,
    engine_config=FSDPEngineConfig(micro_batch_size=40),
    optimizer_config=OptimizerConfig(lr=2e-3),
    checkpoint_config=CheckpointConfig(),
)
engine.initialize()
engine.set_loss_fn(ConfiguredLoss(loss))
rollout = EngineRollout(EngineRolloutConfig(batch_size=16), engine=engine)
schedule = rollout.schedule(sampling)
spec = SamplingSpec(
    sigmas=schedule.values(),
    guidance_scale=sampling.guidance_scale,
    height=model.pipeline.height,
    width=model.pipeline.width,
    max_sequence_length=model.pipeline.max_sequence_length,
    kind=options.kind,
    noise_level=options.noise_level,
)


def request(step: int, row: int, prompt: str) -> RolloutRequest:
    """One prompt's group: every sample has a seed of its own."""
    group = f"{step}-{row}"
    samples = tuple(
        SampleRecord(
            group_id=group,
            row_id=str(row),
            k=k,
            prompt=prompt,
            seed=sample_seed(
                purpose="rollout", base_seed=0, step=step, row_id=row, occurrence=0, k=k
            ),
        )
        for k in range(SAMPLES)
    )
    window = policy_gradient.window(schedule, seed=samples[0].seed, iteration=step)
    return RolloutRequest(samples=samples, sampling=spec, window=window)


for step in range(int(sys.argv[2]) if len(sys.argv) > 2 else 10):
    requests = [request(step, row, prompt) for row, prompt in enumerate(PROMPTS)]
    trajectory = Trajectory.concat(rollout.generate(requests))
    rewards = trajectory.media.image.float().mean(dim=(1, 2, 3)) / 255  # brightness, 0 to 1
    groups = [record.group_id for record in trajectory.records]
    found = policy_gradient.advantages(rewards, groups, torch.ones(len(groups), dtype=torch.bool))
    batch = TrainBatch(
        trajectory=trajectory,
        advantages=found.advantages,
        weights=torch.ones(len(groups)),
        denominator=float(trajectory.step_indices.numel()),
    )
    output = engine.train_batch(batch)
    print(f"step {step + 1}: brightness {rewards.mean():.4f}, ratio {output.metrics['ratio'].mean}")

print(engine.export_adapter(Path("own_loop_export")))
