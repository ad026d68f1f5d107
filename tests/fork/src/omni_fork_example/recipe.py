"""The recipe: only what differs from the defaults."""

from __future__ import annotations

from omni_core import NoOptions, Recipe, Standing

_YAML = """
model:
  path: package:omni_configs/tiny_signs
  lora: {rank: 4, alpha: 8}
  pipeline: {height: 32, width: 32, max_sequence_length: 16}
engine: {name: fsdp2, micro_batch_size: 16}
optimizer: {lr: 1e-3}
rollout:
  name: engine
  samples_per_prompt: 4
  batch_size: 8
  sampling: {num_inference_steps: 4, guidance_scale: 1.0}
algorithm: {name: fork_reinforce, noise_level: 0.7}
reward: {name: fork_redness}
data:
  train: package:omni_configs/prompts/tiny_signs/train.txt
  heldout: package:omni_configs/prompts/tiny_signs/heldout.txt
  prompts_per_step: 2
evaluation:
  every: 0
  max_prompts: 2
  samples_per_prompt: 2
  sampling: {num_inference_steps: 4, guidance_scale: 1.0}
trainer: {steps: 2, backend: local}
"""


def tiny(options: NoOptions) -> Recipe:
    """Two steps on the tiny pipeline that omni-configs ships."""
    del options
    return Recipe(
        yaml=_YAML,
        summary="fork_reinforce on fork_redness, tiny signs",
        standing=Standing.SMOKE,
        hardware="1 CPU core",
        global_batch="2 prompts x 4",
    )
