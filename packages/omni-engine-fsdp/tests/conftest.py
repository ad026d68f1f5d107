"""Fixtures of the engine's tests: a tiny pipeline on disk, and scripts run on several ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

from omni_core.options import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DType,
    LoRAConfig,
    OptimizerConfig,
)
from omni_engine_fsdp import FSDPEngineConfig, PPODiffusersFSDPEngine
from tiny_models.sd3 import build_tiny_sd3


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random StableDiffusion3Pipeline: at most 32 x 32 px, scheduler shift 3, float32."""
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny_sd3")


class BuildEngine(Protocol):
    """Builds and initializes an engine on the CPU, pictures 16 x 16 px, 8 text tokens."""

    def __call__(
        self,
        path: Path,
        *,
        lora: LoRAConfig | None = ...,
        dtype: DType = ...,
        optimizer: OptimizerConfig | None = ...,
        adapters: tuple[str, ...] = ...,
        kind: type[Any] = ...,
        **engine: Any,
    ) -> Any: ...


@pytest.fixture(scope="session")
def build_engine() -> BuildEngine:
    """See `BuildEngine`; `kind` is the class, `engine` are fields of FSDPEngineConfig."""

    def build(
        path: Path,
        *,
        lora: LoRAConfig | None = LoRAConfig(rank=2, alpha=8.0),  # noqa: B008 -- frozen
        dtype: DType = DType.FLOAT32,
        optimizer: OptimizerConfig | None = None,
        adapters: tuple[str, ...] = (),
        kind: type[Any] = PPODiffusersFSDPEngine,
        **engine: Any,
    ) -> Any:
        pipeline = DiffusionPipelineConfig(height=16, width=16, max_sequence_length=8)
        model = DiffusionModelConfig(path=str(path), dtype=dtype, lora=lora, pipeline=pipeline)
        config = FSDPEngineConfig(device="cpu", **engine)
        built = kind(model, config, optimizer, CheckpointConfig())
        for name in adapters:
            built.add_adapter(name)
        built.initialize()
        return built

    return build


RunRanks = Callable[..., list[str]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """Run a script of tests/rank_scripts on several processes over gloo.

    `run_ranks(name, *args, ranks=2, seconds=60)` gives the last line that every rank printed; a
    rank that fails or is late fails the test with what it wrote.
    """

    def run(name: str, *args: object, ranks: int = 2, seconds: float = 60.0) -> list[str]:
        script = Path(__file__).parent / "rank_scripts" / f"{name}.py"
        store = tmp_path / f"store-{time.monotonic_ns()}"
        logs = [tmp_path / f"{store.name}-{rank}.log" for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "STORE": str(store),
                "OMP_NUM_THREADS": "1",
            }
            with log.open("w") as errors:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script), *map(str, args)],
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )
        until = time.monotonic() + seconds
        outputs, failed = [], []
        try:
            for rank, process in enumerate(processes):
                try:
                    output, _ = process.communicate(timeout=max(until - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    failed.append(f"rank {rank} was not done after {seconds} s")
                    continue
                outputs.append((output.splitlines() or [""])[-1])
                if process.returncode:
                    failed.append(f"rank {rank} ended with {process.returncode}: {output[-500:]}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            written = [f"rank {rank}:\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs)]
            pytest.fail("\n".join([*failed, *written]))
        return outputs

    return run


@pytest.fixture(scope="session")
def ranks() -> ModuleType:
    """The functions of ranks.py, which the tests of several ranks run in each of them."""
    return _load(Path(__file__).with_name("ranks.py"), "engine_ranks")
