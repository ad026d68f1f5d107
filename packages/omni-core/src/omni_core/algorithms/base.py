"""What algorithms of one process have in common: windows, advantages, predictions and regularisers.

The mathematics of each is in its own module; here is only what would be written twice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from omni_core.advantages import GroupAdvantages, group_advantages
from omni_core.algorithm import (
    AdapterOperations,
    Algorithm,
    ModelFacts,
    Policy,
    Prediction,
    Timesteps,
)
from omni_core.algorithms.base_options import (
    AdvantageOptions,
    ForwardOptions,
    NormGuardOptions,
    OldPolicyForwardOptions,
    PolicyGradientOptions,
    StochasticOptions,
)
from omni_core.engine import LossInputs, LossTerms
from omni_core.forward_needs import ForwardNeeds
from omni_core.forward_process import ForwardLossInputs, velocity_error
from omni_core.kl import gaussian_kl
from omni_core.norm_guard import norm_growth, norm_guard
from omni_core.options import AlgorithmConfig
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import derive_seed


def advantages_within_groups(
    options: AdvantageOptions, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
) -> GroupAdvantages:
    """Centre by group, divide by the configured standard deviation, clip."""
    return group_advantages(
        rewards,
        group_ids,
        valid=valid,
        std=options.std,
        ddof=options.ddof,
        eps=options.eps,
        clip=options.adv_clip,
    )


def required(value: Latents | None, what: str) -> Latents:
    """*value*, which the engine had to provide, as a constant.

    Raises:
        ValueError: it did not.
    """
    if value is None:
        msg = f"the loss needs {what}, and the engine gave none"
        raise ValueError(msg)
    return {name: tensor.detach() for name, tensor in value.items()}


def without_reference(options: AlgorithmConfig, model: ModelFacts) -> str | None:
    """Say why the loss cannot have its reference, the model that training began with; or None."""
    if not options.needs_reference or model.keeps_policies:
        return None
    return (
        "its loss looks at the reference policy, and every weight is trained here by an engine that "
        "keeps no copy: set model.lora, or leave the regulariser out"
    )


def guarded(
    options: NormGuardOptions, velocity: Latents, reference: Latents
) -> tuple[Tensor, dict[str, Tensor]]:
    """NormGuard's weighted penalty [M], and what is reported of it."""
    hinge = norm_guard(velocity, reference, margin=options.margin)
    growth = norm_growth(velocity, reference).detach()
    return options.coef * hinge, {"norm_growth": growth, "norm_guard": hinge.detach()}


class ReverseAlgorithm(Algorithm):
    """Learns from the stochastic steps of its own rollouts; the loss sees M (sample, step) rows."""

    options: StochasticOptions

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The trained policy, and the reference where a regulariser looks at it."""
        reference = (Prediction(policy=Policy.REFERENCE),) if self.options.needs_reference else ()
        return (Prediction(), *reference)

    def window(self, schedule: FlowMatchSchedule, *, seed: int, iteration: int) -> tuple[int, ...]:
        """All steps but the last, or a random short window."""
        del iteration
        size = self.options.window_size
        if size is None:
            start, stop = self.options.window_range or (0, schedule.num_steps - 1)
        else:
            low, high = self.options.window_bounds(schedule.num_steps)
            last = min(high, schedule.num_steps - 1) - size
            if last < low:
                msg = (
                    f"algorithm.window_size: {size} steps do not fit into [{low}, {high}) of "
                    f"{schedule.num_steps} steps, of which the last is never stochastic"
                )
                raise ValueError(msg)
            start = random.Random(derive_seed("window", seed)).randint(low, last)
            stop = start + size
        schedule.check_window(start, stop, where="algorithm.window_range")
        return tuple(range(start, stop))

    def unsupported(self, model: ModelFacts) -> str | None:
        """A reference has to be kept."""
        return without_reference(self.options, model)

    def finish(self, inputs: LossInputs, terms: Tensor, metrics: Mapping[str, Tensor]) -> LossTerms:
        """Add the configured regularisers to the terms [M] of a loss."""
        metrics = dict(metrics)
        if self.options.norm_guard is not None:
            reference = required(
                None if inputs.reference is None else inputs.reference.velocity,
                "the reference's prediction",
            )
            penalty, said = guarded(self.options.norm_guard, inputs.current.velocity, reference)
            terms, metrics = terms + penalty, {**metrics, **said}
        return LossTerms(terms=terms, metrics={**metrics, "loss": terms.detach()})


class PolicyGradient(ReverseAlgorithm):
    """A policy gradient on stochastic steps: advantages within groups, and a KL to the reference."""

    options: PolicyGradientOptions

    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """Centre by group, divide by the configured standard deviation, clip."""
        return advantages_within_groups(self.options, rewards, group_ids, valid)

    def finish(self, inputs: LossInputs, terms: Tensor, metrics: Mapping[str, Tensor]) -> LossTerms:
        """Add the KL and the other regularisers."""
        if self.options.kl_coef > 0:
            mean = None if inputs.reference is None else inputs.reference.mean
            kl = gaussian_kl(
                inputs.current.mean,
                required(mean, "the reference's prediction"),
                inputs.current.std,
                form=self.options.kl_form,
                dt=inputs.dt,
            )
            terms = terms + self.options.kl_coef * kl
            metrics = {**metrics, "kl": kl.detach()}
        return super().finish(inputs, terms, metrics)


class ForwardAlgorithm(Algorithm):
    """Learns from finished samples that are noised again; the loss sees M (sample, sigma) rows."""

    options: ForwardOptions

    def asks(self, policy: Policy) -> Prediction:
        """A prediction at the drawn sigmas."""
        return Prediction(policy=policy, guidance=self.options.guidance, timesteps=Timesteps.DRAWN)

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The trained policy, and those that the loss compares it with."""
        policies = [Policy.CURRENT]
        if self.options.keeps_old:
            policies.append(Policy.OLD)
        if self.options.needs_reference:
            policies.append(Policy.REFERENCE)
        return tuple(self.asks(policy) for policy in policies)

    @property
    def forward_needs(self) -> ForwardNeeds:
        """As the options say."""
        options = self.options
        return ForwardNeeds(
            others=tuple(prediction.policy for prediction in self.predictions[1:]),
            guidance=options.guidance,
            draws=options.draws,
            sigmas=options.sigmas,
            shift=options.sigma_shift,
            shares_draws=self.shares_draws,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The trained one, and the old one where it is kept."""
        return ("default", "old") if self.options.keeps_old else ("default",)

    def window(self, schedule: FlowMatchSchedule, *, seed: int, iteration: int) -> tuple[int, ...]:
        """No stochastic step."""
        del schedule, seed, iteration
        return ()

    def unsupported(self, model: ModelFacts) -> str | None:
        """Policies beside the trained one have to be kept."""
        others = [name for name in self.adapters if name != "default"]
        if others and not model.keeps_policies:
            return (
                f"{self.options.title} keeps another policy ({', '.join(others)}), and every weight is "
                "trained here by an engine that keeps no copy: set model.lora"
            )
        return without_reference(self.options, model)

    def finish(
        self, inputs: ForwardLossInputs, terms: Tensor, metrics: Mapping[str, Tensor]
    ) -> LossTerms:
        """Add the configured regularisers to the terms [M] of a loss."""
        metrics = dict(metrics)
        if self.options.kl_coef > 0:
            kl = velocity_error(inputs.current, self.reference(inputs))
            terms = terms + self.options.kl_coef * kl
            metrics["kl"] = kl.detach()
        if self.options.norm_guard is not None:
            penalty, said = guarded(self.options.norm_guard, inputs.current, self.reference(inputs))
            terms, metrics = terms + penalty, {**metrics, **said}
        return LossTerms(terms=terms, metrics={**metrics, "loss": terms.detach()})

    def reference(self, inputs: ForwardLossInputs) -> Latents:
        """The reference's velocity.

        Raises:
            ValueError: the engine gave none.
        """
        return required(inputs.reference, "the reference's prediction")


class OldPolicyAlgorithm(ForwardAlgorithm):
    """Compares the trained policy with the one that sampled, which follows it rollout by rollout."""

    options: OldPolicyForwardOptions

    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """Centre by group, divide by the configured standard deviation, clip."""
        return advantages_within_groups(self.options, rewards, group_ids, valid)

    def after_rollout(self, adapters: AdapterOperations, *, optimizer_step: int) -> None:
        """old <- d old + (1 - d) new."""
        if self.options.keeps_old:
            decay = self.options.old_decay(optimizer_step)
            adapters.ema_update_adapter("default", "old", decay)

    def old(self, inputs: ForwardLossInputs) -> Latents:
        """The sampling policy's velocity: the trained one's own, as a constant, where no other is kept.

        Raises:
            ValueError: it is kept, and the engine gave none.
        """
        if self.options.keeps_old:
            return required(inputs.old, "the old policy's prediction")
        return {name: value.detach() for name, value in inputs.current.items()}


def rows_of_units(unit: Tensor) -> tuple[Tensor, Tensor]:
    """Number the units of a micro-batch from 0.

    Args:
        unit: int64 [M] on the CPU, `ForwardLossInputs.unit`.

    Returns:
        (place, sizes): int64 [M], each row's unit, and int64 [U], rows of each unit.
    """
    _, place, sizes = torch.unique(unit, return_inverse=True, return_counts=True)
    return place, sizes


def scaled(found: GroupAdvantages, factor: float) -> GroupAdvantages:
    """The same advantages times *factor*."""
    return attrs.evolve(found, advantages=found.advantages * factor)
