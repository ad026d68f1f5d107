"""`diffusion_loss` finds the algorithm by name; an engine learns from the callable what it needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import attrs
import pytest
import torch

from omni_core import plugins
from omni_core.algorithms.flow_grpo import FlowGRPO
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.engine import LossInputs, LossTerms, needs_reference
from omni_core.losses import ConfiguredLoss, algorithm, diffusion_loss
from omni_core.options import AlgorithmConfig, DiffusionLossConfig
from omni_core.plugins import Plugin, PluginError, PluginNotFoundError
from omni_core.testing import loss_inputs


def config(**options: float) -> DiffusionLossConfig:
    return DiffusionLossConfig(name="flow_grpo", options=FlowGRPOOptions(**options))  # type: ignore[arg-type]


@attrs.frozen(kw_only=True)
class ListOptions(AlgorithmConfig):
    steps: list[int] = attrs.field(factory=list)


@pytest.fixture
def other() -> Iterator[plugins.Registry]:
    registry = plugins.registry(plugins.ALGORITHMS)
    yield registry
    for name in registry.registered():
        registry.unregister(name)


def test_the_loss_is_the_named_algorithms() -> None:
    given = loss_inputs()
    ours = diffusion_loss(config(kl_coef=0.1), given)
    theirs = FlowGRPO(FlowGRPOOptions(kl_coef=0.1)).loss(given)
    assert torch.equal(ours.terms, theirs.terms)
    assert ours.metrics.keys() == theirs.metrics.keys()


def test_equal_configs_share_an_algorithm_and_others_do_not() -> None:
    assert algorithm(config(kl_coef=0.1)) is algorithm(config(kl_coef=0.1))
    assert algorithm(config(kl_coef=0.1)) is not algorithm(config(kl_coef=0.2))


def test_a_name_that_is_registered_anew_is_another_algorithm(other: plugins.Registry) -> None:
    named = DiffusionLossConfig(name="mine", options=FlowGRPOOptions())
    options, target = FlowGRPOOptions, "omni_core.algorithms.flow_grpo:FlowGRPO"
    other.register("mine", Plugin(api=1, options=options, target=target))
    assert isinstance(algorithm(named), FlowGRPO)
    other.unregister("mine")
    other.register("mine", Plugin(api=1, options=options, target="builtins:repr"))
    with pytest.raises(PluginError, match=r"omni\.algorithms:mine built str, not an Algorithm"):
        algorithm(named)


def test_an_unknown_algorithm_names_the_known_ones() -> None:
    named = DiffusionLossConfig(name="flow_gpro", options=FlowGRPOOptions())
    with pytest.raises(PluginNotFoundError, match="did you mean 'flow_grpo'"):
        diffusion_loss(named, loss_inputs())


def test_options_that_cannot_be_compared_are_refused_with_a_reason(
    other: plugins.Registry,
) -> None:
    plugin = Plugin(api=1, options=ListOptions, target="omni_core.algorithms.flow_grpo:FlowGRPO")
    other.register("listed", plugin)
    with pytest.raises(PluginError, match="options must be frozen, of hashable fields"):
        algorithm(DiffusionLossConfig(name="listed", options=ListOptions(steps=[1])))


def test_an_engine_learns_whether_the_reference_is_needed() -> None:
    assert not needs_reference(None)
    assert not needs_reference(ConfiguredLoss(config()))
    assert needs_reference(ConfiguredLoss(config(kl_coef=0.1)))

    def own(inputs: LossInputs) -> LossTerms:
        return LossTerms(terms=inputs.advantages)

    assert not needs_reference(own)
    own.needs_reference = True  # type: ignore[attr-defined]
    assert needs_reference(own)


def test_a_configured_loss_is_its_config() -> None:
    loss = ConfiguredLoss(config(kl_coef=0.1))
    given = loss_inputs()
    assert torch.equal(loss(given).terms, diffusion_loss(config(kl_coef=0.1), given).terms)
    assert copy.copy(loss) == loss
    assert hash(loss) == hash(ConfiguredLoss(config(kl_coef=0.1)))
