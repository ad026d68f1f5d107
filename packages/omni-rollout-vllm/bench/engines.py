"""Measure what samples: the stock pipeline, the engine-side rollout, vLLM-Omni; and what a push costs.

    hatch run vllm:bench [--images N] [--steps T]

On the tiny signs pipeline, float32, one thread; nothing is compared with figures of another machine. A push's share
is that of a step of the recipe `quickstart`, which is trained for two steps. The last tables are mean |dlogp|
against the training engine's replay, for float32 and bfloat16.
"""

# ruff: noqa: T201 -- what is measured goes to stdout
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils.logging import disable_progress_bar
from transformers.utils.logging import disable_progress_bar as no_bar_of_transformers

from omni_core.choices import StepKind
from omni_core.log import configure
from omni_core.options import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.resources import resolve
from omni_core.rollout import BaseRollout, WeightUpdate
from omni_core.testing.samples import requests_for
from omni_core.trajectory import RolloutRequest, SamplingSpec, Trajectory
from omni_engine_fsdp import FSDPEngineConfig, PPODiffusersFSDPEngine
from omni_engine_fsdp.options import EngineRolloutConfig
from omni_engine_fsdp.rollout import EngineRollout
from omni_rollout_vllm.options import VllmOmniRolloutConfig
from omni_rollout_vllm.rollout import VllmOmniRollout
from omni_trainer.config import load_run
from omni_trainer.run import run_training

MODEL = "package:omni_configs/tiny_signs"
SIZE, TOKENS = 32, 16
PROMPTS = tuple(f'a sign that reads "{number}"' for number in range(1000))
KINDS = ((StepKind.SDE, 0.7), (StepKind.CPS, 0.7), (StepKind.DANCE_SDE, 0.3))


def main(argv: list[str]) -> int:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=48, help="pictures of one measurement")
    parser.add_argument("--steps", type=int, default=6, help="denoising steps of a picture")
    arguments = parser.parse_args(argv)
    configure(level="warning")
    disable_progress_bar()
    no_bar_of_transformers()
    engine = make_engine(DType.FLOAT32)
    print(f"{arguments.images} pictures of {SIZE} x {SIZE} px, {arguments.steps} steps, images/s")
    print(f"  {'':24}{'batch 1':>10}{'batch 8':>10}{'batch 1, CFG':>14}{'batch 8, CFG':>14}")
    for name, measure in (
        ("stock diffusers", stock),
        ("engine-side rollout", engine_side),
        ("vLLM-Omni", vllm),
    ):
        found = measure(engine, arguments.images, arguments.steps)
        print(
            f"  {name:24}"
            + "".join(f"{v:>{w}.2f}" for v, w in zip(found, (10, 10, 14, 14), strict=True))
        )
    pushes(engine, step_seconds())
    agreement(engine, arguments.steps)
    agreement(make_engine(DType.BFLOAT16), arguments.steps)
    return 0


def make_engine(dtype: DType) -> PPODiffusersFSDPEngine:
    """The training engine, its adapter away from its start."""
    pipeline = DiffusionPipelineConfig(height=SIZE, width=SIZE, max_sequence_length=TOKENS)
    model = DiffusionModelConfig(
        path=MODEL, dtype=dtype, lora=LoRAConfig(rank=16, alpha=32.0), pipeline=pipeline
    )
    engine = PPODiffusersFSDPEngine(model, FSDPEngineConfig(), OptimizerConfig(), None)
    engine.initialize()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameters in engine.adapter_parameters("default").values():
            for name, parameter in parameters.items():
                if ".lora_B." in name:
                    parameter.normal_(0.0, 0.02, generator=generator)
    return engine


def spec_of(engine: Any, steps: int, guidance: float, kind: StepKind, level: float) -> SamplingSpec:
    """A sampling spec of the bench's size."""
    config = DiffusionSamplingConfig(num_inference_steps=steps)
    return SamplingSpec(
        sigmas=engine.family.schedule(config).values(),
        guidance_scale=guidance,
        height=SIZE,
        width=SIZE,
        max_sequence_length=TOKENS,
        kind=kind,
        noise_level=level,
    )


def asked(engine: Any, images: int, steps: int, guidance: float) -> list[RolloutRequest]:
    """One picture of each prompt."""
    spec = spec_of(engine, steps, guidance, StepKind.SDE, 0.7)
    return requests_for(spec, PROMPTS[:images], samples_per_prompt=1)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def stock(engine: Any, images: int, steps: int) -> list[float]:
    """images/s of diffusers' own pipeline."""
    del engine
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(resolve(MODEL))
    pipeline.set_progress_bar_config(disable=True)

    def run(count: int, batch: int, guidance: float) -> None:
        for start in range(0, count, batch):
            pipeline(
                list(PROMPTS[start : start + batch]),
                height=SIZE,
                width=SIZE,
                num_inference_steps=steps,
                guidance_scale=guidance,
                max_sequence_length=TOKENS,
            )

    found = []
    for guidance in (1.0, 4.5):
        for batch in (1, 8):
            run(batch, batch, guidance)
            found.append(images / timed(lambda b=batch, g=guidance: run(images, b, g)))
    return found


def rollouts(
    make: Callable[[int], BaseRollout], engine: Any, images: int, steps: int
) -> list[float]:
    """images/s of a rollout at batch 1 and 8, without and with guidance."""
    found = {}
    for batch in (1, 8):
        rollout = make(batch)
        for guidance in (1.0, 4.5):
            rollout.generate(asked(engine, batch, steps, guidance))
            wanted = asked(engine, images, steps, guidance)
            found[guidance, batch] = images / timed(lambda r=rollout, w=wanted: r.generate(w))
        rollout.close()
    return [found[guidance, batch] for guidance in (1.0, 4.5) for batch in (1, 8)]


def engine_side(engine: Any, images: int, steps: int) -> list[float]:
    """images/s of the rollout `engine`."""
    return rollouts(
        lambda batch: EngineRollout(EngineRolloutConfig(batch_size=batch), engine=engine),
        engine,
        images,
        steps,
    )


def vllm(engine: Any, images: int, steps: int) -> list[float]:
    """images/s of the rollout `vllm_omni`."""
    return rollouts(lambda batch: started(engine, batch_size=batch), engine, images, steps)


def started(engine: Any, **options: Any) -> VllmOmniRollout:
    """Start a rollout with the engine's adapter."""
    rollout = VllmOmniRollout(attrs.evolve(VllmOmniRolloutConfig(), **options), engine=engine)
    push(rollout, engine, "default", 1.0)
    return rollout


def push(rollout: VllmOmniRollout, engine: Any, adapter: str | None, factor: float) -> Any:
    """Push the engine's weights times *factor*; returns the report."""
    tensors = {n: v * factor for n, v in engine.get_per_tensor_param(adapter=adapter)}
    rollout.pause()
    report = rollout.update(
        WeightUpdate(
            version=rollout.weight_version + 1,
            tensors=tensors,
            adapter=adapter,
            alpha_over_rank=2.0,
        )
    )
    rollout.resume()
    return report


def step_seconds() -> float:
    """Seconds of the quickstart's second step, sampled in vLLM-Omni, without its push; prints its parts."""
    changes = (
        "trainer.steps=2",
        "trainer.backend=local",
        "data.heldout=null",
        "evaluation.every=0",
    )
    config = load_run("quickstart", ["rollout.name=vllm_omni", *changes]).config
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        run_training(config, run_dir=run)
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    parts = ("sample", "reward_wait", "update", "push", "step")
    print(f"\na step of `quickstart` ({config.rows_per_step} pictures), seconds")
    print("  " + ", ".join(f"{part} {last[f'time/{part}']:.2f}" for part in parts))
    seconds: float = last["time/step"] - last["time/push"]
    return seconds


def pushes(engine: Any, rest: float) -> None:
    """Print what a push takes, beside a copy of as many bytes and a step whose *rest* takes so long."""
    print("\npush (median of 5)")
    for probe in (True, False):
        rollout = started(engine, batch_size=8, probe=probe)
        for adapter, name in (("default", "LoRA"), (None, "all weights")):
            reports = [push(rollout, engine, adapter, 1.0 + 0.01 * n) for n in range(1, 6)]
            seconds = sorted(report.seconds for report in reports)[2]
            nbytes = reports[0].nbytes
            copy = copy_seconds(nbytes)
            print(
                f"  {name:12} {'with' if probe else 'without'} probe: {nbytes / 2**20:7.2f} MiB "
                f"{seconds * 1e3:8.1f} ms, {seconds / (rest + seconds):.1%} of a step, "
                f"{copy / seconds:.1%} of the bandwidth of a copy"
            )
        rollout.close()


def copy_seconds(nbytes: int) -> float:
    """Seconds of copying as many bytes in memory (median of 5)."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    return sorted(timed(source.clone) for _ in range(5))[2]


def agreement(engine: Any, steps: int) -> None:
    """Print mean and largest |dlogp| between what vLLM-Omni stored and the training engine's replay."""
    print(f"\n|dlogp| against replay, {engine.model_config.dtype.value}: mean, largest")
    rollout = started(engine, batch_size=8)
    for kind, level in KINDS:
        for guidance in (1.0, 4.5):
            spec = spec_of(engine, steps, guidance, kind, level)
            found = Trajectory.concat(rollout.generate(requests_for(spec, PROMPTS[:4])))
            apart = (engine.replay(found).cpu() - found.log_probs).abs()
            print(
                f"  {kind.value:10} guidance {guidance}: {float(apart.mean()):.2e}, {float(apart.max()):.2e}"
            )
    rollout.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
