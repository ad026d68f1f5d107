"""A merged adapter is the adapter, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from omni_core.options import DType
from omni_core.testing.samples import requests_for
from omni_core.trajectory import Trajectory
from omni_engine_fsdp import EngineRollout, EngineRolloutConfig, merging


def base(engine: Any) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in engine.get_per_tensor_param(adapter=None)}


@pytest.mark.parametrize("dtype", list(DType))
def test_weights_come_back_bit_for_bit_also_by_an_exception(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, dtype: DType
) -> None:
    """Also in bf16, where taking the sum apart again would not give them back."""
    engine = build_engine(tiny_sd3, dtype=dtype)
    ranks.warm(engine)
    before = base(engine)
    inside = {}

    def fail() -> None:
        with engine.merged_adapter("default"):
            inside.update(base(engine))
            raise KeyError

    pytest.raises(KeyError, fail)
    changed = {name for name, value in before.items() if not torch.equal(inside[name], value)}
    assert changed == {
        n for n in before if n.endswith(tuple(f"{t}.weight" for t in engine.lora_targets))
    }
    after = base(engine)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_layer_that_fails_leaves_those_before_it_as_they_were(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(tiny_sd3)
    ranks.warm(engine)
    before = base(engine)
    changed = []
    product = merging._delta

    def third_fails(layer: Any, adapter: str) -> torch.Tensor:
        if len(changed) == 2:
            raise torch.OutOfMemoryError("no room")
        changed.append(layer)
        return product(layer, adapter)

    monkeypatch.setattr(merging, "_delta", third_fails)
    with (
        pytest.raises(torch.OutOfMemoryError, match="no room"),
        engine.merged_adapter("default"),
    ):
        pass
    after = base(engine)
    assert len(changed) == 2
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_merged_sampling_is_the_adapters_but_for_rounding(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    engine = build_engine(tiny_sd3, optimizer=ranks.LR)
    ranks.warm(engine)
    asked = requests_for(ranks.SPEC, samples_per_prompt=3)
    apart = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    merged = EngineRollout(EngineRolloutConfig(batch_size=4, merge_lora=True), engine=engine)
    assert (apart.replays_exactly, merged.replays_exactly) == (True, False)
    ours, theirs = (Trajectory.concat(r.generate(asked, decode=False)) for r in (merged, apart))
    with engine.disable_adapter():
        other = Trajectory.concat(apart.generate(asked, decode=False))
    latents = theirs.latents["image"]
    assert (ours.latents["image"] - latents).abs().max() <= 1e-5 * latents.abs().max()
    assert (other.latents["image"] - latents).abs().max() > 1e-3 * latents.abs().max()
    # What the canary sees: not zero, and within the bound of another engine's kernels.
    assert (engine.replay(ours) - ours.log_probs).abs().max() <= 1e-5


def test_without_an_adapter_there_is_nothing_to_merge(build_engine: Any, tiny_sd3: Path) -> None:
    engine = build_engine(tiny_sd3, lora=None)
    with pytest.raises(ValueError, match=r"rollout\.merge_lora: model\.lora is null"):
        EngineRollout(EngineRolloutConfig(merge_lora=True), engine=engine)
    with pytest.raises(ValueError, match="'other'"), engine.merged_adapter("other"):
        pass
