"""Test support that ships with the contracts: suites that check a plugin, and toys that keep them all.

A fork subclasses a suite in its own tests and provides the fixtures that the suite's docstring names::

    from omni_core.testing import EngineSuite

    class TestMyEngine(EngineSuite):
        @pytest.fixture
        def make_engine(self): ...

An engine of several ranks is run on them by mixing in `OnRanks`.

The suites need pytest (`pip install "omni-core[testing]"`), `omni_core.testing.toys` does not; nothing in
omni_core outside this package imports either. Where a suite fails, its assertion says what was expected.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_HOMES = {
    "AlgorithmSuite": "algorithm_suite",
    "EngineSuite": "engine_suite",
    "ForwardEngineSuite": "forward_engine_suite",
    "OnRanks": "on_ranks",
    "RewardSuite": "reward_suite",
    "RolloutSuite": "rollout_suite",
    "forward_loss_inputs": "samples",
    "loss_inputs": "samples",
    "requests_for": "samples",
    "take_rows": "samples",
    "train_batch": "samples",
    "trained_leaf": "samples",
}

__all__ = [*_HOMES]  # noqa: PLE0604 -- built from the table


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = f"{__name__}.{_HOMES[name]}"
    if module.endswith("_suite") and module not in sys.modules:
        # So that a failed assert shows both sides, as it does in a test file.
        import_module("pytest").register_assert_rewrite(module)
    return getattr(import_module(module), name)
