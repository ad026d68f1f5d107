"""Real engines, started once for each family, and what their samples are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from omni_rollout_vllm.vllm_hooks import torchvision_importable

torchvision_importable()  # before anything imports diffusers

from omni_core.options import (  # noqa: E402
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DType,
    LoRAConfig,
    OptimizerConfig,
)
from omni_core.rollout import RolloutState, WeightUpdate  # noqa: E402
from omni_engine_fsdp import FSDPEngineConfig, PPODiffusersFSDPEngine  # noqa: E402
from omni_rollout_vllm.options import TimeLimits, VllmOmniRolloutConfig  # noqa: E402
from omni_rollout_vllm.rollout import VllmOmniRollout  # noqa: E402
from tiny_models.qwen_image import build_tiny_qwen_image  # noqa: E402
from tiny_models.sd3 import build_tiny_sd3  # noqa: E402

LIMITS = TimeLimits(start=300.0, batch=200.0, update=200.0, control=200.0)
RANK, ALPHA = 4, 8.0


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random StableDiffusion3Pipeline: at most 32 x 32 px, scheduler shift 3, float32."""
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny_sd3")


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random QwenImagePipeline, float32."""
    return build_tiny_qwen_image(tmp_path_factory.mktemp("models") / "tiny_qwen")


def sd3_model(path: Path, **changes: Any) -> DiffusionModelConfig:
    """The tiny SD3 as it is trained here: 16 x 16 px, 16 tokens."""
    pipeline = DiffusionPipelineConfig(height=16, width=16, max_sequence_length=16)
    lora = LoRAConfig(rank=RANK, alpha=ALPHA)
    return attrs.evolve(
        DiffusionModelConfig(path=str(path), pipeline=pipeline, lora=lora), **changes
    )


def make_engine(model: DiffusionModelConfig) -> PPODiffusersFSDPEngine:
    """A training engine whose adapter is not at its start: B is not zero."""
    engine = PPODiffusersFSDPEngine(
        model, FSDPEngineConfig(micro_batch_size=4, device="cpu"), OptimizerConfig(), None
    )
    engine.initialize()
    if model.lora is not None:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameters in engine.adapter_parameters("default").values():
                for parameter in parameters.values():
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    local.normal_(0.0, 0.2, generator=generator)
    return engine


@pytest.fixture(scope="session")
def engine(tiny_sd3: Path) -> Iterator[PPODiffusersFSDPEngine]:
    """The training engine of the tiny SD3."""
    yield make_engine(sd3_model(tiny_sd3))
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def half_engine(engine: PPODiffusersFSDPEngine, tiny_sd3: Path) -> PPODiffusersFSDPEngine:
    """The same in bfloat16, in the process group of the other."""
    del engine
    return make_engine(sd3_model(tiny_sd3, dtype=DType.BFLOAT16))


REPORTED: list[str] = []


@pytest.fixture
def report() -> Callable[[str], None]:
    """Take a line that is printed after the tests."""
    return REPORTED.append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests measured."""
    if REPORTED:
        terminalreporter.section("measured")
        for line in REPORTED:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def adapter(engine: PPODiffusersFSDPEngine) -> dict[str, Tensor]:
    """The engine's adapter, as a trainer pushes it."""
    return {name: value.clone() for name, value in engine.get_per_tensor_param(adapter="default")}


def make_options(**changes: Any) -> VllmOmniRolloutConfig:
    """Small batches, short limits."""
    return attrs.evolve(VllmOmniRolloutConfig(batch_size=4, limits=LIMITS), **changes)


def push_weights(
    rollout: VllmOmniRollout,
    tensors: Mapping[str, Tensor],
    *,
    adapter: str | None = "default",
    version: int | None = None,
) -> None:
    """Push as a trainer does; None is the next version."""
    rollout.pause()
    rollout.update(
        WeightUpdate(
            version=rollout.weight_version + 1 if version is None else version,
            tensors=tensors,
            adapter=adapter,
            alpha_over_rank=None if adapter is None else ALPHA / RANK,
        )
    )
    rollout.resume()


@pytest.fixture(scope="session")
def options() -> Callable[..., VllmOmniRolloutConfig]:
    """See `make_options`."""
    return make_options


@pytest.fixture(scope="session")
def push() -> Callable[..., None]:
    """See `push_weights`."""
    return push_weights


@pytest.fixture(scope="session")
def sd3_rollout(engine: PPODiffusersFSDPEngine) -> Iterator[VllmOmniRollout]:
    """One engine for all tests; use `ready`."""
    made = VllmOmniRollout(make_options(), engine=engine)
    yield made
    made.close()


@pytest.fixture
def ready(sd3_rollout: VllmOmniRollout, adapter: dict[str, Tensor]) -> VllmOmniRollout:
    """READY, with the training engine's adapter, whatever the test before did."""
    sd3_rollout.wake()
    push_weights(sd3_rollout, adapter)
    assert sd3_rollout.state is RolloutState.READY
    return sd3_rollout


@pytest.fixture(scope="session")
def qwen_engine(engine: PPODiffusersFSDPEngine, tiny_qwen: Path) -> PPODiffusersFSDPEngine:
    """The training engine of the tiny Qwen-Image, of every weight, in the process group of the other."""
    del engine
    pipeline = DiffusionPipelineConfig(height=16, width=16, max_sequence_length=512)
    return make_engine(DiffusionModelConfig(path=str(tiny_qwen), pipeline=pipeline, lora=None))
