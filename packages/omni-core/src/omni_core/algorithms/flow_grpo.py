"""FlowGRPO: PPO's clipped surrogate on the log-probs of stochastic denoising steps.

For a group of samples of one prompt, A = (R - group mean) / (std + eps), the same for all steps of a
sample. With r = exp(logp - logp_old), both means over the sample's D latent values,

    L = mean over (sample, step) of max(-A r, -A clip(r, 1 - c, 1 + c)) + beta KL(policy || reference).

Every step but the last is stochastic, or a random window of `window_size` steps, one for each group
(Flow-GRPO-Fast). KL has two forms, `exact` and `flow_grpo` (times -dt), to which published betas belong.

Source: Flow-GRPO, arXiv 2505.05470, and its official code.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from omni_core.advantages import GroupAdvantages, group_advantages
from omni_core.algorithm import Algorithm, Policy, Prediction
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.engine import LossInputs, LossTerms
from omni_core.kl import gaussian_kl
from omni_core.policy_loss import clipped_surrogate
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import derive_seed


class FlowGRPO(Algorithm):
    """See the module's docstring."""

    options: FlowGRPOOptions

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The trained policy, and the reference where a KL is asked for."""
        reference = (Prediction(policy=Policy.REFERENCE),) if self.options.needs_reference else ()
        return (Prediction(), *reference)

    def window(self, schedule: FlowMatchSchedule, *, seed: int, iteration: int) -> tuple[int, ...]:
        """All steps but the last, or a random short window."""
        del iteration
        size = self.options.window_size
        if size is None:
            low, high = self.options.window_range or (0, schedule.num_steps - 1)
            start, stop = low, high
        else:
            low, high = self.options.window_range or (0, max(schedule.num_steps // 2, 1))
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

    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """Centre by group, divide by the configured standard deviation, clip."""
        return group_advantages(
            rewards,
            group_ids,
            valid=valid,
            std=self.options.std,
            ddof=self.options.ddof,
            eps=self.options.eps,
            clip=self.options.adv_clip,
        )

    def loss(self, inputs: LossInputs) -> LossTerms:
        """Clipped surrogate plus KL."""
        log_probs = inputs.current.require_log_prob()
        surrogate = clipped_surrogate(
            log_probs,
            inputs.old_log_probs,
            inputs.advantages,
            clip_ratio=self.options.clip,
            adv_clip_max=self.options.adv_clip,
        )
        metrics = {
            "policy_loss": surrogate.loss.detach(),
            "ratio": surrogate.ratio,
            "clip_fraction": (surrogate.clipped_higher | surrogate.clipped_lower).float(),
            "clip_fraction_higher": surrogate.clipped_higher.float(),
            "clip_fraction_lower": surrogate.clipped_lower.float(),
            "approx_kl": -surrogate.log_ratio,
        }
        terms = surrogate.loss
        if self.options.needs_reference:
            if inputs.reference is None:
                msg = "flow_grpo with kl_coef > 0 needs the reference's prediction"
                raise ValueError(msg)
            kl = gaussian_kl(
                inputs.current.mean,
                inputs.reference.mean,
                inputs.current.std,
                form=self.options.kl_form,
                dt=inputs.dt,
            )
            terms = terms + self.options.kl_coef * kl
            metrics["kl"] = kl.detach()
        return LossTerms(terms=terms, metrics={**metrics, "loss": terms.detach()})
