"""Every weight trained: what is kept beside it, and what a checkpoint of it fits."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.engine import CheckpointError
from omni_core.options import DType, EMAConfig
from omni_core.testing.engine_suite import kl_loss
from omni_engine_fsdp import PPODiffusersFSDPEngine, ShardBase
from omni_engine_fsdp.policies import REFERENCE
from tiny_models.sd3 import build_tiny_sd3

KL = kl_loss()


def policy(engine: PPODiffusersFSDPEngine, name: str = "default") -> dict[str, Tensor]:
    return {key: value.clone() for key, value in engine.get_per_tensor_param(adapter=name)}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(v, theirs[n]) for n, v in ours.items())


@pytest.mark.parametrize("sharding", [ShardBase.REPLICATE, ShardBase.SHARD])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_case_24_the_reference_is_the_start_rounded_as_computation_rounds_it(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, dtype: DType, sharding: ShardBase
) -> None:
    """CASES 24: KL is exactly 0 at first and above 0 after a nudge, also with bf16 computation."""
    engine = build_engine(tiny_sd3, lora=None, dtype=dtype, shard_base=sharding, optimizer=ranks.LR)
    batch = ranks.rows([0, 1, 2])
    engine.infer_batch(batch, ranks.loss)
    assert REFERENCE not in engine.copies  # nothing has looked at it
    assert engine.infer_batch(batch, KL).metrics["kl"].high == 0.0
    stored = {p.dtype for p in engine.copies[REFERENCE].parameters["transformer"].values()}
    assert stored == {getattr(torch, dtype.value)}
    assert {p.dtype for p in engine.trained().values()} == {torch.float32}
    engine.train_batch(batch, KL)
    assert engine.infer_batch(batch, KL).metrics["kl"].low > 0.0


def test_case_28_the_average_and_the_reference_go_on_bit_for_bit(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    """CASES 28: 2 + resume + 2 steps are 4, for the trained weights and for their average."""
    optimizer = attrs.evolve(ranks.LR, ema=EMAConfig(decay=0.9))

    def build() -> PPODiffusersFSDPEngine:
        built: PPODiffusersFSDPEngine = build_engine(tiny_sd3, lora=None, optimizer=optimizer)
        return built

    batch = ranks.rows([0, 1, 2])
    straight, first, resumed = build(), build(), build()
    for _ in range(4):
        straight.train_batch(batch, KL)
    for _ in range(2):
        first.train_batch(batch, KL)
    state = json.loads(json.dumps(first.save_checkpoint(tmp_path), allow_nan=False))
    resumed.load_checkpoint(tmp_path, state)
    assert resumed.ema_updates == 2
    for _ in range(2):
        resumed.train_batch(batch, KL)
    for name in ("default", "ema"):
        assert same(policy(resumed, name), policy(straight, name))
    assert resumed.reference_hash == straight.reference_hash


def test_a_reference_of_other_weights_is_refused(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    """All weights come from the checkpoint; the reference comes from model.path."""
    engine = build_engine(tiny_sd3, lora=None, optimizer=ranks.LR)
    engine.train_batch(ranks.rows([0]), KL)
    state = engine.save_checkpoint(tmp_path / "saved")
    base = build_tiny_sd3(tmp_path / "other", seed=1)
    late = build_engine(base, lora=None, optimizer=ranks.LR)
    late.load_checkpoint(tmp_path / "saved", state)
    with pytest.raises(CheckpointError, match="training began with other weights"):
        late.infer_batch(ranks.rows([0]), KL)
    early = build_engine(base, lora=None, optimizer=ranks.LR)
    early.infer_batch(ranks.rows([0]), KL)
    before = policy(early)
    with pytest.raises(CheckpointError, match="training began with other weights"):
        early.load_checkpoint(tmp_path / "saved", state)
    assert same(policy(early), before)


def test_a_checkpoint_of_a_lora_or_of_other_policies_is_refused(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    full = build_engine(tiny_sd3, lora=None, optimizer=ranks.LR)
    small = build_engine(tiny_sd3, optimizer=ranks.LR)
    followed = build_engine(tiny_sd3, lora=None, optimizer=ranks.LR, adapters=("old",))
    whole = full.save_checkpoint(tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"adapter: checkpoint None, this run \{'rank': 2"):
        small.load_checkpoint(tmp_path / "full", whole)
    with pytest.raises(CheckpointError, match=r"this run None\n"):
        full.load_checkpoint(tmp_path, small.save_checkpoint(tmp_path / "lora"))
    with pytest.raises(
        CheckpointError, match=r"policies: only in the checkpoint \[\], only in this run \['old'\]"
    ):
        followed.load_checkpoint(tmp_path / "full", whole)


def test_an_average_of_an_adapter_counts_its_updates(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    """ema <- d ema + (1 - d) new with d = min(decay, (1 + n) / (10 + n)), every second step."""
    ema = EMAConfig(decay=0.15, every=2)
    assert [ema.decay_after(n) for n in (0, 1)] == [0.1, 0.15]
    engine = build_engine(tiny_sd3, optimizer=attrs.evolve(ranks.LR, ema=ema))
    expected = {name: value.double() for name, value in policy(engine).items()}
    for decay in (0.1, 0.15):
        for _ in range(2):
            engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
        for name, value in policy(engine).items():
            expected[name] = decay * expected[name] + (1.0 - decay) * value.double()
    assert engine.ema_updates == 2
    for name, value in policy(engine, "ema").items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-7)
