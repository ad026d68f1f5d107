"""What a push replaces, and whether it has to change what is sampled."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from omni_core.rollout import WeightUpdate
from omni_rollout_vllm.options import AdapterForm, VllmOmniRolloutConfig
from omni_rollout_vllm.pushed import Pushed, digest_of, expects_change, replaced_by


def pushed(adapter: str | None, digest: dict[str, int], version: int = 1) -> Pushed:
    return Pushed(
        version=version, names=("a",), adapter=adapter, alpha_over_rank=1.0, digest=digest
    )


def test_adapters_beside_each_other_replace_those_of_their_own_name() -> None:
    held = {"default": pushed("default", {"a": 1}), None: pushed(None, {"a": 9})}
    assert replaced_by(pushed("default", {}), held, one_adapter=False) is held["default"]
    assert replaced_by(pushed("old", {}), held, one_adapter=False) is None
    assert replaced_by(pushed(None, {}), held, one_adapter=False) is held[None]


def test_a_merged_adapter_replaces_the_one_before_whatever_its_name() -> None:
    held = {None: pushed(None, {"a": 9}), "default": pushed("default", {"a": 1})}
    same, other = pushed("old", {"a": 1}), pushed("old", {"a": 2})
    assert replaced_by(same, held, one_adapter=True) is held["default"]
    assert not expects_change(same, held["default"]), "a policy of the same weights samples alike"
    assert expects_change(other, held["default"])
    assert replaced_by(same, {}, one_adapter=True) is None
    assert replaced_by(pushed(None, {}), held, one_adapter=True) is held[None]


def test_a_first_push_changes_something_where_an_adapter_adds_something() -> None:
    assert expects_change(pushed("default", {"a": 1}), None)
    assert not expects_change(pushed("default", {}), None)
    assert not expects_change(pushed(None, {"a": 1}), None)


def test_an_adapter_whose_product_is_0_has_no_digest() -> None:
    tensors: dict[str, Tensor] = {"q.lora_A.weight": torch.ones(2, 3)}
    update = WeightUpdate(version=1, tensors={**tensors, "q.lora_B.weight": torch.zeros(3, 2)})
    assert digest_of(update, torch.float32) == {}
    assert digest_of(attrs.evolve(update, adapter=None), torch.float32) != {}


def test_merged_adapters_are_held_one_at_a_time() -> None:
    assert VllmOmniRolloutConfig().keeps_adapters
    assert not VllmOmniRolloutConfig(adapter_form=AdapterForm.MERGED).keeps_adapters
