"""RAM: the pretraining target, corrected by the reward around the reference.

    L = mean_D (v - sg[v_ref + m A (x1 - x0 - v_old)])^2.

The reference is what the velocity is held to, and a sample above its group moves it towards what
leads to that sample; m, the inverse temperature of the KL that is implied, is `strength`. Source:
Reinforce Adjoint Matching, arXiv 2605.10759 (without the path-cost correction, as its experiments).
"""

from __future__ import annotations

from torch import Tensor

from omni_core.algorithms.base import OldPolicyAlgorithm
from omni_core.algorithms.ram_options import RAMOptions
from omni_core.engine import LossTerms
from omni_core.forward_process import ForwardLossInputs, velocity_error, velocity_target
from omni_core.reverse_step import Latents


def ram_target(
    reference: Latents, old: Latents, clean: Latents, noise: Latents, advantages: Tensor
) -> dict[str, Tensor]:
    """v_ref + A (x1 - x0 - v_old): modality -> [M, ...], a constant.

    Args:
        reference: modality -> [M, ...], v_ref.
        old: The same of the policy that sampled.
        clean: x0.
        noise: x1.
        advantages: [M], times the strength.
    """
    return {
        name: (
            reference[name]
            + advantages.reshape(-1, *([1] * (target.ndim - 1))) * (target - old[name])
        ).detach()
        for name, target in velocity_target(clean, noise).items()
    }


class RAM(OldPolicyAlgorithm):
    """See the module's docstring."""

    options: RAMOptions

    def loss(self, inputs: ForwardLossInputs) -> LossTerms:
        """Regress to the corrected target."""
        reference = self.reference(inputs)
        target = ram_target(
            reference,
            self.old(inputs),
            inputs.clean,
            inputs.noise,
            self.options.strength * inputs.advantages,
        )
        terms = velocity_error(inputs.current, target)
        metrics = {
            "policy_loss": terms.detach(),
            "reference_deviation": velocity_error(inputs.current, reference).detach(),
        }
        return self.finish(inputs, terms, metrics)
