"""What the options of several algorithms have in common. Imports no torch.

An algorithm of the reverse process derives from `StochasticOptions`, one of the forward process from
`ForwardOptions`; each adds `AdvantageOptions` where rewards are compared within groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs

from omni_core.choices import (
    AdvantageStd,
    KLForm,
    OldPolicy,
    PredictionGuidance,
    SigmaDraw,
    StepKind,
)
from omni_core.options import (
    AlgorithmConfig,
    DiffusionRolloutAlgoConfig,
    RunFacts,
    not_negative,
    optional_positive,
    positive,
)
from omni_core.rollout_correction_options import RolloutCorrectionOptions
from omni_core.window import widest_window, window_mistake


@attrs.frozen(kw_only=True)
class NormGuardOptions:
    """NormGuard (arXiv 2606.27771): a penalty on velocities longer than the reference's."""

    coef: float = attrs.field(default=0.1, validator=positive)
    """Weight of the hinge on relative growth."""
    margin: float = attrs.field(default=0.0, validator=not_negative)
    """Relative growth that is free."""


@attrs.frozen(kw_only=True, slots=False)
class AdvantageOptions:
    """How rewards become advantages within groups. A mixin."""

    adv_clip: float | None = attrs.field(default=5.0, validator=optional_positive)
    """Bound on |advantage|; None for no bound."""
    std: AdvantageStd = AdvantageStd.GLOBAL
    ddof: int = attrs.field(default=1, validator=attrs.validators.in_((0, 1)))
    eps: float = attrs.field(default=1e-4, validator=positive)


def group_mistakes(title: str, facts: RunFacts) -> dict[str, str]:
    """Say so if there is no group to compare a sample with."""
    if facts.samples_per_prompt >= 2:
        return {}
    return {
        "name": (
            f"{title} compares the samples of a group: rollout.samples_per_prompt is "
            f"{facts.samples_per_prompt}, and must be at least 2"
        )
    }


def policy_mistakes(title: str, facts: RunFacts, *, others: Sequence[str]) -> dict[str, str]:
    """Say so if policies beside the trained one are needed, and the engine keeps none."""
    if facts.keeps_policies or not others:
        return {}
    return {
        "name": (
            f"{title}, as configured, compares with another policy ({', '.join(others)}): with every "
            "weight trained this engine keeps none; set model.lora, or options that look at none"
        )
    }


def unit_mistakes(title: str, facts: RunFacts, *, rows: int) -> dict[str, str]:
    """Say so if the rows that the loss has to see together do not fit into a micro-batch."""
    if facts.micro_batch_size is None or facts.micro_batch_size >= rows:
        return {}
    return {
        "name": (
            f"{title} sees {rows} rows together: engine.micro_batch_size is {facts.micro_batch_size}, and "
            f"must be at least {rows}"
        )
    }


def cps_mistake(noise_level: float) -> str:
    """Say what is wrong with a cps noise level above 1."""
    return (
        f"cps takes a noise level in (0, 1], got {noise_level}: its s is sigma' sin(noise_level pi/2), "
        "largest at 1"
    )


LEAST_CLIP = 1e-6
"""Float32 tells ratios near 1 apart by 1.2e-7: a clip below ten times that is among the rounding."""


# -- reverse process ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class StochasticOptions(AlgorithmConfig):
    """Learns from the stochastic steps of its own rollouts: all but the last, or a short window."""

    title: ClassVar[str] = "this algorithm"
    """Its plugin's name, for messages."""
    clip_key: ClassVar[str] = "clip_ratio"
    """Name of the option that `clip` follows from."""

    kind: StepKind = StepKind.SDE
    noise_level: float = attrs.field(default=0.7, validator=positive)
    """eta of the reverse step."""
    window_size: int | None = attrs.field(default=None, validator=optional_positive)
    """Stochastic and trained steps of a group; None trains all but the last."""
    window_range: tuple[int, ...] | None = None
    """`[first, stop]` that a short window is drawn from; None is the first half of the schedule."""
    norm_guard: NormGuardOptions | None = None
    """None trains without it."""
    rollout_correction: RolloutCorrectionOptions | None = None
    """Weighs and rejects steps by how far the rollout's policy was from the trained one; None trusts it."""

    @property
    def needs_reference(self) -> bool:
        """Only regularisers look at it."""
        return self.norm_guard is not None

    def window_bounds(self, num_steps: int) -> tuple[int, int]:
        """`[first, stop)`: where a window of `window_size` lies, for a schedule of *num_steps*."""
        if self.window_range is None:
            return 0, max(num_steps // 2, 1)
        first, stop = self.window_range
        return first, stop

    def rollout_algo(self) -> DiffusionRolloutAlgoConfig:
        """Say how its trajectories are sampled."""
        return DiffusionRolloutAlgoConfig(
            kind=self.kind,
            noise_level=self.noise_level,
            window_size=self.window_size,
            window_range=self.window_range,
        )

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """Check kind, clip and window against the run."""
        others = ["reference"] if self.needs_reference else []
        found = policy_mistakes(self.title, facts, others=others)
        if self.kind is StepKind.ODE:
            known = ", ".join(kind for kind in StepKind if kind is not StepKind.ODE)
            found["kind"] = f"ode has no log-prob to train on; choose one of {known}"
        if self.kind is StepKind.CPS and self.noise_level > 1:
            found["noise_level"] = cps_mistake(self.noise_level)
        if self.clip is not None and self.clip < LEAST_CLIP:
            found[self.clip_key] = (
                f"{self.clip} is below the noise floor of float32 ratios (1.2e-7, times ten); expected at "
                f"least {LEAST_CLIP}"
            )
        steps = facts.num_inference_steps
        if self.window_range is not None:
            wrong = window_mistake(self.window_range, num_steps=steps)
            if wrong:
                found["window_range"] = wrong
        if self.window_size is not None and "window_range" not in found:
            low, high = self.window_bounds(steps)
            if self.window_size > min(high, steps - 1) - low:
                found["window_size"] = (
                    f"{self.window_size} steps do not fit into [{low}, {high}) of {steps} steps, whose "
                    f"widest window is {widest_window(steps)}; at most {min(high, steps - 1) - low} fit"
                )
        if steps < 2:
            found["window_size"] = (
                "one sampling step leaves none to train (the last step is never stochastic); "
                "rollout.sampling.num_inference_steps must be at least 2"
            )
        return found


@attrs.frozen(kw_only=True)
class PolicyGradientOptions(AdvantageOptions, StochasticOptions):
    """A policy gradient on the log-probs of stochastic steps, with advantages within groups."""

    kl_coef: float = attrs.field(default=0.0, validator=not_negative)
    """Weight of the KL to the reference (published: 0.04 for OCR, with `kl_form: flow_grpo`)."""
    kl_form: KLForm = KLForm.FLOW_GRPO

    @property
    def needs_reference(self) -> bool:
        """Only regularisers look at it."""
        return self.kl_coef > 0 or self.norm_guard is not None

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """Check kind, window and group size against the run."""
        return {**super().mistakes(facts), **group_mistakes(self.title, facts)}


# -- forward process ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, slots=False)
class OldPolicyOptions:
    """The policy that samples is kept as the adapter `old`. A mixin, ahead of `ForwardOptions`."""

    old_policy: OldPolicy = OldPolicy.COPY

    def old_decay(self, optimizer_step: int) -> float:
        """d of old <- d old + (1 - d) new, after so many optimizer steps."""
        match self.old_policy:
            case OldPolicy.COPY:
                return 0.0
            case OldPolicy.RAMP:
                return min(0.001 * optimizer_step, 0.5)
            case OldPolicy.DELAYED_RAMP:
                return min(max(0.0075 * (optimizer_step - 75), 0.0), 0.999)


@attrs.frozen(kw_only=True)
class ForwardOptions(AlgorithmConfig):
    """Learns from finished samples that are noised again: any sampler will do, ode is the cheapest."""

    title: ClassVar[str] = "this algorithm"
    """Its plugin's name, for messages."""

    draws: int | None = attrs.field(default=None, validator=optional_positive)
    """Sigmas that each sample is noised to in an update; None is one for each step of the schedule."""
    sigmas: SigmaDraw = SigmaDraw.SCHEDULE
    sigma_shift: float = attrs.field(default=1.0, validator=positive)
    """Moves drawn sigmas towards noise (above 1): of `uniform` and `logit_normal`."""
    guidance: PredictionGuidance = PredictionGuidance.NONE
    """Under which the loss's predictions are made; sampling has its own."""
    kl_coef: float = attrs.field(default=0.0, validator=not_negative)
    """Weight of mean_D (v - v_ref)^2."""
    norm_guard: NormGuardOptions | None = None
    """None trains without it."""

    @property
    def model_type(self) -> str:
        """An engine of the forward process."""
        return "diffusion_forward"

    @property
    def needs_reference(self) -> bool:
        """Only regularisers look at it."""
        return self.kl_coef > 0 or self.norm_guard is not None

    @property
    def keeps_old(self) -> bool:
        """Whether the policy that sampled is another than the trained one, so an adapter of its own."""
        return False

    @property
    def other_policies(self) -> tuple[str, ...]:
        """Policies beside the trained one that the loss looks at."""
        wanted = {"old": self.keeps_old, "reference": self.needs_reference}
        return tuple(name for name, asked in wanted.items() if asked)

    def draws_of(self, num_steps: int) -> int:
        """Sigmas of a sample in an update, for a schedule of *num_steps*."""
        return num_steps if self.draws is None else self.draws

    def rollout_algo(self) -> DiffusionRolloutAlgoConfig:
        """Sampled by the probability-flow ODE, from the old policy where one is kept."""
        return DiffusionRolloutAlgoConfig(
            kind=StepKind.ODE,
            noise_level=0.0,
            window_size=None,
            window_range=None,
            adapter="old" if self.keeps_old else "default",
        )

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """Check group size and draws against the run."""
        found = {
            **policy_mistakes(self.title, facts, others=self.other_policies),
            **group_mistakes(self.title, facts),
        }
        steps = facts.num_inference_steps
        if self.sigmas is SigmaDraw.SCHEDULE and self.draws_of(steps) > steps:
            found["draws"] = (
                f"{self.draws} sigmas are drawn from the schedule's {steps} steps, none twice; expected "
                f"at most {steps}, or `sigmas: uniform`"
            )
        return found


@attrs.frozen(kw_only=True)
class OldPolicyForwardOptions(OldPolicyOptions, AdvantageOptions, ForwardOptions):
    """A loss of the forward process that compares the trained policy with the one that sampled."""

    @property
    def keeps_old(self) -> bool:
        """Not for one optimizer step a rollout on a copied policy: then both are the same."""
        return self.old_policy is not OldPolicy.COPY or self.updates_per_rollout > 1
