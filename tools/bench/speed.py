"""What each speed option gives a training step, alone and together: `hatch run bench:speed`.

One process, one thread, one run: a trainer for each combination of options, all from the same weights and
seeds, take their steps in turn. The first step also shows that they train the same: its gradient (all of
it, before clipping) beside the plain step's. One JSON line for each combination, then a table on stderr;
`ratio` is the plain step's seconds over this one's. Warm-up (compiling) is counted apart.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import attrs
import structlog
import torch
from torch import Tensor

from omni_core.model import Guidance
from omni_core.seeds import derive_seed
from omni_engine_fsdp import sharding
from omni_trainer.assembly import read_prompts, started
from omni_trainer.config import RunConfig, load_run
from omni_trainer.loop import Trainer
from omni_trainer.run_directory import RunDirectory
from omni_trainer.stopping import StopRequest

RECIPE = "quickstart"
PLAIN = "plain"
OVERLAP = "trainer.overlap_rewards=true"
COMPILE = "engine.compile=true"
KEEP = "engine.keep_graph=true"
MERGE = "rollout.merge_lora=true"
VARIANTS: Mapping[str, Sequence[str]] = {
    PLAIN: (),
    "compile": (COMPILE,),
    "keep_graph": (KEEP,),
    "merge_lora": (MERGE,),
    "overlap_rewards": (OVERLAP,),
    # A merged adapter has no graph: one of the two.
    "compile + keep_graph + overlap_rewards": (COMPILE, KEEP, OVERLAP),
    "compile + merge_lora + overlap_rewards": (COMPILE, MERGE, OVERLAP),
}
WARM_UP = 2
"""Steps that are not counted: canary, compiling, whatever loads late."""
NUDGE = 0.02
"""Standard deviation of the adapters' B at the start: at zero, half of every gradient is zero."""


@attrs.define(kw_only=True)
class Variant:
    """One combination of options and what it has shown."""

    name: str
    config: RunConfig
    trainer: Trainer
    engine: Any
    seconds: list[float] = attrs.field(factory=list)
    cpu: list[float] = attrs.field(factory=list)
    warm_up: float = 0.0
    compiling: float = 0.0
    """Part of the warm-up."""
    gradient: dict[str, Tensor] = attrs.field(factory=dict)

    def nudge(self) -> None:
        """Give B the same small values in every variant."""
        self.engine.prepare_weights()
        for name, parameter in self.engine.trained().items():
            if ".lora_B." in name:
                generator = torch.Generator().manual_seed(derive_seed("bench", name))
                value = torch.randn(parameter.shape, generator=generator) * NUDGE
                with torch.no_grad():
                    parameter.copy_(sharding.shard_like(value.to(parameter.dtype), parameter))

    def step(self, *, counted: bool) -> None:
        """Train once."""
        wall, cpu = time.perf_counter(), time.process_time()
        compiled = (
            self.engine.compile_seconds
        )  # of the process: whatever this step adds is this variant's
        with self.trainer.timed("step"):
            self.trainer.train()
        self.trainer.step += 1
        if counted:
            self.seconds.append(time.perf_counter() - wall)
            self.cpu.append(time.process_time() - cpu)
        else:
            self.warm_up += time.perf_counter() - wall
        self.compiling += self.engine.compile_seconds - compiled
        self.trainer.metrics = {}

    def watch_first_gradient(self) -> None:
        """Keep the gradient that the first optimizer step sees."""
        engine, original = self.engine, self.engine.optimizer_step

        def watching() -> Any:
            self.gradient = {
                name: sharding.whole(p.grad).clone()
                for name, p in engine.trained().items()
                if p.grad is not None
            }
            engine.optimizer_step = original
            return original()

        engine.optimizer_step = watching


def configure(steps: int, options: Sequence[str], values: Sequence[str]) -> RunConfig:
    """Take the recipe in one process, without whatever is not the step."""
    plain = [
        *("data.heldout=null", "evaluation.every=0", "trainer.grid_every=0"),
        *("trainer.canary_every=0", "trainer.backend=local", "trainer.threads=1"),
        *("trainer.overlap_rewards=false", "rollout.batch_size=32", f"trainer.steps={steps}"),
    ]
    return load_run(RECIPE, [*plain, *values, *options]).config


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| of all tensors together."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name] - t).double().square().sum()) for name, t in theirs.items())
    return float(
        (difference / sum(float(t.double().square().sum()) for t in theirs.values())) ** 0.5
    )


def measure(steps: int, names: Sequence[str], values: Sequence[str]) -> list[dict[str, Any]]:
    """Run all variants in turn."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-bench-")))
        variants = []
        for place, name in enumerate(names):
            config = configure(steps + WARM_UP, VARIANTS[name], values)
            run = RunDirectory.create(folder / str(place), config, None)
            parts = stack.enter_context(
                started(config, run, read_prompts(config), None, StopRequest())
            )
            engine = parts.group._worker.training.engine
            variants.append(Variant(name=name, config=config, trainer=parts.trainer, engine=engine))
        for variant in variants:
            variant.nudge()
            variant.watch_first_gradient()
        for step in range(steps + WARM_UP):
            for variant in variants:
                variant.step(counted=step >= WARM_UP)
        encoded = conditioning(variants[0])
        return [*(line_of(variant, variants[0]) for variant in variants), encoded]


def line_of(variant: Variant, plain: Variant) -> dict[str, Any]:
    """What one variant has shown, beside the plain one."""
    step_s = statistics.median(variant.seconds)
    ratios = [theirs / ours for ours, theirs in zip(variant.seconds, plain.seconds, strict=True)]
    cpu = [theirs / ours for ours, theirs in zip(variant.cpu, plain.cpu, strict=True)]
    return {
        "options": variant.name,
        "step_s": round(step_s, 3),
        "images_per_s": round(variant.config.rows_per_step / step_s, 2),
        "ratio": round(statistics.median(ratios), 3),
        "cpu_ratio": round(statistics.median(cpu), 3),
        "gradient_apart": float(f"{apart(variant.gradient, plain.gradient):.2g}"),
        "warm_up_s": round(variant.warm_up, 1),
        "compile_s": round(variant.compiling, 1),
        "steps": len(variant.seconds),
    }


def conditioning(plain: Variant) -> dict[str, Any]:
    """Time the encoding of a step's prompts once each, as every step does, and once a sample."""
    rollout = plain.trainer.group._worker.rollout  # type: ignore[attr-defined]
    options = plain.config.rollout.options
    prompts = [row.prompt for row in plain.trainer.prompts.next().rows]
    guidance = Guidance(scale=options.sampling.guidance_scale)
    found = {}
    for name, asked in (
        ("once_a_group", prompts),
        ("once_a_sample", [p for p in prompts for _ in range(options.samples_per_prompt)]),
    ):
        start = time.perf_counter()
        rollout.encode(asked, guidance=guidance)
        found[f"{name}_s"] = round(time.perf_counter() - start, 3)
    return {"options": "conditioning encoded once a group (always)", **found}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, for docs/performance.md."""
    columns = ("options", "images_per_s", "ratio", "cpu_ratio", "gradient_apart", "compile_s")
    rows = [[str(line[name]) for name in columns] for line in lines if "ratio" in line]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [list(columns), ["---"] * len(columns), *rows]
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each")
    parser.add_argument("--only", nargs="*", help="names of variants beside the plain one")
    parser.add_argument("values", nargs="*", help="dotted.key=value for all of them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    names = [n for n in VARIANTS if n == PLAIN or arguments.only is None or n in arguments.only]
    with contextlib.redirect_stdout(sys.stderr):
        lines = measure(arguments.steps, names, arguments.values)
    for line in lines:
        print(json.dumps(line), flush=True)
    print(table(lines), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
