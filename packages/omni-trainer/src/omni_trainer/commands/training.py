"""`omni train | resume | eval | export`: a run from the command line, and what is said about it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from omni_trainer.commands.failures import FAILED, report
from omni_trainer.commands.terminal import print_table
from omni_trainer.config import load_run
from omni_trainer.launched import is_follower, launched_ranks
from omni_trainer.stopping import told

if TYPE_CHECKING:
    from omni_trainer.evaluation import Evaluation
    from omni_trainer.summary import RunSummary

OK = 0
P = ParamSpec("P")


def _driven(command: Callable[P, int]) -> Callable[P, int]:
    """Where a launcher such as torchrun started several processes, the first runs a command for all."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        if launched_ranks() == 1:
            return command(*args, **kwargs)
        from omni_trainer.launched.follow import driving, follow

        if is_follower():
            return follow()
        with driving():
            return command(*args, **kwargs)

    return run


@_driven
def train(source: str, overrides: Sequence[str]) -> int:
    """Train a recipe or a file in a directory of its own."""
    loaded = load_run(source, overrides)
    from omni_trainer.run import run_training
    from omni_trainer.run_directory import new_run_path

    run_dir = new_run_path(loaded.config, source)
    print(f"run {run_dir}", flush=True)
    return _watched(
        run_dir, lambda: run_training(loaded.config, run_dir=run_dir, resolved=loaded.resolved)
    )


@_driven
def resume(run: str) -> int:
    """Go on with a run; one that is finished does nothing and says so."""
    from omni_trainer.run import run_training
    from omni_trainer.run_directory import RunDirectory

    run_dir = Path(run)
    config = RunDirectory.open(run_dir).config().config
    return _watched(run_dir, lambda: run_training(config, run_dir=run_dir, resume=True))


@_driven
def evaluate(run: str, *, step: int | None) -> int:
    """Score a checkpoint on the held-out prompts; the run stays as it is."""
    from omni_trainer.run import evaluate_run

    found = evaluate_run(Path(run), step=step)
    print(f"held-out prompts, {_steps(found.step)} of {run}")
    print_table(["score", "mean"], [(n, f"{v:.4g}") for n, v in found.metrics().items()])
    return OK


@_driven
def export(
    run: str, *, step: int | None, output: str | None, merged: bool, policy: str | None
) -> int:
    """Write a checkpoint's adapter, or a whole pipeline, and say how it is loaded."""
    from omni_trainer.run import export_run

    target = None if output is None else Path(output)
    path = export_run(Path(run), step=step, output=target, merged=merged, policy=policy)
    print(f"{path}\nload it: {_how_to_load(path)}")
    return OK


def _how_to_load(path: Path) -> str:
    if (path / "model_index.json").is_file():
        return f'DiffusionPipeline.from_pretrained("{path}")'
    return f'pipeline.load_lora_weights("{path.parent}")'


def _watched(run_dir: Path, run: Callable[[], RunSummary]) -> int:
    """Run, and say what came of it: also when it was interrupted or failed."""
    try:
        summary = run()
    except KeyboardInterrupt as exc:
        said, code = told(exc)
        _say(f"{said}; {where_it_is(run_dir)}")
        return code
    except Exception as exc:  # noqa: BLE001 -- told here, where the run's directory is known
        code = report(exc)
        if code == FAILED:
            _say(where_it_is(run_dir))
        return code
    _tell(summary)
    return OK


def where_it_is(run_dir: Path) -> str:
    """Say where a run is that did not come to its end, and what `omni resume` would do."""
    from omni_trainer.checkpoints import Checkpoints
    from omni_trainer.run_directory import RunDirectory

    if not RunDirectory(run_dir).exists():
        return f"nothing was written to {run_dir} yet"
    newest = Checkpoints(run_dir / "checkpoints", keep=1).latest()
    if newest is None:
        then = f"it has no checkpoint yet: `omni resume {run_dir}` starts it from the beginning"
    else:
        then = f"`omni resume {run_dir}` goes on after {_steps(newest.step)}"
    return f"the run is in {run_dir}; {then}; `omni doctor {run_dir}` says what it shows"


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _tell(summary: RunSummary) -> None:
    """Print what a run came to and where it is."""
    if summary.finished_before:
        print(f"{summary.run_dir} was finished already, after {_steps(summary.steps)}")
    else:
        print(f"trained {_steps(summary.trained)} in {summary.seconds:.0f} s")
    for name, found in (("before", summary.before), ("after", summary.after)):
        if found is not None:
            print(f"held-out {name}: {_scores(found)}")
    if summary.gain is not None:
        print(f"gain in reward: {summary.gain} (95 %, over prompts)")
    files = {"plot": summary.plot, "pictures": summary.before_after, "LoRA": summary.export}
    for name, path in files.items():
        if path is not None:
            print(f"{name}: {path}")
    print(f"a page of it all: `omni report {summary.run_dir}`")


def _scores(found: Evaluation) -> str:
    metrics = found.metrics()
    return ", ".join(f"{n.removeprefix('heldout/')} {v:.3g}" for n, v in metrics.items())


def _say(line: str) -> None:
    print(line, file=sys.stderr)
