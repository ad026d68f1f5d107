"""AdamW in 32 and in 8 bits, and the learning rate over the steps of a run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_core.engine import CheckpointError
from omni_core.options import DType, LoRAConfig, LRSchedule, OptimizerConfig, OptimizerKind
from omni_engine_fsdp import eight_bit
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
def test_eight_bit_moments_fit_no_other_optimizer(
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

    (file,) = (tmp_path / "optimizer_8bit").iterdir()
    tensors = load_file(file)
    name = next(iter(state["optimizer_steps"]))
    spans = {lost: (0, 1) for lost in state["optimizer_steps"] if lost != name}
    save_file(tensors, file, metadata={"spans": json.dumps(spans)})
    refused(rf"lacks moments of {re.escape(name)}, from value 0 to \d+", state)
    refused(r"rank-00001\.safetensors cannot be read", {**state, "world_size": 2})
    save_file(tensors, file)
    refused(r"rank-00000\.safetensors cannot be read", state)
    file.unlink()
    refused(r"rank-00000\.safetensors cannot be read", state)


@pytest.mark.usefixtures("eager")
def test_eight_bit_moments_are_dealt_to_another_number_of_ranks(
    build_engine: Any, ranks: ModuleType, run_ranks: Any, tiny_sd3: Path, tmp_path: Path
) -> None:
    """Two saved, one loaded, and back. At rank 256 both have blocks; at 128 one has, and rounds to them."""
    widths = (128, 256)
    ones, loaders = {}, {}
    for width in widths:
        lora = LoRAConfig(rank=width, alpha=128.0)
        optimizer = attrs.evolve(ranks.LR, kind=OptimizerKind.ADAMW_8BIT)
        saver, loader = (build_engine(tiny_sd3, lora=lora, optimizer=optimizer) for _ in range(2))
        saver.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
        state = saver.save_checkpoint(tmp_path / f"one-{width}")
        (tmp_path / f"one-{width}.json").write_text(json.dumps(state))
        ones[width], loaders[width] = ranks.moments(saver), loader
    run_ranks("eight_bit", tiny_sd3, tmp_path, *widths, seconds=110)

    for width, loader in loaders.items():
        back = load_file(tmp_path / f"back-{width}.safetensors")
        assert back.keys() == ones[width].keys()
        assert all(torch.equal(back[name], value) for name, value in ones[width].items())
        state = json.loads((tmp_path / f"two-{width}.json").read_text())
        loader.load_checkpoint(tmp_path / f"two-{width}", state)
        saved = load_file(tmp_path / f"two-{width}.safetensors")
        for name, parameter in loader.trained().items():
            for moment in ("exp_avg", "exp_avg_sq"):
                found = ranks.dense(loader.optimizer.state[parameter][moment])
                rounded = loader.optimizer._new_buffer(parameter, moment == "exp_avg")
                local(rounded).copy_(saved[f"{name}.{moment}"])
                wanted = saved[f"{name}.{moment}"] if width == 256 else ranks.dense(rounded)
                assert torch.equal(found, wanted), name
        loader.train_batch(ranks.rows([0, 1, 2]), ranks.loss)


@pytest.mark.usefixtures("eager")
def test_blocks_that_begin_elsewhere_are_rounded_once_more() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    values = torch.randn(4096 + 256, generator=torch.Generator().manual_seed(2))
    whole = OptimState8bit.zeros(values.shape)
    whole.copy_(values)
    saved = eight_bit._Saved(eight_bit._Span(0, len(values)), eight_bit._parts(whole))
    for start in (0, 256, 128):
        own, wanted = (OptimState8bit.zeros((64, 64)) for _ in range(2))
        eight_bit._fill(own, eight_bit._Span(start, start + 4096), [saved], whole.qmap)
        kept = whole.dequantize()[start : start + 4096].view(64, 64)
        if start == 128:
            wanted.copy_(kept)
            assert torch.equal(own.dequantize(), wanted.dequantize())
            assert not torch.equal(own.dequantize(), kept)
        else:
            assert torch.equal(own.dequantize(), kept)


def test_eight_bits_without_their_package_say_what_to_install(
    build_engine: Any, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ImportError, match=r"pip install 'omni-engine-fsdp\[8bit\]'"):
        build_engine(tiny_sd3, optimizer=OptimizerConfig(kind=OptimizerKind.ADAMW_8BIT))
