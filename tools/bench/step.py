"""What a training step costs beside the floor: `hatch run bench:step`.

One process, one thread, the same pictures, micro-batches and OCR calls, nothing overlapped: steps of the
floor (tools/bench/floor.py) and of the product (the trainer's own loop, its worker in this process)
alternate. The first JSON line holds their medians, `efficiency` = floor_s / step_s, and the split. The
second is the product as it ships: on Ray, pictures scored while others are sampled. Everything else goes to
stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import structlog
import torch
from floor import Floor, Settings

from omni_core import resources
from omni_trainer.assembly import Prompts, read_prompts, started
from omni_trainer.config import RunConfig, load_run
from omni_trainer.run_directory import RunDirectory
from omni_trainer.stopping import StopRequest

RECIPE = "quickstart"
WARM_UP = 2
"""Steps of each that are not counted: the first holds the canary and everything that loads late."""
Seconds = dict[str, float]


def configure(steps: int, *values: str) -> RunConfig:
    """Take the recipe, without evaluations, grids and canaries but the first."""
    plain = ["data.heldout=null", "evaluation.every=0", "trainer.grid_every=0"]
    timed = [f"trainer.steps={steps}", "trainer.canary_every=0"]
    return load_run(RECIPE, [*plain, *timed, *values]).config


def settings(config: RunConfig, prompts: Prompts) -> Settings:
    """Take the floor's numbers from the run's config."""
    rollout, algorithm = config.rollout.options, config.algorithm.options
    lora, pipeline = config.model.lora, config.model.pipeline
    assert lora is not None
    assert config.reward is not None
    return Settings(
        model=resources.resolve(config.model.path),
        prompts=[row.prompt for row in prompts.train],
        targets=[row.target or "" for row in prompts.train],
        prompts_per_step=config.data.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        num_inference_steps=rollout.sampling.num_inference_steps,
        noise_level=algorithm.noise_level,
        batch_size=rollout.batch_size,
        micro_batch_size=config.engine.options.micro_batch_size,
        ocr_batch_size=config.reward.options.batch_size,
        height=pipeline.height,
        width=pipeline.width,
        max_sequence_length=pipeline.max_sequence_length,
        rank=lora.rank,
        alpha=lora.alpha,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.max_grad_norm or float("inf"),
        clip=algorithm.clip,
        adv_clip=algorithm.adv_clip,
    )


def run(config: RunConfig, between: Callable[[], Any] = lambda: None) -> list[Seconds]:
    """Train, calling *between* after each step; seconds of each step and of its parts."""
    found: list[Seconds] = []
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        directory = RunDirectory.create(Path(folder) / "run", config, None)
        with started(config, directory, read_prompts(config), None, StopRequest()) as parts:
            log, pool = parts.observer.log, parts.trainer.pool
            last, scored = now(), 0.0

            def record(step: int, metrics: dict[str, float]) -> None:
                nonlocal last, scored
                log(step, metrics)
                reward = pool.counts().seconds
                found.append({**since(last), "reward": reward - scored, **times(metrics)})
                scored = reward
                between()
                last = now()

            parts.observer.log = record  # type: ignore[method-assign]
            parts.trainer.fit()
    return found[WARM_UP:]


def now() -> tuple[float, float]:
    """Read the wall's clock and this process's."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> Seconds:
    """Seconds of a whole step by both clocks."""
    wall, cpu = now()
    return {"step": wall - start[0], "cpu": cpu - start[1]}


def times(metrics: dict[str, float]) -> Seconds:
    """Take the seconds that the loop measured itself."""
    return {
        name.removeprefix("time/"): value
        for name, value in metrics.items()
        if name in ("time/sample", "time/reward_wait", "time/update", "time/push")
    }


def medians(steps: Sequence[Seconds]) -> Seconds:
    """The median of each part over the steps."""
    return {name: round(statistics.median(s[name] for s in steps), 4) for name in steps[0]}


def apart(step: Seconds) -> Seconds:
    """Split a step without overlap, where a group is scored within the time of sampling."""
    sample = step["sample"] - step["reward"]
    known = step["sample"] + step["reward_wait"] + step["update"] + step["push"]
    return {**step, "sample": sample, "rest": step["step"] - known}


def beside_the_floor(steps: int) -> dict[str, Any]:
    """Measure both, alternating."""
    config = configure(
        steps + WARM_UP,
        *("trainer.backend=local", "trainer.overlap_rewards=false", "trainer.threads=1"),
    )
    floor = Floor(settings(config, read_prompts(config)))
    floors: list[Seconds] = []

    def between() -> None:
        start = now()
        parts = floor.step()
        floors.append({**since(start), **parts})

    product = medians([apart(step) for step in run(config, between)])
    bare = medians(floors[WARM_UP:])
    floor_s, step_s = bare.pop("step"), product.pop("step")
    floor_cpu, step_cpu = bare.pop("cpu"), product.pop("cpu")
    return {
        "floor_s": floor_s,
        "step_s": step_s,
        "efficiency": round(floor_s / step_s, 4),
        "split": {"floor": bare, "product": product},
        # Apart from what else the machine does: the wall's clock counts that too.
        "cpu": {
            "floor_s": floor_cpu,
            "step_s": step_cpu,
            "efficiency": round(floor_cpu / step_cpu, 4),
        },
        "samples": config.rows_per_step,
        "steps": steps,
        "threads": torch.get_num_threads(),
    }


def as_shipped(steps: int) -> dict[str, Any]:
    """Measure the recipe as it is: on Ray, with overlap."""
    config = configure(steps + WARM_UP)
    found = medians(run(config))
    step_s = found.pop("step")
    found.pop("cpu")  # of the driver alone
    return {
        "shipped_step_s": step_s,
        "samples_per_s": round(config.rows_per_step / step_s, 2),
        "split": found,
        "backend": config.trainer.backend.value,
        "ranks": config.trainer.ranks,
        "overlap_rewards": config.trainer.overlap_rewards,
        "steps": steps,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="counted steps of each")
    parser.add_argument("--floor-only", action="store_true", help="without the run on Ray")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    measures = [beside_the_floor] if arguments.floor_only else [beside_the_floor, as_shipped]
    for measure in measures:
        with contextlib.redirect_stdout(sys.stderr):
            line = measure(arguments.steps)
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
