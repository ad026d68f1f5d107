from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from omni_core.engine import LossInputs, LossTerms


def breaks_at(call: int, ranks: ModuleType) -> Callable[[LossInputs], LossTerms]:
    calls = 0

    def loss(inputs: LossInputs) -> LossTerms:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyError(call)
        found: LossTerms = ranks.loss(inputs)
        return found

    return loss


def test_an_update_that_failed_half_way_is_not_mixed_into_the_next(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    """FSDP2 keeps unsynced gradients to itself, where dropping `.grad` does not reach."""
    engine = build_engine(tiny_sd3, optimizer=ranks.LR, micro_batch_size=2)
    batch = ranks.rows([0, 1, 2])
    before = engine.infer_batch(batch).log_probs
    with pytest.raises(KeyError):
        engine.train_batch(batch, breaks_at(3, ranks))
    with pytest.raises(RuntimeError, match="failed between its micro-batches"):
        engine.train_batch(batch, ranks.loss)
    assert torch.equal(engine.infer_batch(batch).log_probs, before)


def test_a_loss_that_fails_at_once_spoils_nothing(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    engine = build_engine(tiny_sd3, optimizer=ranks.LR, micro_batch_size=2)
    ranks.warm(engine)
    batch = ranks.rows([0, 1, 2])
    expected = ranks.gradients(engine, batch)
    with pytest.raises(KeyError):
        engine.train_batch(batch, breaks_at(1, ranks))
    found = ranks.gradients(engine, batch)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
