from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_core.options import DType
from omni_engine_fsdp import PPODiffusersFSDPEngine, ShardBase


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours)
    return math.sqrt(apart / sum(float(v.double().square().sum()) for v in theirs.values()))


def gradient(build_engine: Any, ranks: ModuleType, path: Path, **options: Any) -> dict[str, Tensor]:
    engine = build_engine(path, optimizer=ranks.LR, **options)
    ranks.warm(engine)
    found: dict[str, Tensor] = ranks.gradients(engine, ranks.rows([0, 1, 2]))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_case_8_micro_batches_agree_to_rounding_in_float64(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, size: int
) -> None:
    """CASES 8: within 1e-12 of the global norm of the unsplit batch's gradient."""
    options = {"dtype": DType.FLOAT64}
    whole = gradient(build_engine, ranks, tiny_sd3, micro_batch_size=100, **options)
    cut = gradient(build_engine, ranks, tiny_sd3, micro_batch_size=size, **options)
    assert next(iter(whole.values())).dtype is torch.float64
    assert distance(cut, whole) <= 1e-12


def test_gradient_checkpointing_changes_no_gradient(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    plain = gradient(build_engine, ranks, tiny_sd3)
    again = gradient(build_engine, ranks, tiny_sd3, gradient_checkpointing=True)
    assert distance(again, plain) <= 1e-6


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("sharding", [ShardBase.REPLICATE, ShardBase.SHARD])
def test_sharding_changes_no_gradient(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, sharding: ShardBase, free: bool
) -> None:
    plain = gradient(build_engine, ranks, tiny_sd3)
    found = gradient(build_engine, ranks, tiny_sd3, shard_base=sharding, reshard_after_forward=free)
    assert distance(found, plain) <= 1e-6


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_case_1_timesteps_reach_the_module_in_float32(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, dtype: DType
) -> None:
    """CASES 1: FSDP2 casts parameters and not inputs; 978.26 in bf16 would be 976."""
    engine: PPODiffusersFSDPEngine = build_engine(tiny_sd3, dtype=dtype)
    seen: dict[str, Tensor] = {}

    def look(module: Any, args: Any, kwargs: dict[str, Tensor]) -> None:
        seen.update(kwargs)

    expert: Any = engine.denoiser.experts["transformer"]
    inner: list[Tensor] = []
    expert.time_text_embed.time_proj.register_forward_pre_hook(
        lambda module, args: inner.append(args[0])
    )
    expert.register_forward_pre_hook(look, with_kwargs=True)
    engine.infer_batch(ranks.rows([0, 1, 2]))
    expected = ranks.SCHEDULE.timesteps
    for timestep in (seen["timestep"], *inner):
        assert timestep.dtype is torch.float32
        assert all(value in expected for value in timestep)
    assert seen["hidden_states"].dtype is getattr(torch, dtype.value)
    assert seen["encoder_hidden_states"].dtype is getattr(torch, dtype.value)


def test_bfloat16_gradients_point_where_float32_gradients_point(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    full = gradient(build_engine, ranks, tiny_sd3)
    half = gradient(build_engine, ranks, tiny_sd3, dtype=DType.BFLOAT16)
    assert {value.dtype for value in half.values()} == {torch.float32}
    assert distance(half, full) <= 0.05
