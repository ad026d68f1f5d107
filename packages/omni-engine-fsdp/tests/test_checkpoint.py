from __future__ import annotations

import errno
import json
import pickle  # noqa: TID251 -- made to raise
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from omni_core.engine import CheckpointError
from omni_core.options import DType, LoRAConfig
from omni_engine_fsdp import PPODiffusersFSDPEngine
from tiny_models.sd3 import build_tiny_sd3


def build(build_engine: Any, ranks: ModuleType, path: Path, **options: Any) -> Any:
    return build_engine(path, optimizer=ranks.LR, **options)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """What a driver keeps of it."""
    found: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    return found


def adapter(engine: PPODiffusersFSDPEngine, name: str = "default") -> dict[str, Tensor]:
    return {key: value.clone() for key, value in engine.get_per_tensor_param(adapter=name)}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(v, theirs[n]) for n, v in ours.items())


def test_case_28_no_pickle_is_read(
    build_engine: Any,
    ranks: ModuleType,
    tiny_sd3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CASES 28 with pickle and torch.load raising: 2 + resume + 2 steps are 4, bit for bit."""
    batches = [ranks.rows([step % 3, (step + 1) % 3]) for step in range(4)]
    straight = build(build_engine, ranks, tiny_sd3)
    for batch in batches:
        straight.train_batch(batch, ranks.loss)
    first = build(build_engine, ranks, tiny_sd3)
    for batch in batches[:2]:
        first.train_batch(batch, ranks.loss)
    state = plain(first.save_checkpoint(tmp_path))
    resumed = build(build_engine, ranks, tiny_sd3, seed=1)
    assert not same(adapter(resumed), adapter(first))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle was read")

    with monkeypatch.context() as patch:
        patch.setattr(pickle, "load", refuse)
        patch.setattr(pickle, "loads", refuse)
        patch.setattr(pickle, "Unpickler", refuse)
        patch.setattr(torch, "load", refuse)
        resumed.load_checkpoint(tmp_path, state)
    assert resumed.weight_version == 2
    for batch in batches[2:]:
        resumed.train_batch(batch, ranks.loss)
    assert same(adapter(resumed), adapter(straight))
    moments = {name: straight.optimizer.state[p] for name, p in straight.trained().items()}
    for name, parameter in resumed.trained().items():
        for key, value in resumed.optimizer.state[parameter].items():
            assert torch.equal(ranks.whole(value), ranks.whole(moments[name][key])), (name, key)


def test_options_of_the_optimizer_are_those_of_this_run_from_its_first_step(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    first = build(build_engine, ranks, tiny_sd3)
    first.train_batch(ranks.rows([0]), ranks.loss)
    state = plain(first.save_checkpoint(tmp_path))
    other = attrs.evolve(ranks.LR, lr=ranks.LR.lr / 2, weight_decay=0.25, eps=1e-5)
    resumed = build_engine(tiny_sd3, optimizer=other)
    resumed.load_checkpoint(tmp_path, state)

    (group,) = resumed.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["eps"]) == (other.rate(1), 0.25, 1e-5)
    assert group["betas"] == other.betas


def test_a_disk_that_is_full_is_a_checkpoint_error(
    build_engine: Any,
    ranks: ModuleType,
    tiny_sd3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build(build_engine, ranks, tiny_sd3)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", full)
    # DCP's own exception is no Exception, and would pass every handler.
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left on device"):
        engine.save_checkpoint(tmp_path)


def test_only_safetensors_are_written_and_no_base(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    engine = build(build_engine, ranks, tiny_sd3, adapters=("old",))
    engine.train_batch(ranks.rows([0]), ranks.loss)
    engine.save_checkpoint(tmp_path)
    files = list(tmp_path.rglob("*"))
    assert {file.suffix for file in files} == {".safetensors"}
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    weights = {name for name in names if name.startswith("weights.")}
    assert all(".lora_" in name for name in names)
    assert {name.split(".")[-2] for name in weights} == {"default", "old"}
    assert len(weights) == 2 * 2 * 15
    assert len(names - weights) == 2 * 2 * 15


def test_generators_and_counts_come_back(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    engine = build(build_engine, ranks, tiny_sd3)
    engine.nonfinite_steps = 1
    torch.manual_seed(11)
    state = plain(engine.save_checkpoint(tmp_path))
    expected = torch.rand(3)
    other = build(build_engine, ranks, tiny_sd3)
    other.load_checkpoint(tmp_path, state)
    assert torch.equal(torch.rand(3), expected)
    assert other.nonfinite_steps == 1
    assert other.weight_version == 0


def test_a_parameter_that_never_had_a_gradient_has_no_moments(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    """DCP refuses such a parameter if it is not left out."""
    engine = build(build_engine, ranks, tiny_sd3)
    left_out = next(iter(engine.trained()))
    with engine.train_mode():
        engine.forward_backward_batch(ranks.rows([0, 1]), ranks.loss)
        engine.trained()[left_out].grad = None
        engine.optimizer_step()
    state = plain(engine.save_checkpoint(tmp_path))
    assert left_out not in state["optimizer_steps"]
    assert len(state["optimizer_steps"]) == len(engine.trained()) - 1
    resumed = build(build_engine, ranks, tiny_sd3)
    resumed.load_checkpoint(tmp_path, state)
    for each in (engine, resumed):
        each.train_batch(ranks.rows([1, 2]), ranks.loss)
    assert same(adapter(engine), adapter(resumed))


def test_every_adapter_is_saved(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    engine = build(build_engine, ranks, tiny_sd3, adapters=("old",))
    ranks.warm(engine)
    engine.ema_update_adapter("default", "old", 0.5)
    state = plain(engine.save_checkpoint(tmp_path))
    other = build(build_engine, ranks, tiny_sd3, adapters=("old",))
    other.load_checkpoint(tmp_path, state)
    for name in ("default", "old"):
        assert same(adapter(other, name), adapter(engine, name))


def test_all_weights_are_saved_without_lora(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    engine = build(build_engine, ranks, tiny_sd3, lora=None)
    engine.train_batch(ranks.rows([0, 1]), ranks.loss)
    state = plain(engine.save_checkpoint(tmp_path))
    other = build(build_engine, ranks, tiny_sd3, lora=None)
    other.load_checkpoint(tmp_path, state)
    expected = dict(engine.get_per_tensor_param(adapter=None))
    assert same(dict(other.get_per_tensor_param(adapter=None)), expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora": LoRAConfig(rank=4, alpha=8.0)}, "'rank': 2"),
        ({"lora": LoRAConfig(rank=2, alpha=8.0, targets=("to_q",))}, "'targets': ['to_q']"),
        ({"adapters": ("old",)}, "'names': ['default', 'old']"),
        ({"lora": None}, "this run None"),
        ({"dtype": DType.BFLOAT16}, "base: checkpoint"),
    ],
)
def test_a_checkpoint_of_another_kind_says_what_differs(
    build_engine: Any,
    ranks: ModuleType,
    tiny_sd3: Path,
    tmp_path: Path,
    options: dict[str, Any],
    said: str,
) -> None:
    state = plain(build(build_engine, ranks, tiny_sd3).save_checkpoint(tmp_path))
    other = build(build_engine, ranks, tiny_sd3, **options)
    with pytest.raises(CheckpointError, match="another kind of run") as caught:
        other.load_checkpoint(tmp_path, state)
    assert said in str(caught.value)


def test_another_base_is_refused(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    state = plain(build(build_engine, ranks, tiny_sd3).save_checkpoint(tmp_path / "saved"))
    base = build_tiny_sd3(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="base: checkpoint"):
        build(build_engine, ranks, base).load_checkpoint(tmp_path / "saved", state)


def test_a_torn_file_is_an_error_and_changes_nothing(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path: Path
) -> None:
    engine = build(build_engine, ranks, tiny_sd3)
    state = plain(engine.save_checkpoint(tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    other = build(build_engine, ranks, tiny_sd3, seed=1)
    before = adapter(other)
    with pytest.raises(CheckpointError, match="cannot be read"):
        other.load_checkpoint(tmp_path, state)
    assert same(adapter(other), before)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        other.load_checkpoint(tmp_path / "nowhere", state)
