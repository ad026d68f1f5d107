"""KL of one reverse step to a reference or teacher that shares its standard deviation.

Both forms take the transition standard deviation s of reverse_step. `exact` is the divergence of the
two Gaussians per latent value; `flow_grpo` is what that paper's code computes, exact times -dt, and
the published weights (0.04, 0.01) belong to it. Letters: B rows, D values per row.
"""

from __future__ import annotations

from torch import Tensor

from omni_core.choices import KLForm as KLForm
from omni_core.choices import StepKind
from omni_core.reverse_step import Latents, transition_coefficients, working_dtype
from omni_core.row_mean import row_mean


def gaussian_kl(
    mean: Latents,
    mean_ref: Latents,
    std: Tensor,
    *,
    form: KLForm,
    dt: Tensor | None = None,
) -> Tensor:
    """KL from the policy's step to the reference's, per row and latent value.

    Args:
        mean: modality -> [B, ...], `ReverseStep.mean` of the policy.
        mean_ref: the same of the reference, on the same samples and sigmas.
        std: [B] > 0, `ReverseStep.std`. Not checked for 0 (that would wait for the device): a
            deterministic step has no KL and gives inf or nan.
        form: which number is meant.
        dt: [B], sigma_next - sigma < 0; `flow_grpo` needs it, `exact` ignores it.

    Returns:
        [B], differentiable in both means.

    Raises:
        ValueError: modalities or shapes that differ, or `flow_grpo` without dt.
    """
    squared = row_mean(squared_differences(mean, mean_ref))
    if std.shape != squared.shape:
        raise ValueError(f"std must be {tuple(squared.shape)}, got {tuple(std.shape)}")
    exact = squared / (2.0 * std.square())
    match KLForm.parse(form):
        case KLForm.EXACT:
            return exact
        case KLForm.FLOW_GRPO:
            if dt is None or dt.shape != squared.shape:
                got = None if dt is None else tuple(dt.shape)
                raise ValueError(f"form 'flow_grpo' needs dt of {tuple(squared.shape)}, got {got}")
            return exact * -dt.to(exact)


def velocity_kl(
    kind: StepKind | str,
    velocity: Latents,
    velocity_ref: Latents,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    sigma_guard: Tensor,
    noise_level: float,
) -> Tensor:
    """The exact form from two velocities on one sample: (b / s)^2 / 2 * mean_D (v - v_ref)^2.

    b is the velocity's coefficient in the mean of `kind`. For `sde` this is the formula of the
    Flow-GRPO paper (arXiv 2505.05470). It equals `gaussian_kl(form=exact)` without the means'
    cancellation.

    Returns:
        [B], differentiable in both velocities; arguments and errors as in
        `transition_coefficients` and `gaussian_kl`.

    Raises:
        ValueError: also for a deterministic step, which has no KL.
    """
    coefficients = transition_coefficients(
        kind, sigma, sigma_next, sigma_guard=sigma_guard, noise_level=noise_level
    )
    if not noise_level > 0.0 or StepKind.parse(kind) is StepKind.ODE:
        raise ValueError("a deterministic step has no KL")
    squared = row_mean(squared_differences(velocity, velocity_ref))
    factor = 0.5 * (coefficients.velocity / coefficients.std).square()
    return squared * factor.to(squared)


def squared_differences(ours: Latents, theirs: Latents) -> dict[str, Tensor]:
    """(ours - theirs)^2, modality by modality, in the working dtype of both.

    Raises:
        ValueError: modalities or shapes that differ.
    """
    if set(ours) != set(theirs):
        raise ValueError(f"modalities differ: {sorted(ours)} and {sorted(theirs)}")
    dtype = working_dtype(ours, theirs)
    squared = {}
    for name, value in ours.items():
        other = theirs[name]
        if value.shape != other.shape:
            raise ValueError(
                f"modality {name!r}: shapes differ, {tuple(value.shape)} and {tuple(other.shape)}"
            )
        squared[name] = (value.to(dtype) - other.to(dtype)).square()
    return squared
