"""EPG, PEPG and PAR: policy gradients on the evidence lower bound of finished samples.

With x0^ = x_sigma - sigma v and w = max(mean_D |x0^ - x0|, 1e-5), a constant,

    E = -mean_D (x0^ - x0)^2 / w,    rho = exp(E - E_old), a constant,

    EPG:  -rho A E                          PEPG: -rho (A - sg(E - E_old)) E
    PAR:  0.5 rho (A - (E - E_old))^2

and kl_coef mean_D (v - v_ref)^2 is added. A = 0.1 (R - mean of the group), without a standard
deviation. Where old and trained policy are one, rho = 1 and the three have the same gradient. Source:
arXiv 2602.04663, with the adaptive weight of DiffusionNFT (2509.16117).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from omni_core.advantages import GroupAdvantages
from omni_core.algorithms.base import OldPolicyAlgorithm, scaled
from omni_core.algorithms.elbo_options import ElboOptions
from omni_core.choices import ElboForm
from omni_core.engine import LossTerms
from omni_core.forward_process import ForwardLossInputs, adaptive_error


def elbo_terms(form: ElboForm, elbo: Tensor, elbo_old: Tensor, advantages: Tensor) -> Tensor:
    """The policy's loss of M rows.

    Args:
        form: Which gradient.
        elbo: [M], E of the trained policy, with graph.
        elbo_old: [M], E of the policy that sampled, at the same noise and sigma; a constant.
        advantages: [M].

    Returns:
        [M].
    """
    advantages = advantages.detach()
    gain = elbo - elbo_old.detach()
    ratio = gain.detach().exp()
    match ElboForm.parse(form):
        case ElboForm.EPG:
            return -ratio * advantages * elbo
        case ElboForm.PEPG:
            return -ratio * (advantages - gain.detach()) * elbo
        case ElboForm.PAR:
            return 0.5 * ratio * (advantages - gain).square()


class Elbo(OldPolicyAlgorithm):
    """See the module's docstring."""

    options: ElboOptions

    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """Centre by group, and scale."""
        found = super().advantages(rewards, group_ids, valid)
        return scaled(found, self.options.adv_scale)

    def loss(self, inputs: ForwardLossInputs) -> LossTerms:
        """The configured gradient."""
        elbo, elbo_old = (
            -adaptive_error(velocity, inputs.noised, inputs.clean, inputs.sigma)
            for velocity in (inputs.current, self.old(inputs))
        )
        terms = elbo_terms(self.options.form, elbo, elbo_old, inputs.advantages)
        gain = (elbo - elbo_old).detach()
        metrics = {
            "policy_loss": terms.detach(),
            "elbo": elbo.detach(),
            "elbo_gain": gain,
            "ratio": gain.exp(),
        }
        return self.finish(inputs, terms, metrics)
