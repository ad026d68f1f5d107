"""What ranks cost the engine: `hatch run bench:engine`.

Two independent processes train at the same time: their rows per second together are the ceiling of two
ranks. Then one rank trains, and two ranks in each layout, on the same rows per rank; sequence parallel
ranks share their rows. Last, checkpoints of a model whose every weight is trained, against a plain copy of
their files. JSON lines go to stdout as they are measured, the table at the end to stderr.

Every process has one thread. Training is a fixed batch of drawn rows: nothing is sampled or scored.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOOLS = Path(__file__).resolve().parents[1]
TEXT, LATENTS = 32, (8, 8, 8)
"""Text tokens (16 of CLIP, 16 of T5), and C H W of a picture of 32 x 32 px: 16 image tokens."""
MIB = 2**20

Form = Mapping[str, Any]
FORMS: Mapping[str, tuple[int, Form]] = {
    "two processes (ceiling)": (1, {}),
    "one rank": (1, {}),
    "two ranks, sharded": (2, {"shard_base": "shard"}),
    "two ranks, base replicated": (2, {"shard_base": "replicate"}),
    "two ranks, replicated": (2, {"shard_base": "replicate", "shard_trained": "replicate"}),
    "two ranks, one sequence": (2, {"shard_trained": "replicate", "ulysses": 2}),
    "two ranks, two branches": (2, {"shard_trained": "replicate", "cfg_parallel": 2}),
}
"""Name -> (ranks of one group, options of the engine)."""
CEILING = next(iter(FORMS))


# -- what a process measures ------------------------------------------------------------------------


def build(model: Path, options: Mapping[str, Any], *, lora: bool, micro_batch_size: int) -> Any:
    """Build an engine; the imports are a second's worth, so only processes that train make them."""
    from omni_core.options import (
        CheckpointConfig,
        DiffusionModelConfig,
        DiffusionPipelineConfig,
        LoRAConfig,
        OptimizerConfig,
    )
    from omni_engine_fsdp import FSDPEngineConfig, PPODiffusersFSDPEngine

    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(
            path=str(model),
            lora=LoRAConfig(rank=8, alpha=16.0) if lora else None,
            pipeline=DiffusionPipelineConfig(height=32, width=32, max_sequence_length=TEXT - 16),
        ),
        FSDPEngineConfig(device="cpu", micro_batch_size=micro_batch_size, **options),
        OptimizerConfig(lr=1e-4),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def drawn(rows: int, *, seed: int, ranks: int) -> Any:
    """Rows of one trained step each, with guidance."""
    import torch

    from omni_core.choices import StepKind
    from omni_core.engine import TrainBatch
    from omni_core.families.sd3 import SD3Conditioning
    from omni_core.schedule import FlowMatchSchedule
    from omni_core.trajectory import BatchPlace, SampleRecord, SamplingSpec, Trajectory

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    trajectory = Trajectory(
        latents={"image": draw(rows, 3, *LATENTS)},
        step_indices=torch.zeros(rows, 1, dtype=torch.int64),
        log_probs=draw(rows, 1),
        conditioning=SD3Conditioning(
            prompt_embeds=draw(rows, TEXT, 32),
            pooled=draw(rows, 16),
            negative_prompt_embeds=draw(rows, TEXT, 32),
            negative_pooled=draw(rows, 16),
        ),
        prompt_index=torch.arange(rows),
        media=None,
        records=tuple(
            SampleRecord(group_id=str(row), row_id=str(row), k=0, seed=row, prompt="")
            for row in range(rows)
        ),
        effective=SamplingSpec(
            sigmas=FlowMatchSchedule.linear(2, shift=3.0).values(),
            guidance_scale=4.5,
            height=32,
            width=32,
            max_sequence_length=TEXT - 16,
            kind=StepKind.SDE,
            noise_level=0.7,
        ),
        adapter="default",
        weight_version=0,
        places=tuple(BatchPlace("0/0/0", row, rows) for row in range(rows)),
    )
    weights = torch.ones(rows)
    return TrainBatch(
        trajectory=trajectory,
        advantages=draw(rows),
        weights=weights,
        denominator=float(rows * ranks),
    )


def loss(inputs: Any) -> Any:
    """The policy gradient without a clip."""
    from omni_core.engine import LossTerms

    return LossTerms(terms=-inputs.advantages * inputs.current.require_log_prob())


def train(arguments: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Any]:
    """Rows per second of this rank's group, by the median of its steps."""
    engine = build(arguments.model, options, lora=True, micro_batch_size=arguments.micro_batch)
    places = engine.get_data_parallel_size()
    place = engine.get_data_parallel_rank()
    batch = drawn(arguments.rows, seed=place, ranks=places)
    engine.train_batch(batch, loss)
    wait_for_all(arguments)
    seconds = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        engine.train_batch(batch, loss)
        seconds.append(time.perf_counter() - start)
    # Until the slowest is done the others go on: a process must not measure an idle machine.
    wait_for_all(
        arguments, "done", lambda: engine.train_batch(batch, loss) if places == 1 else None
    )
    return {"rows_per_s": arguments.rows * places / statistics.median(seconds)}


def wait_for_all(
    arguments: argparse.Namespace, what: str = "ready", meanwhile: Callable[[], Any] = lambda: None
) -> None:
    """Meet the other processes, which need not be of one group."""
    (arguments.meet / f"{what}.{arguments.place}").touch()
    others = [arguments.meet / f"{what}.{place}" for place in range(arguments.processes)]
    # A group's ranks step together, so only processes alone can do something meanwhile.
    busy = "WORLD_SIZE" not in os.environ
    while not all(path.exists() for path in others):
        if busy:
            meanwhile()
        time.sleep(0.002)


def checkpoints(arguments: argparse.Namespace) -> dict[str, Any]:
    """MiB per second of a save and a load, both synced to the disk, and of a plain copy."""
    engine = build(arguments.model, {}, lora=False, micro_batch_size=arguments.micro_batch)
    engine.train_batch(drawn(arguments.rows, seed=0, ranks=1), loss)
    folder = arguments.meet / "checkpoint"
    found: dict[str, list[float]] = {"save": [], "load": [], "copy": []}
    for _ in range(3):
        start = time.perf_counter()
        state = engine.save_checkpoint(folder)
        sync(folder)
        saved = time.perf_counter()
        engine.load_checkpoint(folder, state)
        loaded = time.perf_counter()
        copy(folder, arguments.meet / "copy")
        copied = time.perf_counter()
        for name, seconds in (
            ("save", saved - start),
            ("load", loaded - saved),
            ("copy", copied - loaded),
        ):
            found[name].append(seconds)
    size = sum(path.stat().st_size for path in folder.iterdir()) / MIB
    rates = {f"{name}_mib_per_s": size / statistics.median(each) for name, each in found.items()}
    return {"mib": size, **rates}


def copy(source: Path, target: Path) -> None:
    """Copy the files by reading and writing them, and sync them to the disk."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        # Not copyfile: where the file system can, it shares blocks and copies nothing.
        with path.open("rb") as reader, (target / path.name).open("wb") as writer:
            while block := reader.read(8 * MIB):
                writer.write(block)
    sync(target)


def sync(folder: Path) -> None:
    """Write what is buffered to the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def work(arguments: argparse.Namespace) -> int:
    """One process: measure, and print one JSON line."""
    import structlog
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    if "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = f"file://{arguments.meet}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    if arguments.work == "checkpoint":
        found = checkpoints(arguments)
    else:
        found = train(arguments, FORMS[arguments.work][1])
    print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
    return 0


# -- what starts them -------------------------------------------------------------------------------


def start(
    arguments: argparse.Namespace, form: str, processes: int, ranks: int
) -> list[dict[str, Any]]:
    """Run so many processes, in groups of so many ranks; what each printed."""
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        started = []
        for place in range(processes):
            told = ["--work", form, "--meet", folder, "--place", str(place)]
            told += ["--processes", str(processes), "--model", str(arguments.model)]
            told += ["--steps", str(arguments.steps), "--rows", str(arguments.rows)]
            told += ["--micro-batch", str(arguments.micro_batch)]
            group = {"RANK": str(place), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            started.append(
                subprocess.Popen(
                    [sys.executable, __file__, *told],
                    env={**os.environ, **group},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        printed = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            sys.exit(f"{form}: a process failed; its traceback is above")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every form; JSON lines as they come."""
    lines: list[dict[str, Any]] = []
    for form, (ranks, _) in FORMS.items():
        processes = 2 if form == CEILING else ranks
        found = start(arguments, form, processes, ranks)
        # Ranks of a group report the group's rate, processes alone their own.
        rate = sum(each["rows_per_s"] for each in found) / ranks
        line = {"form": form, "rows_per_s": round(rate, 2)}
        line["of_the_ceiling"] = round(rate / lines[0]["rows_per_s"], 3) if lines else 1.0
        lines.append(line)
        print(json.dumps(line), flush=True)
    (found_,) = start(arguments, "checkpoint", 1, 1)
    line = {"form": "checkpoint", **{name: round(value, 1) for name, value in found_.items()}}
    print(json.dumps(line), flush=True)
    return [*lines, line]


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The same for people."""
    rows = [
        f"{line['form']:<28}{line['rows_per_s']:>10.2f}{line['of_the_ceiling']:>16.3f}"
        for line in lines[:-1]
    ]
    last = lines[-1]
    rates = ", ".join(
        f"{name} {last[f'{name}_mib_per_s']} MiB/s" for name in ("save", "load", "copy")
    )
    heading = f"{'':<28}{'rows/s':>10}{'of the ceiling':>16}"
    return "\n".join([heading, *rows, f"checkpoint of {last['mib']} MiB: {rates}"])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each form")
    parser.add_argument("--rows", type=int, default=32, help="rows of one rank in a step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    for name in ("--work", "--place", "--processes"):
        parser.add_argument(name, type=str if name == "--work" else int, help=argparse.SUPPRESS)
    for name in ("--meet", "--model"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments)
    sys.path.insert(0, str(TOOLS))
    from tiny_models.sd3 import build_tiny_sd3

    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        arguments.model = build_tiny_sd3(
            Path(folder) / "model", layers=arguments.layers, heads=arguments.heads
        )
        lines = measure(arguments)
    print(table(lines), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
