"""AWM: the pretraining loss as a log-prob, weighted by the advantage.

With logp = -mean_D (v - (x1 - x0))^2 and r = exp(logp - logp_old),

    L = max(-A r, -A clip(r, 1 - c, 1 + c)) + kl_coef mean_D (v - v_ref)^2 + ema_coef mean_D (v - v_ema)^2.

On policy r is 1, and the gradient is A grad mean_D (v - (x1 - x0))^2. v_ema follows the trained policy
after every optimizer step n: ema <- d ema + (1 - d) new, d = min(0.001 n, 0.3). Source: Advantage
Weighted Matching, arXiv 2509.25050, and its official code (c = 1, ema_coef = 1, kl_coef = 0.003).
"""

from __future__ import annotations

from omni_core.algorithm import AdapterOperations, Policy, Prediction
from omni_core.algorithms.awm_options import AWMOptions
from omni_core.algorithms.base import OldPolicyAlgorithm, required
from omni_core.engine import LossTerms
from omni_core.forward_process import ForwardLossInputs, denoising_error, velocity_error
from omni_core.policy_loss import clipped_surrogate


class AWM(OldPolicyAlgorithm):
    """See the module's docstring."""

    options: AWMOptions

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Also of the moving average, where it is looked at."""
        ema = (self.asks(Policy.EMA),) if self.options.ema_coef > 0 else ()
        return (*super().predictions, *ema)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Also the moving average, where it is looked at."""
        return (*super().adapters, "ema") if self.options.ema_coef > 0 else super().adapters

    def after_update(self, adapters: AdapterOperations, *, optimizer_step: int) -> None:
        """Let the moving average follow."""
        if self.options.ema_coef > 0:
            decay = min(0.001 * optimizer_step, self.options.ema_decay)
            adapters.ema_update_adapter("default", "ema", decay)

    def loss(self, inputs: ForwardLossInputs) -> LossTerms:
        """Clipped surrogate, and the distance from the moving average."""
        log_probs = -denoising_error(inputs.current, inputs.clean, inputs.noise)
        old = -denoising_error(self.old(inputs), inputs.clean, inputs.noise)
        surrogate = clipped_surrogate(
            log_probs,
            old,
            inputs.advantages,
            clip_ratio=self.options.clip_ratio,
            adv_clip_max=self.options.adv_clip,
        )
        metrics = {**surrogate.row_metrics(), "denoising_error": -log_probs.detach()}
        terms = surrogate.loss
        if self.options.ema_coef > 0:
            ema = required(inputs.ema, "the moving average's prediction")
            away = velocity_error(inputs.current, ema)
            terms = terms + self.options.ema_coef * away
            metrics["ema_deviation"] = away.detach()
        return self.finish(inputs, terms, metrics)
