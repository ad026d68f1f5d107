"""AdamW in 32 and in 8 bits, and the learning rate over the steps of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from omni_core.engine import CheckpointError
from omni_core.options import DType, LoRAConfig, LRSchedule, OptimizerConfig, OptimizerKind
from omni_engine_fsdp.sharding import local

WIDE = LoRAConfig(rank=128, alpha=128.0)
"""So wide that moments have blocks."""


@pytest.fixture
def eager() -> Iterator[None]:
    """torchao compiles its step, which takes a minute on a CPU."""
    pytest.importorskip("torchao")
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("lora", [WIDE, None], ids=["lora", "full"])
@pytest.mark.usefixtures("eager")
def test_case_28_eight_bit_moments_go_on_bit_for_bit(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path, lora: LoRAConfig | None
) -> None:
    """CASES 28: blocks are saved as they are, in safetensors."""
    optimizer = attrs.evolve(
        ranks.LR,
        kind=OptimizerKind.ADAMW_8BIT,
        schedule=LRSchedule.LINEAR,
        warmup_steps=1,
        total_steps=8,
    )
    batch = ranks.rows([0, 1, 2])
    straight, first, resumed = (
        build_engine(tiny_sd3, lora=lora, optimizer=optimizer) for _ in range(3)
    )
    rates = [straight.train_batch(batch, ranks.loss).metrics["lr"].mean for _ in range(4)]
    assert rates == pytest.approx([optimizer.rate(step) for step in range(4)])
    for _ in range(2):
        first.train_batch(batch, ranks.loss)
    blocks = [
        s["exp_avg"]
        for s in first.optimizer.state.values()
        if hasattr(local(s["exp_avg"]), "codes")
    ]
    assert blocks
    assert {local(moment).codes.dtype for moment in blocks} == {torch.uint8}
    state = json.loads(json.dumps(first.save_checkpoint(tmp_path), allow_nan=False))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors"}
    resumed.load_checkpoint(tmp_path, state)
    for _ in range(2):
        resumed.train_batch(batch, ranks.loss)
    expected = dict(straight.get_per_tensor_param())
    for name, value in resumed.get_per_tensor_param():
        assert torch.equal(value, expected[name]), name


@pytest.mark.usefixtures("eager")
def test_eight_bit_moments_fit_no_other_optimizer_and_no_other_number_of_ranks(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    optimizer = attrs.evolve(ranks.LR, kind=OptimizerKind.ADAMW_8BIT)
    engine = build_engine(tiny_sd3, optimizer=optimizer)
    engine.train_batch(ranks.rows([0]), ranks.loss)
    state = engine.save_checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match="optimizer: checkpoint 'adamw_8bit', this run 'adamw'"
    ):
        build_engine(tiny_sd3, optimizer=ranks.LR).load_checkpoint(tmp_path, state)
    with pytest.raises(CheckpointError, match="saved by 2 ranks, and this run has 1"):
        engine.load_checkpoint(tmp_path, {**state, "world_size": 2})
    with pytest.raises(ValueError, match=r"model\.dtype is float64"):
        build_engine(tiny_sd3, dtype=DType.FLOAT64, optimizer=optimizer)


@pytest.mark.usefixtures("eager")
def test_a_checkpoint_without_this_ranks_moments_changes_nothing(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    optimizer = attrs.evolve(ranks.LR, kind=OptimizerKind.ADAMW_8BIT)
    engine, other = (build_engine(tiny_sd3, optimizer=optimizer) for _ in range(2))
    engine.train_batch(ranks.rows([0]), ranks.loss)
    state = engine.save_checkpoint(tmp_path)
    before = {name: value.clone() for name, value in other.get_per_tensor_param()}

    def refused(reason: str, state: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match=reason):
            other.load_checkpoint(tmp_path, state)
        for name, value in other.get_per_tensor_param():
            assert torch.equal(value, before[name]), name

    steps = {**state["optimizer_steps"], "transformer.more": 1.0}
    refused(
        r"lacks 2 moments, such as transformer\.more\.exp_avg",
        {**state, "optimizer_steps": steps},
    )
    (file,) = (tmp_path / "optimizer_8bit").iterdir()
    file.unlink()
    refused(r"rank-00000\.safetensors cannot be read", state)


def test_eight_bits_without_their_package_say_what_to_install(
    build_engine: Any, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ImportError, match=r"pip install 'omni-engine-fsdp\[8bit\]'"):
        build_engine(tiny_sd3, optimizer=OptimizerConfig(kind=OptimizerKind.ADAMW_8BIT))
