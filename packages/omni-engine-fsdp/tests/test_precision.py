from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_core.options import DType, LoRAConfig
from omni_core.testing.engine_suite import kl_loss
from omni_engine_fsdp import (
    EngineRolloutConfig,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
    RolloutPlacement,
    ShardBase,
)
from omni_engine_fsdp.options import Offload, ShardTrained
from omni_engine_fsdp.precision import check_masters, mixed_precision

LORAS = [LoRAConfig(rank=2, alpha=8.0), None]


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours)
    return math.sqrt(apart / sum(float(v.double().square().sum()) for v in theirs.values()))


def gradient(build_engine: Any, ranks: ModuleType, path: Path, **options: Any) -> dict[str, Tensor]:
    engine = build_engine(path, optimizer=ranks.LR, **options)
    ranks.warm(engine)
    found: dict[str, Tensor] = ranks.gradients(engine, ranks.rows([0, 1, 2]))
    return found


@pytest.mark.parametrize("lora", LORAS, ids=["lora", "full"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_case_8_micro_batches_agree_to_rounding_in_float64(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, size: int, lora: LoRAConfig | None
) -> None:
    """CASES 8: within 1e-12 of the global norm of the unsplit batch's gradient."""
    options = {"dtype": DType.FLOAT64, "lora": lora}
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


@pytest.mark.parametrize("lora", LORAS, ids=["lora", "full"])
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("sharding", [ShardBase.REPLICATE, ShardBase.SHARD])
def test_sharding_changes_no_gradient(
    build_engine: Any,
    ranks: ModuleType,
    tiny_sd3: Path,
    sharding: ShardBase,
    free: bool,
    lora: LoRAConfig | None,
) -> None:
    plain = gradient(build_engine, ranks, tiny_sd3, lora=lora)
    found = gradient(
        build_engine,
        ranks,
        tiny_sd3,
        lora=lora,
        shard_base=sharding,
        reshard_after_forward=free,
        gradient_checkpointing=not free,
    )
    assert distance(found, plain) <= 1e-6


@pytest.mark.parametrize("offload", [Offload.OPTIMIZER, Offload.ALL])
@pytest.mark.parametrize("lora", LORAS, ids=["lora", "full"])
def test_offloading_changes_no_weight(
    build_engine: Any,
    ranks: ModuleType,
    tiny_sd3: Path,
    lora: LoRAConfig | None,
    offload: Offload,
) -> None:
    """Also when everything is moved away between two steps, by hand."""
    found = []
    for where in (Offload.NONE, offload):
        engine = build_engine(
            tiny_sd3, lora=lora, offload=where, shard_base=ShardBase.SHARD, optimizer=ranks.LR
        )
        for _ in range(2):
            engine.train_batch(ranks.rows([0, 1, 2]), kl_loss())
            engine.to("cpu")
            engine.to("device")
        found.append(dict(engine.get_per_tensor_param()))
    assert distance(found[1], found[0]) == 0.0


def test_gradients_may_be_averaged_in_another_format(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    """They are kept in the masters' format all the same."""
    assert mixed_precision(DType.BFLOAT16).reduce_dtype is torch.float32
    assert mixed_precision(DType.BFLOAT16, DType.BFLOAT16).reduce_dtype is torch.bfloat16
    options = {"lora": None, "dtype": DType.BFLOAT16}
    full = gradient(build_engine, ranks, tiny_sd3, **options)
    half = gradient(build_engine, ranks, tiny_sd3, reduce_dtype=DType.BFLOAT16, **options)
    assert {value.dtype for value in (full | half).values()} == {torch.float32}
    assert distance(half, full) <= 0.01


@pytest.mark.parametrize(
    ("options", "name", "member"),
    [
        (FSDPEngineConfig, "shard_base", ShardBase.SHARD),
        (FSDPEngineConfig, "shard_trained", ShardTrained.REPLICATE),
        (FSDPEngineConfig, "reduce_dtype", DType.FLOAT64),
        (FSDPEngineConfig, "offload", Offload.ALL),
        (EngineRolloutConfig, "placement", RolloutPlacement.REPLICA),
    ],
)
def test_a_choice_may_be_given_as_its_name(options: Any, name: str, member: Any) -> None:
    assert getattr(options(**{name: member.value}), name) is member
    with pytest.raises(ValueError, match="typo"):
        options(**{name: "typo"})


def test_masters_of_two_formats_are_named() -> None:
    weights = {
        "x.a": torch.zeros(1),
        "x.b": torch.zeros(1, dtype=torch.bfloat16),
        "x.c": torch.zeros(1, dtype=torch.float64),
    }
    with pytest.raises(
        ValueError, match=r"kept in torch\.float32 beside model\.dtype bfloat16"
    ) as caught:
        check_masters(weights, DType.BFLOAT16)
    assert "1 are torch.bfloat16 (x.b); 1 are torch.float64 (x.c)" in str(caught.value)
    check_masters({"x.a": torch.zeros(1)}, DType.BFLOAT16)


@pytest.mark.parametrize("lora", LORAS, ids=["lora", "full"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_case_1_timesteps_reach_the_module_in_float32(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, dtype: DType, lora: LoRAConfig | None
) -> None:
    """CASES 1: FSDP2 casts parameters and not inputs; 978.26 in bf16 would be 976."""
    engine: PPODiffusersFSDPEngine = build_engine(tiny_sd3, dtype=dtype, lora=lora)
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


@pytest.mark.parametrize("lora", LORAS, ids=["lora", "full"])
def test_bfloat16_gradients_point_where_float32_gradients_point(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, lora: LoRAConfig | None
) -> None:
    full = gradient(build_engine, ranks, tiny_sd3, lora=lora)
    half = gradient(build_engine, ranks, tiny_sd3, lora=lora, dtype=DType.BFLOAT16)
    assert {value.dtype for value in half.values()} == {torch.float32}
    assert distance(half, full) <= 0.05
