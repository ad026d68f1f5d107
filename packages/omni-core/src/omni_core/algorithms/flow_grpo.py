"""FlowGRPO: PPO's clipped surrogate on the log-probs of stochastic denoising steps.

For a group of samples of one prompt, A = (R - group mean) / (std + eps), the same for all steps of a
sample. With r = exp(logp - logp_old), both means over the sample's D latent values,

    L = mean over (sample, step) of max(-A r, -A clip(r, 1 - c, 1 + c)) + beta KL(policy || reference).

Every step but the last is stochastic, or a random window of `window_size` steps, one for each group
(Flow-GRPO-Fast). KL has two forms, `exact` and `flow_grpo` (times -dt), to which published betas belong.

Source: Flow-GRPO, arXiv 2505.05470, and its official code.
"""

from __future__ import annotations

from omni_core.algorithms.base import PolicyGradient
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.engine import LossInputs, LossTerms
from omni_core.policy_loss import clipped_surrogate


class FlowGRPO(PolicyGradient):
    """See the module's docstring."""

    options: FlowGRPOOptions

    def loss(self, inputs: LossInputs) -> LossTerms:
        """Clipped surrogate plus KL."""
        surrogate = clipped_surrogate(
            inputs.current.require_log_prob(),
            inputs.old_log_probs,
            inputs.advantages,
            clip_ratio=self.options.clip,
            adv_clip_max=self.options.adv_clip,
        )
        return self.finish(inputs, surrogate.loss, surrogate.row_metrics())
