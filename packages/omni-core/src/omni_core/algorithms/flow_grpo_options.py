"""What a recipe may say about FlowGRPO. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from omni_core.choices import AdvantageStd, KLForm, StepKind
from omni_core.options import (
    AlgorithmConfig,
    DiffusionRolloutAlgoConfig,
    RunFacts,
    not_negative,
    optional_positive,
    positive,
)
from omni_core.plugins import Plugin
from omni_core.window import widest_window, window_mistake

SHORT_CLIP = 1e-5
FULL_CLIP = 1e-4


@attrs.frozen(kw_only=True)
class FlowGRPOOptions(AlgorithmConfig):
    """FlowGRPO, with a full or a short window (Flow-GRPO-Fast)."""

    kind: StepKind = StepKind.SDE
    noise_level: float = attrs.field(default=0.7, validator=positive)
    """eta of the reverse step."""
    window_size: int | None = attrs.field(default=None, validator=optional_positive)
    """Stochastic and trained steps of a group; None trains all but the last."""
    window_range: tuple[int, ...] | None = None
    """`[first, stop]` that a short window is drawn from; None is the first half of the schedule."""
    clip_ratio: float | None = attrs.field(default=None, validator=optional_positive)
    """The ratio is clamped to 1 +- this; None is 1e-4, or 1e-5 for short windows and cps."""
    adv_clip: float = attrs.field(default=5.0, validator=positive)
    kl_coef: float = attrs.field(default=0.0, validator=not_negative)
    """Weight of the KL to the reference (published: 0.04 for OCR, with `kl_form: flow_grpo`)."""
    kl_form: KLForm = KLForm.FLOW_GRPO
    std: AdvantageStd = AdvantageStd.GLOBAL
    ddof: int = attrs.field(default=1, validator=attrs.validators.in_((0, 1)))
    eps: float = attrs.field(default=1e-4, validator=positive)

    @property
    def clip(self) -> float:
        """The clip in force."""
        if self.clip_ratio is not None:
            return self.clip_ratio
        short = self.window_size is not None or self.kind is StepKind.CPS
        return SHORT_CLIP if short else FULL_CLIP

    @property
    def needs_reference(self) -> bool:
        """Only the KL looks at it."""
        return self.kl_coef > 0

    def rollout_algo(self) -> DiffusionRolloutAlgoConfig:
        """Say how its trajectories are sampled."""
        return DiffusionRolloutAlgoConfig(
            kind=self.kind,
            noise_level=self.noise_level,
            window_size=self.window_size,
            window_range=self.window_range,
        )

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """Check kind, window and group size against the run."""
        found = {}
        if self.kind is StepKind.ODE:
            known = ", ".join(kind for kind in StepKind if kind is not StepKind.ODE)
            found["kind"] = f"ode has no log-prob to train on; choose one of {known}"
        if facts.samples_per_prompt < 2:
            found["name"] = (
                "flow_grpo compares the samples of a group: rollout.samples_per_prompt is "
                f"{facts.samples_per_prompt}, and must be at least 2"
            )
        steps = facts.num_inference_steps
        if self.window_range is not None:
            wrong = window_mistake(self.window_range, num_steps=steps)
            if wrong:
                found["window_range"] = wrong
        if self.window_size is not None and "window_range" not in found:
            low, high = self.window_range or (0, max(steps // 2, 1))
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


plugin = Plugin(
    api=1,
    options=FlowGRPOOptions,
    target="omni_core.algorithms.flow_grpo:FlowGRPO",
    summary="clipped policy gradient on stochastic denoising steps, full or short windows",
)
