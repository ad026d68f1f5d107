"""What does not fit together is said before a run starts, with what would fit."""

from __future__ import annotations

import attrs
import pytest

from omni_core import plugins
from omni_core.algorithms.awm_options import AWMOptions
from omni_core.algorithms.base_options import NormGuardOptions
from omni_core.algorithms.dgpo_options import DGPOOptions
from omni_core.algorithms.diffusion_dpo_options import DiffusionDPOOptions
from omni_core.algorithms.diffusion_nft_options import DiffusionNFTOptions
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import OldPolicy
from omni_core.options import AlgorithmConfig, RunFacts

FACTS = RunFacts(
    num_inference_steps=10, samples_per_prompt=8, prompts_per_step=4, micro_batch_size=8
)
WHOLE = attrs.evolve(FACTS, has_adapter=False)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        (DiffusionNFTOptions(), "old, reference"),
        (AWMOptions(kl_coef=0.0), "ema"),
        (DiffusionDPOOptions(), "reference"),
        (FlowGRPOOptions(kl_coef=0.04), "reference"),
        (FlowGRPOOptions(norm_guard=NormGuardOptions()), "reference"),
    ],
)
def test_other_policies_need_an_adapter(options: AlgorithmConfig, others: str) -> None:
    said = options.mistakes(WHOLE)["name"]
    assert f"({others})" in said
    assert "model.lora" in said
    assert "name" not in options.mistakes(FACTS)


def test_every_weight_may_be_trained_where_nothing_is_compared() -> None:
    assert FlowGRPOOptions().mistakes(WHOLE) == {}
    on_policy = DiffusionNFTOptions(old_policy=OldPolicy.COPY, kl_coef=0.0)
    assert on_policy.mistakes(WHOLE) == {}


@pytest.mark.parametrize(("options", "rows"), [(DGPOOptions(), 8), (DiffusionDPOOptions(), 2)])
def test_a_unit_has_to_fit_into_a_micro_batch(options: AlgorithmConfig, rows: int) -> None:
    small = attrs.evolve(FACTS, micro_batch_size=rows - 1)
    assert f"is {rows - 1}, and must be at least {rows}" in options.mistakes(small)["name"]
    assert options.mistakes(attrs.evolve(FACTS, micro_batch_size=rows)) == {}
    assert options.mistakes(attrs.evolve(FACTS, micro_batch_size=None)) == {}


def test_the_names_of_the_policies_are_those_that_are_predicted() -> None:
    """Options say without torch what the algorithm's predictions say."""
    registry = plugins.registry(plugins.ALGORITHMS)
    for name in registry.names():
        options = registry.get(name).options()
        if options.model_type == "diffusion_forward":
            others = registry.get(name).build(options).predictions[1:]
            assert options.other_policies == tuple(p.policy.value for p in others), name
