"""One section of the GPU check: an engine with some options, sampled from and trained a few times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import random_sd3
import torch
from random_sd3 import Size

from omni_core import device as devices
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import StepKind
from omni_core.engine import TrainBatch
from omni_core.losses import ConfiguredLoss
from omni_core.options import (
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionSamplingConfig,
    DType,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.rollout import WeightUpdate
from omni_core.testing.samples import PROMPTS, requests_for
from omni_core.trajectory import SamplingSpec, Trajectory
from omni_engine_fsdp import (
    EngineRollout,
    EngineRolloutConfig,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
    RolloutPlacement,
)
from omni_engine_fsdp.options import Offload

GUIDANCE = 4.5
NOISE = {StepKind.SDE: 0.7, StepKind.CPS: 0.8, StepKind.DANCE_SDE: 0.3}
ROUNDS = 3
"""The first is warm-up: kernels are chosen, caches filled, blocks compiled."""


@attrs.frozen(kw_only=True)
class Section:
    """What is measured, and for how long at most."""

    name: str
    lora: bool = True
    engine: Mapping[str, Any] = attrs.field(factory=dict)
    """Fields of FSDPEngineConfig."""
    rollout: Mapping[str, Any] = attrs.field(factory=dict)
    """Fields of EngineRolloutConfig."""
    kinds: tuple[StepKind, ...] = (StepKind.SDE,)
    """Of which the canary's numbers are taken."""
    limit: float = 45.0
    """Seconds."""


SECTIONS = (
    Section(name="lora", kinds=tuple(NOISE), limit=60.0),
    Section(name="lora checkpointing", engine={"gradient_checkpointing": True}),
    Section(name="lora keep_graph", engine={"keep_graph": True}),
    Section(
        name="lora keep_graph checkpointing",
        engine={"keep_graph": True, "gradient_checkpointing": True},
    ),
    Section(name="lora merge_lora", rollout={"merge_lora": True}),
    Section(name="full checkpointing", lora=False, engine={"gradient_checkpointing": True}),
    Section(name="full", lora=False),
    Section(
        name="full offload optimizer",
        lora=False,
        engine={"offload": Offload.OPTIMIZER, "gradient_checkpointing": True},
    ),
    Section(
        name="full offload all",
        lora=False,
        engine={"offload": Offload.ALL, "gradient_checkpointing": True},
    ),
    Section(name="lora replica", rollout={"placement": RolloutPlacement.REPLICA}),
    Section(name="lora compile", engine={"compile": True}, limit=120.0),
    Section(
        name="lora compile keep_graph",
        engine={"compile": True, "keep_graph": True},
        limit=120.0,
    ),
)
"""In the order of their worth: what there is no time for is left out, and said to be."""


def run(section: Section, size: Size, folder: Path, *, backend: str = "inductor") -> dict[str, Any]:
    """Measure one section; what is raised is the section's own."""
    random_sd3.register()
    options: dict[str, Any] = {"micro_batch_size": size.micro_batch, **section.engine}
    if options.get("compile"):
        options["compile_backend"] = backend
    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(
            path=str(folder),
            family=random_sd3.FAMILY,
            dtype=DType.BFLOAT16,
            lora=LoRAConfig(rank=size.rank, alpha=2.0 * size.rank) if section.lora else None,
            pipeline=DiffusionPipelineConfig(
                height=size.pixels, width=size.pixels, max_sequence_length=size.tokens
            ),
        ),
        FSDPEngineConfig(**options),
        OptimizerConfig(lr=1e-5),
        None,
    )
    start = time.perf_counter()
    engine.initialize()
    engine.set_loss_fn(
        ConfiguredLoss(DiffusionLossConfig(name="flow_grpo", options=FlowGRPOOptions()))
    )
    loaded = seconds_since(start, engine)
    held = devices.memory_allocated(engine.device)
    batch_size = size.prompts * size.samples
    rollout = EngineRollout(
        EngineRolloutConfig(batch_size=batch_size, **section.rollout), engine=engine
    )
    rounds = [_round(engine, rollout, size, step) for step in range(ROUNDS)]
    best = {name: min(each[name] for each in rounds[1:]) for name in rounds[0]}
    pairs = batch_size * len(size.trained)
    return {
        "load_s": loaded,
        "sample_s": best["sample_s"],
        "train_s": best["train_s"],
        "push_s": best["push_s"],
        "samples_per_s": batch_size / best["sample_s"],
        "pairs_per_s": pairs / best["train_s"],
        "images_per_s": batch_size / (best["sample_s"] + best["train_s"]),
        "warm_up_s": rounds[0]["sample_s"] + rounds[0]["train_s"],
        "compile_s": engine.compile_seconds,
        "loaded_gib": held / 2**30,
        "peak_gib": devices.peak_memory(engine.device) / 2**30,
        "canary": {kind.value: _canary(engine, rollout, size, kind) for kind in section.kinds},
    }


def seconds_since(start: float, engine: Any) -> float:
    """Seconds until everything queued on the device is done."""
    devices.synchronize(engine.device)
    return time.perf_counter() - start


def _sample(
    engine: Any, rollout: EngineRollout, size: Size, kind: StepKind, step: int
) -> Trajectory:
    sampling = DiffusionSamplingConfig(num_inference_steps=size.steps, guidance_scale=GUIDANCE)
    spec = SamplingSpec(
        sigmas=rollout.schedule(sampling).values(),
        guidance_scale=GUIDANCE,
        height=size.pixels,
        width=size.pixels,
        max_sequence_length=size.tokens,
        kind=kind,
        noise_level=NOISE[kind],
    )
    asked = requests_for(
        spec,
        PROMPTS[: size.prompts],
        samples_per_prompt=size.samples,
        window=size.trained,
        step=step,
    )
    return Trajectory.concat(rollout.generate(asked))


def _batch(trajectory: Trajectory, step: int) -> TrainBatch:
    rows = trajectory.rows
    generator = torch.Generator().manual_seed(step)
    return TrainBatch(
        trajectory=attrs.evolve(trajectory, media=None),
        advantages=torch.randn(rows, generator=generator),
        weights=torch.ones(rows),
        denominator=float(trajectory.step_indices.numel()),
    )


def _round(engine: Any, rollout: EngineRollout, size: Size, step: int) -> dict[str, float]:
    engine.begin_rollout()
    start = time.perf_counter()
    trajectory = _sample(engine, rollout, size, StepKind.SDE, step)
    sample_s = seconds_since(start, engine)
    start = time.perf_counter()
    found = engine.train_batch(_batch(trajectory, step)).metrics
    train_s = seconds_since(start, engine)
    if found["skipped"].mean:
        msg = "the gradient was not finite"
        raise RuntimeError(msg)
    start = time.perf_counter()
    if rollout.options.placement is RolloutPlacement.REPLICA:
        _push(engine, rollout)
    push_s = seconds_since(start, engine)
    return {"sample_s": sample_s, "train_s": train_s, "push_s": push_s}


def _push(engine: Any, rollout: EngineRollout) -> None:
    """Send a rollout with a copy of its own what was trained."""
    rollout.pause()
    tensors = dict(engine.get_per_tensor_param())
    rollout.update(WeightUpdate(version=engine.weight_version, tensors=tensors))
    rollout.resume()


def _canary(engine: Any, rollout: EngineRollout, size: Size, kind: StepKind) -> dict[str, float]:
    """Replay in the rollout's own batch, and training micro-batches, against what is stored."""
    # What is compiled is another function where graphs are kept, and the replay takes that one.
    engine.begin_rollout()
    trajectory = _sample(engine, rollout, size, kind, ROUNDS)
    engine.end_rollout()
    exact = engine.replay(trajectory).double() - trajectory.log_probs.double()
    trained = engine.infer_batch(_batch(trajectory, 0)).log_probs.double()
    floor = torch.expm1(trained - trajectory.log_probs.double())
    return {"exact": float(exact.abs().max()), "floor": float(floor.abs().max())}
