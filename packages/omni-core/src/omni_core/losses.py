"""`diffusion_loss`: one function for every algorithm, told apart by the loss config's name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import attrs

from omni_core import plugins
from omni_core.algorithm import Algorithm, Policy, Prediction
from omni_core.engine import LossInputs, LossTerms
from omni_core.forward_needs import ForwardNeeds
from omni_core.forward_process import ForwardLossInputs
from omni_core.options import AlgorithmConfig, DiffusionLossConfig


def algorithm(config: DiffusionLossConfig) -> Algorithm:
    """Build the algorithm that a loss config names (once for equal configs).

    Raises:
        PluginNotFoundError: no algorithm of that name.
        PluginError: what it builds is no Algorithm, or its options have no hash.
    """
    plugin = plugins.registry(plugins.ALGORITHMS).get(config.name)
    try:
        hash(config.options)
    except TypeError as exc:
        msg = (
            f"{plugins.ALGORITHMS}:{config.name}: options must be frozen, of hashable fields (a tuple, "
            f"not a list): {exc}"
        )
        raise plugins.PluginError(msg) from None
    built = _build(plugin, config.options)
    if not isinstance(built, Algorithm):
        msg = f"{plugins.ALGORITHMS}:{config.name} built {type(built).__name__}, not an Algorithm"
        raise plugins.PluginError(msg)
    return built


@lru_cache(maxsize=32)
def _build(plugin: plugins.Plugin, options: AlgorithmConfig) -> object:
    return plugin.build(options)


def diffusion_loss(
    config: DiffusionLossConfig, inputs: LossInputs | ForwardLossInputs
) -> LossTerms:
    """Compute the loss terms of a micro-batch.

    Args:
        config: Names the algorithm and holds its resolved options.
        inputs: M packed rows, of the kind that the algorithm's `model_type` has.

    Returns:
        Terms [M] and metrics [M]; the caller weighs, adds and divides by the global denominator.

    Raises:
        PluginNotFoundError: no algorithm of that name.
    """
    return algorithm(config).loss(inputs)


class AlgorithmLoss(ABC):
    """An algorithm's loss, with what engines read from it beside: what `set_loss_fn` takes."""

    @property
    @abstractmethod
    def algorithm(self) -> Algorithm:
        """Whose loss it is."""

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Every forward that the algorithm asks for; the first is the trained one."""
        return self.algorithm.predictions

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm asks for the reference's prediction."""
        return any(prediction.policy is Policy.REFERENCE for prediction in self.predictions)

    @property
    def needs_teacher(self) -> bool:
        """Whether the algorithm asks for the prediction of the row's teacher."""
        return any(prediction.policy is Policy.TEACHER for prediction in self.predictions)

    @property
    def needs_noise(self) -> bool:
        """Whether the algorithm asks for the noise of the rollout's steps."""
        return self.algorithm.needs_noise

    @property
    def forward_needs(self) -> ForwardNeeds | None:
        """What is drawn and predicted for a loss of the forward process; None for any other."""
        return self.algorithm.forward_needs

    def __call__(self, inputs: LossInputs | ForwardLossInputs) -> LossTerms:
        """Compute the loss terms of a micro-batch."""
        return self.algorithm.loss(inputs)


@attrs.frozen
class ConfiguredLoss(AlgorithmLoss):
    """`diffusion_loss` of one config. Pickles as its config: it travels to other processes.

    >>> engine.set_loss_fn(ConfiguredLoss(DiffusionLossConfig(name="flow_grpo", options=options)))
    """

    config: DiffusionLossConfig

    @property
    def algorithm(self) -> Algorithm:
        """The one that the config names."""
        return algorithm(self.config)
