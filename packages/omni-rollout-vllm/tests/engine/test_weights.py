"""What is pushed is what samples, by name and by value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from omni_core.choices import StepKind
from omni_core.options import DiffusionSamplingConfig
from omni_core.rollout import RolloutState, WeightMismatchError, WeightUpdate
from omni_core.testing.samples import requests_for
from omni_core.trajectory import RolloutRequest, SamplingSpec, Trajectory
from omni_engine_fsdp.options import EngineRolloutConfig
from omni_engine_fsdp.rollout import EngineRollout
from omni_rollout_vllm import messages
from omni_rollout_vllm.options import AdapterForm
from omni_rollout_vllm.rollout import VllmOmniRollout
from omni_rollout_vllm.weight_names import adapter_map, weight_map


@pytest.fixture
def asked(engine: Any) -> list[RolloutRequest]:
    config = DiffusionSamplingConfig(num_inference_steps=4)
    return requests_for(
        SamplingSpec(
            sigmas=engine.family.schedule(config).values(),
            guidance_scale=1.0,
            height=16,
            width=16,
            max_sequence_length=16,
            kind=StepKind.SDE,
            noise_level=0.7,
        )
    )


def sampled(rollout: Any, asked: list[RolloutRequest]) -> Trajectory:
    return Trajectory.concat(rollout.generate(asked, timeout=300.0))


def trained(engine: Any, asked: list[RolloutRequest]) -> Trajectory:
    """What the training engine samples with its own module."""
    return sampled(EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine), asked)


def latents(trajectory: Trajectory) -> Tensor:
    return trajectory.latents["image"]


def test_every_name_of_the_trainer_has_its_place_in_the_real_engine(
    engine: Any, ready: VllmOmniRollout, adapter: dict[str, Tensor]
) -> None:
    (there,) = ready._pool.ask_all(messages.Describe(), timeout=300.0)
    names = [name for name, _ in engine.get_per_tensor_param(adapter=None)]
    own = [name for name in there["parameters"] if name.startswith("transformer.")]

    assert set(adapter_map(list(adapter), there["adaptable"], there["packings"])) == set(adapter)
    assert set(weight_map(names, own, there["packings"])) == set(names)
    assert any(".base_layer." in name for name in own), "the adapter is loaded beside them"
    assert any(".to_qkv." in name for name in own), "projections are packed"


def test_whole_weights_replace_the_policy_and_are_restored_bit_for_bit(
    engine: Any, ready: VllmOmniRollout, asked: list[RolloutRequest], push: Any
) -> None:
    base = {name: value.clone() for name, value in engine.get_per_tensor_param(adapter=None)}
    push(ready, base, adapter=None)
    before = latents(sampled(ready, asked))
    with engine.disable_adapter():
        torch.testing.assert_close(before, latents(trained(engine, asked)), rtol=0.0, atol=1e-4)

    push(ready, {name: value * 1.05 for name, value in base.items()}, adapter=None)
    changed = latents(sampled(ready, asked))
    assert float((changed - before).abs().max()) > 1e-3

    push(ready, base, adapter=None)
    assert torch.equal(latents(sampled(ready, asked)), before)


def test_case_25_nothing_is_bound_where_a_weight_is_missing_or_too_much(
    engine: Any, ready: VllmOmniRollout, asked: list[RolloutRequest]
) -> None:
    """CASES 25: the message lists what was sent and not bound, and what was expected and not sent."""
    before = latents(sampled(ready, asked))
    base = dict(engine.get_per_tensor_param(adapter=None))
    lost = "transformer.transformer_blocks.0.attn.to_k.weight"
    wrong = {name: value * 2 for name, value in base.items() if name != lost}
    wrong["transformer.no_such.weight"] = base[lost]
    ready.pause()
    with pytest.raises(WeightMismatchError) as error:
        ready.update(WeightUpdate(version=ready.weight_version + 1, tensors=wrong, adapter=None))
    assert f"expected and not sent: {lost}" in str(error.value)
    assert "sent and not bound: transformer.no_such.weight" in str(error.value)
    assert ready.state is RolloutState.PAUSED
    ready.resume()
    assert torch.equal(latents(sampled(ready, asked)), before)


def test_case_25_an_adapter_whose_names_are_all_wrong_is_refused(
    ready: VllmOmniRollout, adapter: dict[str, Tensor]
) -> None:
    """CASES 25: with the names of both sides."""
    wrong = {name.replace(".attn.", ".attention."): value for name, value in adapter.items()}
    ready.pause()
    with pytest.raises(WeightMismatchError, match=r"attention\.to_q\.lora_A"):
        ready.update(WeightUpdate(version=ready.weight_version + 1, tensors=wrong, adapter="other"))
    ready.resume()


def test_two_adapters_sample_each_as_itself(
    engine: Any,
    ready: VllmOmniRollout,
    adapter: dict[str, Tensor],
    asked: list[RolloutRequest],
    push: Any,
) -> None:
    mine = latents(sampled(ready, asked))
    push(ready, {name: -value for name, value in adapter.items()}, adapter="old")
    copies = [attrs.evolve(request, adapter="old") for request in asked]

    torch.testing.assert_close(latents(sampled(ready, copies)), mine, rtol=0.0, atol=1e-5)
    push(ready, {name: value * 0.5 for name, value in adapter.items()}, adapter="old")
    assert float((latents(sampled(ready, copies)) - mine).abs().max()) > 1e-3
    with pytest.raises(ValueError, match=r"no adapter named 'default' .* with version"):
        ready.submit(asked)
    push(ready, adapter, version=ready.weight_version)
    assert torch.equal(latents(sampled(ready, asked)), mine)


def test_an_adapter_that_adds_nothing_yet_samples_the_base(
    engine: Any,
    ready: VllmOmniRollout,
    adapter: dict[str, Tensor],
    asked: list[RolloutRequest],
    push: Any,
) -> None:
    fresh = {n: torch.zeros_like(v) if ".lora_B." in n else v for n, v in adapter.items()}
    push(ready, fresh)
    with engine.disable_adapter():
        base = trained(engine, asked)
    torch.testing.assert_close(latents(sampled(ready, asked)), latents(base), rtol=0.0, atol=1e-4)


@pytest.fixture(scope="module")
def merging(engine: Any, options: Any) -> Iterator[VllmOmniRollout]:
    made = VllmOmniRollout(options(adapter_form=AdapterForm.MERGED), engine=engine)
    yield made
    made.close()


def test_a_merged_adapter_samples_as_the_training_engine_with_it(
    engine: Any,
    merging: VllmOmniRollout,
    adapter: dict[str, Tensor],
    asked: list[RolloutRequest],
    push: Any,
) -> None:
    push(merging, adapter)
    found, wanted = sampled(merging, asked), trained(engine, asked)
    torch.testing.assert_close(latents(found), latents(wanted), rtol=0.0, atol=1e-4)
    assert float((found.log_probs - wanted.log_probs).abs().mean()) <= 1e-6

    push(merging, {name: value * 0.1 for name, value in adapter.items()})
    push(merging, adapter)
    assert torch.equal(latents(sampled(merging, asked)), latents(found)), "base + once"


def test_merged_policies_take_each_others_place(
    merging: VllmOmniRollout, adapter: dict[str, Tensor], asked: list[RolloutRequest], push: Any
) -> None:
    """An evaluation with another policy than samples: pushed, asked, and pushed back at one version."""
    push(merging, adapter)
    mine = latents(sampled(merging, asked))
    others = [attrs.evolve(request, adapter="old") for request in asked]

    push(merging, {n: -v if ".lora_B." in n else v for n, v in adapter.items()}, adapter="old")
    assert not torch.equal(latents(sampled(merging, others)), mine)
    version = merging.weight_version
    with pytest.raises(ValueError, match=r"no adapter named 'default' .* with version"):
        merging.submit(asked)
    push(merging, adapter, version=version)
    assert torch.equal(latents(sampled(merging, asked)), mine)
    push(merging, adapter, adapter="old", version=version)
    assert torch.equal(latents(sampled(merging, others)), mine), "the same weights by another name"
