"""Toy runs: a whole run in milliseconds, in plain torch."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
import yaml

from omni_core.testing.toys import register_toys, unregister_toys

RUN = {
    "model": {
        "path": "toy",
        "family": "toy",
        "pipeline": {"height": 16, "width": 16},
        "lora": {"rank": 4, "alpha": 8.0},
    },
    "engine": {"name": "toy", "micro_batch_size": 6},
    "optimizer": {"lr": 1e-2},
    "rollout": {
        "name": "toy",
        "samples_per_prompt": 4,
        "batch_size": 6,
        "sampling": {"num_inference_steps": 4, "guidance_scale": 1.0},
    },
    "algorithm": {"name": "flow_grpo", "clip_ratio": 2e-3},
    "reward": {"name": "toy"},
    "data": {"prompts_per_step": 3},
    "evaluation": {
        "samples_per_prompt": 2,
        "sampling": {"num_inference_steps": 4, "guidance_scale": 1.0},
    },
    "trainer": {"steps": 2},
}


@pytest.fixture
def toys():
    register_toys()
    yield
    unregister_toys()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def write_toy_run():
    """Write a whole run into a folder: a YAML file, 7 training prompts, 3 held-out ones."""

    def write(folder: Path) -> str:
        train, heldout = folder / "train.txt", folder / "heldout.txt"
        train.write_text("".join(f"a bright sign number {i}\n" for i in range(7)))
        heldout.write_text("".join(f"a dark wall number {i}\n" for i in range(3)))
        values = {**RUN, "data": {**RUN["data"], "train": str(train), "heldout": str(heldout)}}
        path = folder / "toy.yaml"
        path.write_text(yaml.safe_dump(values))
        return str(path)

    return write


@pytest.fixture
def toy_source(tmp_path, toys, write_toy_run):
    """Path of a YAML file that is a whole run."""
    return write_toy_run(tmp_path)


@pytest.fixture
def train(toy_source, tmp_path):
    """Train a toy run: `train("trainer.steps=4", name="a")` -> its summary."""
    from omni_trainer.config import load_run
    from omni_trainer.run import run_training

    def run(*overrides, name="run", resume=False):
        loaded = load_run(toy_source, overrides)
        return run_training(
            loaded.config, run_dir=tmp_path / name, resume=resume, resolved=loaded.resolved
        )

    return run


class StoppedError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def stopped():
    """`with stopped(3):` lets the process end while the step after 3 trained ones is under way."""
    from omni_trainer.loop import Trainer

    @contextmanager
    def during(step):
        train = Trainer.train

        def stopping(self):
            train(self)
            if self.step == step:
                raise StoppedError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "train", stopping)
            with pytest.raises(StoppedError):
                yield

    return during


@pytest.fixture
def metrics():
    """Read a run's metrics.jsonl, one mapping a line; timings are set aside unless asked for."""

    def read(directory: Path, *, timings: bool = False):
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        return [
            {
                n: v
                for n, v in json.loads(line).items()
                if timings or not n.startswith(("time/", "memory/"))
            }
            for line in lines
        ]

    return read
