"""What a training step costs beside the floor: `hatch run bench:step`.

One process, one thread, the same micro-batches and OCR calls, nothing overlapped: floor steps
(tools/bench/floor.py) and product steps (the trainer's own loop, workers in this process) alternate. The
first JSON line holds the medians, `efficiency` = floor_s / step_s and the split; the second the product as
it ships: on Ray, rewards scored while sampling goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from floor import Floor, Settings

from omni_core import resources
from omni_trainer.config import RunConfig, load_run
from omni_trainer.data import load_prompts

RECIPE = "quickstart"


def settings(config: RunConfig, prompts: Sequence[str], targets: Sequence[str]) -> Settings:
    """Take the floor's numbers from the run's config."""
    rollout, algorithm, reward = (
        choice.options for choice in (config.rollout, config.algorithm, config.reward)
    )
    lora, pipeline = config.model.lora, config.model.pipeline
    assert lora is not None
    return Settings(
        model=resources.resolve(config.model.path),
        prompts=prompts,
        targets=targets,
        prompts_per_step=config.data.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        num_inference_steps=rollout.sampling.num_inference_steps,
        noise_level=algorithm.noise_level,
        batch_size=rollout.batch_size,
        micro_batch_size=config.engine.options.micro_batch_size,
        ocr_batch_size=reward.batch_size,
        height=pipeline.height,
        width=pipeline.width,
        max_sequence_length=pipeline.max_sequence_length,
        rank=lora.rank,
        alpha=lora.alpha,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm,
        clip=algorithm.clip,
        adv_clip=algorithm.adv_clip,
    )


def medians(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each part over the steps."""
    return {name: round(statistics.median(p[name] for p in parts), 4) for name in parts[0]}
