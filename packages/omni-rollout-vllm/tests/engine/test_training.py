"""Whole runs that sample in vLLM-Omni: the rollout's name is all that changes in a recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from omni_trainer.config import load_run
from omni_trainer.run import run_training

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    yield
    structlog.contextvars.clear_contextvars()


def train(run_dir: Path, recipe: str, *overrides: str, resume: bool = False) -> Any:
    loaded = load_run(recipe, overrides)
    return run_training(loaded.config, run_dir=run_dir, resume=resume, resolved=loaded.resolved)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def reproducible(line: dict[str, float]) -> dict[str, float]:
    """All but timings, what follows from them, and memory."""
    timed = ("time/", "memory/", "rollout/push_", "rollout/images_per_second")
    return {name: value for name, value in line.items() if not name.startswith(timed)}


def test_case_7_a_recipe_samples_in_vllm_omni_by_a_name_alone(tmp_path: Path) -> None:
    summary = train(tmp_path / "run", "smoke", "rollout.name=vllm_omni", "checkpoint.every=1")
    start, first, second = metrics(tmp_path / "run")

    assert summary.after is not None
    assert len(summary.after.prompts) == start["heldout/prompts"] == 4
    assert 0.0 < first["canary/exact"] <= 1e-5
    assert first["canary/floor"] <= 1e-5
    assert [line["actor/weight_version"] for line in (first, second)] == [1.0, 2.0]
    for line in (first, second):
        assert line["actor/ratio"] == pytest.approx(1.0, abs=1e-3)
        assert line["rollout/pushed_bytes"] > 10_000
        assert line["rollout/push_pause_seconds"] >= 0.0
        assert line["rollout/push_send_seconds"] > 0.0
        assert line["rollout/push_verify_seconds"] > 0.0
        assert line["rollout/images_per_second"] > 0.0
        assert line["rollout/restarts"] == 0.0
        assert 0.0 < line["time/push_share"] < 1.0
    assert (tmp_path / "run" / "export").is_dir()

    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    shutil.rmtree(max((again / "checkpoints").iterdir()))
    train(again, "smoke", "rollout.name=vllm_omni", "checkpoint.every=1", resume=True)
    assert [reproducible(line) for line in metrics(again)] == [
        reproducible(line) for line in (start, first, second)
    ]


def test_two_servers_sample_one_policy_and_evaluate_another(tmp_path: Path) -> None:
    """DiffusionNFT samples with `old` and evaluates `default`, in engines of two Ray actors."""
    train(
        tmp_path / "run",
        "tiny_diffusion_nft",
        "rollout.name=vllm_omni",
        "rollout.servers=2",
        "rollout.samples_per_prompt=4",
        "rollout.batch_size=4",
        "data.prompts_per_step=4",
        "evaluation.max_prompts=2",
        "evaluation.samples_per_prompt=2",
        "trainer.steps=1",
        "trainer.backend=ray",
        "trainer.cpus_per_server=0",
        "trainer.start_timeout=600",
    )
    start, first = metrics(tmp_path / "run")

    assert start["heldout/prompts"] == first["heldout/prompts"] == 2
    assert first["actor/weight_version"] == 1.0
    assert first["rollout/pushed_bytes"] > 10_000
    assert first["rollout/images_per_second"] > 0.0
