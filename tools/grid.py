"""Train every algorithm on every model family, and print which cells work.

Two steps each, of the family's tiny pipeline (random weights) by the real engine and rollout, guided, on
the CPU in float32. A cell is `ok` when the run ended and kept what `check` asks of it, the canaries
included; `n/a` with the reason where the algorithm declares that it cannot train the family; else it is
the error. Nothing is ok unless the algorithms keep their suite, which is run first.

    python tools/grid.py                                  everything
    python tools/grid.py --family flux --algorithm awm    some cells
    python tools/grid.py --write docs/grid.md             and the page of it
"""

from __future__ import annotations

import argparse
import enum
import importlib.metadata
import io
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import yaml
from PIL import Image

from omni_core import plugins
from omni_core.algorithm import ModelFacts
from omni_core.options import DiffusionModelConfig
from omni_core.testing.toys import register_toys
from tiny_models import BUILDERS, SIZES, build_tiny

ROOT = Path(__file__).resolve().parents[1]
SUITE = ROOT / "packages" / "omni-core" / "tests" / "test_algorithms_suite.py"

RUN: Mapping[str, Any] = {
    "engine": {"name": "fsdp2"},
    "optimizer": {"lr": 1e-2},
    "rollout": {
        "name": "engine",
        "samples_per_prompt": 4,
        "sampling": {"num_inference_steps": 4, "guidance_scale": 2.0},
    },
    "reward": {"name": "toy"},
    "data": {"prompts_per_step": 2},
    "trainer": {"steps": 2},
}
"""Every cell's config but its model, prompts and algorithm."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "dance_grpo": {"updates_per_rollout": 2},
    "diffusion_nft": {"beta": 0.1},
    "flow_dppo": {"updates_per_rollout": 2},
    "flow_grpo": {"kl_coef": 0.01},
    "mix_grpo": {"window_size": 1, "interval": 1},
}
"""Of the algorithms whose own options do not fit so short a run, or would leave something out."""

PROMPTS = ("sign", "a red sign that reads 42, and below it another sign", "blue", "photo of a sign")
"""Of several lengths: masked families pad and mask."""

FLOOR = 1e-6
"""Largest |ratio - 1| between the rollout's batches and training micro-batches, in float32."""

IMAGE = "image"
"""Column of the images that prompts edit."""


class Status(enum.StrEnum):
    """What became of a cell."""

    OK = "ok"
    NOT_APPLICABLE = "n/a"
    ERROR = "error"


@attrs.frozen(kw_only=True)
class Cell:
    """One algorithm on one family."""

    family: str
    algorithm: str
    status: Status
    reason: str = ""
    """Of what is not ok."""
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Model:
    """A family's tiny pipeline, and where its cells write."""

    family: str
    path: Path
    work: Path

    @classmethod
    def build(cls, family: str, work: Path) -> Model:
        """Write the pipeline, the prompts and, where they edit some, their images below *work*."""
        model = cls(family=family, path=build_tiny(family, work / "model"), work=work)
        rows: list[dict[str, str]] = [{"prompt": prompt} for prompt in PROMPTS]
        if model.edits:
            for number, row in enumerate(rows):
                row[IMAGE] = f"{number}.png"
                shade = 60 * number
                Image.new("RGB", (32, 32), (shade, 0, 255 - shade)).save(work / row[IMAGE])
        model.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return model

    @property
    def edits(self) -> bool:
        """Whether its prompts edit images."""
        return IMAGE in plugins.registry(plugins.MODELS).get(self.family).load().inputs

    @property
    def prompts(self) -> Path:
        """JSON lines."""
        return self.work / "prompts.jsonl"

    def config(self, algorithm: Mapping[str, Any]) -> dict[str, Any]:
        """A run's config."""
        model = {
            "path": str(self.path),
            "pipeline": dict(SIZES[self.family]),
            "lora": {"rank": 2, "alpha": 8.0},
        }
        data = {**RUN["data"], "train": str(self.prompts)}
        if self.edits:
            data["image_column"] = IMAGE
        return {**RUN, "model": model, "data": data, "algorithm": dict(algorithm)}

    def train(self, name: str, algorithm: Mapping[str, Any]) -> Path:
        """Train, and return the run's directory."""
        from omni_trainer.config import load_run
        from omni_trainer.run import run_training

        file = self.work / f"{name}.yaml"
        file.write_text(yaml.safe_dump(self.config(algorithm)))
        loaded = load_run(str(file))
        run_dir = self.work / name
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # its progress
            run_training(loaded.config, run_dir=run_dir, resolved=loaded.resolved)
        return run_dir

    def teacher(self) -> Path:
        """An adapter that FlowGRPO trained, made once."""
        run_dir = self.work / "teacher"
        if not run_dir.exists():
            self.train("teacher", {"name": "flow_grpo"})
        return run_dir / "export"


def families() -> list[str]:
    """Name the families that have a tiny pipeline and are installed."""
    return [name for name in plugins.registry(plugins.MODELS).names() if name in BUILDERS]


def algorithms() -> list[str]:
    """Name every algorithm that is registered."""
    return plugins.registry(plugins.ALGORITHMS).names()


def train_cell(model: Model, algorithm: str) -> Cell:
    """Train one cell; whatever happens is in what is returned."""
    start = time.perf_counter()
    try:
        reason = not_applicable(model, algorithm)
        status = Status.OK if reason is None else Status.NOT_APPLICABLE
        if reason is None:
            run_dir = model.train(algorithm, options(model, algorithm))
            check(run_dir, forward=_plugin(algorithm).options().model_type != "diffusion")
    except Exception as error:  # noqa: BLE001 -- a cell's error is its result
        status, reason = Status.ERROR, "".join(traceback.format_exception_only(error)).strip()
    return Cell(
        family=model.family,
        algorithm=algorithm,
        status=status,
        reason=reason or "",
        seconds=time.perf_counter() - start,
    )


def _plugin(algorithm: str) -> plugins.Plugin:
    return plugins.registry(plugins.ALGORITHMS).get(algorithm)


def options(model: Model, algorithm: str) -> dict[str, Any]:
    """Return an algorithm's section of the config."""
    more: dict[str, Any] = dict(OPTIONS.get(algorithm, {}))
    if algorithm == "distillation":
        more["teachers"] = [{"path": str(model.teacher())}]
    return {"name": algorithm, **more}


def not_applicable(model: Model, algorithm: str) -> str | None:
    """Say why the algorithm declares that it cannot train the family, or None."""
    from omni_trainer.config import load_run

    family = plugins.registry(plugins.MODELS).get(model.family)
    facts = ModelFacts.of(
        family.build(DiffusionModelConfig(path=str(model.path))), has_adapter=True
    )
    file = model.work / "asked.yaml"
    file.write_text(yaml.safe_dump(model.config(options(model, algorithm))))
    chosen = load_run(str(file)).config.algorithm_options
    found: str | None = _plugin(algorithm).build(chosen).unsupported(facts)
    return found


def check(run_dir: Path, *, forward: bool) -> None:
    """Check what a run of two steps leaves behind.

    Args:
        run_dir: Of the run.
        forward: It trains on the forward process, where no log-prob is looked at and so no canary sings.

    Raises:
        AssertionError: says what is wrong.
    """
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/grad_norm" in line]
    assert len(steps) == RUN["trainer"]["steps"], f"{len(steps)} steps were logged"
    for line in lines:
        wrong = {name: value for name, value in line.items() if not math.isfinite(value)}
        assert not wrong, f"not finite: {wrong}"
    assert all(line["actor/grad_norm"] > 0.0 for line in steps), "a gradient is zero"
    if forward:
        assert "canary/exact" not in lines[0], "a canary where no log-prob is looked at"
    else:
        assert lines[0]["canary/exact"] == 0.0, f"exact canary {lines[0]['canary/exact']}"
        assert lines[0]["canary/floor"] <= FLOOR, f"floor canary {lines[0]['canary/floor']}"
    assert _moved(run_dir / "export"), "no exported factor B differs from its start, zero"


def _moved(export: Path) -> bool:
    from safetensors.torch import load_file

    tensors = load_file(next(export.glob("*.safetensors")))
    return any(bool(tensor.any()) for name, tensor in tensors.items() if "lora_B" in name)


def train_family(family: str, names: Sequence[str], work: Path) -> list[Cell]:
    """Train a family's cells in this process; its pipeline is written once."""
    from omni_core.log import configure

    configure(level="error")
    register_toys()
    folder = work / family
    folder.mkdir(parents=True)
    model = Model.build(family, folder)
    return [train_cell(model, name) for name in names]


def train_all(
    chosen: Sequence[str], names: Sequence[str], work: Path, *, jobs: int
) -> Iterator[list[Cell]]:
    """Yield each family's cells, *jobs* families at a time."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(train_family, family, names, work) for family in chosen]
        for future in futures:
            yield future.result()


def table(cells: Sequence[Cell]) -> str:
    """Write the matrix as Markdown: algorithms down, families across, reasons below."""
    columns = list(dict.fromkeys(cell.family for cell in cells))
    found = {(cell.algorithm, cell.family): cell for cell in cells}
    reasons = list(dict.fromkeys(cell.reason for cell in cells if cell.reason))

    def text(cell: Cell) -> str:
        return f"{cell.status} ({reasons.index(cell.reason) + 1})" if cell.reason else cell.status

    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in dict.fromkeys(cell.algorithm for cell in cells):
        lines.append(f"| {name} | {' | '.join(text(found[name, each]) for each in columns)} |")
    notes = [f"{number}. {' '.join(each.split())}" for number, each in enumerate(reasons, 1)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def page(cells: Sequence[Cell]) -> str:
    """Write the documentation's page."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "diffusers")
    )
    counts = ", ".join(
        f"{sum(cell.status is status for cell in cells)} {status}" for status in Status
    )
    return f"""# The grid

Every algorithm on every model family. `hatch run grid --write docs/grid.md` trains each cell and writes
this page: two steps of the family's tiny pipeline with random weights, guided, by the real engine and
rollout, on the CPU in float32.

- `ok`: two steps were taken, every metric is finite, no gradient is zero, the exported adapter moved, and
  both canaries hold (replay exactly 0, training micro-batches within {FLOOR:g}). Algorithms on the forward
  process look at no log-prob, and have no canary. The algorithm keeps its suite.
- `n/a`: the algorithm declares that it cannot train the family; the note says why.
- `error`: what the note says.

It says that the parts fit, not that a model gets better: recipes say what was validated.

{table(cells)}

{counts}; {versions}.
"""


def main() -> int:
    """Train what the command line asks for; 1 if a cell or a suite failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", action="append", choices=families(), help="default: every one")
    parser.add_argument("--algorithm", action="append", choices=algorithms(), help="the same")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time (default 2)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page of it, too")
    args = parser.parse_args()
    start = time.perf_counter()
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITE)]
    if subprocess.run(suite, cwd=ROOT, check=False).returncode:
        print("an algorithm does not keep its suite: no cell is ok", file=sys.stderr)
        return 1
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        names = args.algorithm or algorithms()
        for done in train_all(args.family or families(), names, Path(folder), jobs=args.jobs):
            cells += done
            seconds = sum(cell.seconds for cell in done)
            print(f"{done[0].family}: {len(done)} cells in {seconds:.0f} s", file=sys.stderr)
    print(table(cells))
    print(f"\n{len(cells)} cells in {time.perf_counter() - start:.0f} s")
    if args.write is not None:
        args.write.write_text(page(cells))
    return int(any(cell.status is Status.ERROR for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
