"""One function takes every reverse step, for sampling and for scoring, so both see the same numbers.

Each kind is a row of a table: the mean is linear in the sample and the velocity,
mu = a x + b v, and the next sample is mu + s * noise with s the transition standard deviation. KL,
GRPO-Guard, DPPO, distillation and rollout correction take a, b and s from here.

Letters: B rows, D latent values per row over all modalities; x sample, v velocity, dt = sigma_next -
sigma < 0, eta noise level. Sources: Flow-GRPO arXiv 2505.05470 (`sde`), CPS 2509.05952 (`cps`),
DanceGRPO 2505.07818 (`dance_sde`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from omni_core.choices import StepKind as StepKind
from omni_core.row_mean import row_mean

Latents: TypeAlias = Mapping[str, Tensor]
"""Modality -> [B, ...]: what one batch of samples is made of (image, video, audio)."""

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@attrs.frozen(kw_only=True, eq=False)
class ReverseStep:
    """What one reverse step is, for B rows."""

    next_sample: Latents
    """modality -> [B, ...]: drawn, or the one that was scored. Never carries a gradient."""
    mean: Latents
    """modality -> [B, ...]: mu, differentiable in the velocity."""
    std: Tensor
    """[B]: s, what the noise is multiplied by; 0 where the step is deterministic."""
    log_prob: Tensor | None
    """[B]: mean over D in the form that the literature takes ratios of (for `cps` without 1/(2 s^2)
    and normaliser, since published clip ranges are tuned to that); None for a deterministic step."""
    log_density: Tensor | None
    """[B]: mean over D of the true Gaussian log-density; None for a deterministic step."""

    def require_log_prob(self) -> Tensor:
        """`log_prob` [B].

        Raises:
            ValueError: the step is deterministic (kind `ode`, or noise level 0).
        """
        if self.log_prob is None:
            raise ValueError(
                "a deterministic step has no log-prob: take a stochastic kind "
                f"({_stochastic_names()}) with a noise level above 0"
            )
        return self.log_prob


@attrs.frozen(kw_only=True, eq=False)
class TransitionCoefficients:
    """mu = sample * x + velocity * v and s = std, each float64 [B]."""

    sample: Tensor
    velocity: Tensor
    std: Tensor


@attrs.frozen(kw_only=True, eq=False)
class _KindEntry:
    """One row of the table of kinds; all its numbers are float64 [B]."""

    coefficients: Callable[[Tensor, Tensor, Tensor, float], TransitionCoefficients]
    stochastic: bool = True
    log_prob_is_density: bool = True


def _sde_coefficients(
    sigma: Tensor, sigma_next: Tensor, diffusion: Tensor
) -> TransitionCoefficients:
    dt = sigma_next - sigma
    drift = diffusion.square() / (2.0 * sigma)
    return TransitionCoefficients(
        sample=1.0 + drift * dt,
        velocity=(1.0 + drift * (1.0 - sigma)) * dt,
        std=diffusion * (-dt).sqrt(),
    )


def _flow_sde(
    sigma: Tensor, sigma_next: Tensor, guard: Tensor, eta: float
) -> TransitionCoefficients:
    diffusion = eta * (sigma / (1.0 - torch.minimum(sigma, guard))).sqrt()
    return _sde_coefficients(sigma, sigma_next, diffusion)


def _dance_sde(
    sigma: Tensor, sigma_next: Tensor, guard: Tensor, eta: float
) -> TransitionCoefficients:
    return _sde_coefficients(sigma, sigma_next, torch.full_like(sigma, eta))


def _cps(sigma: Tensor, sigma_next: Tensor, guard: Tensor, eta: float) -> TransitionCoefficients:
    # sqrt(sigma_next^2 - s^2) is sigma_next |cos|, without the cancellation.
    noise_kept = sigma_next * abs(math.cos(eta * math.pi / 2.0))
    return TransitionCoefficients(
        sample=(1.0 - sigma_next) + noise_kept,
        velocity=noise_kept * (1.0 - sigma) - (1.0 - sigma_next) * sigma,
        std=sigma_next * math.sin(eta * math.pi / 2.0),
    )


def _euler(sigma: Tensor, sigma_next: Tensor, guard: Tensor, eta: float) -> TransitionCoefficients:
    return TransitionCoefficients(
        sample=torch.ones_like(sigma),
        velocity=sigma_next - sigma,
        std=torch.zeros_like(sigma),
    )


_KINDS: dict[StepKind, _KindEntry] = {
    StepKind.SDE: _KindEntry(coefficients=_flow_sde),
    StepKind.CPS: _KindEntry(coefficients=_cps, log_prob_is_density=False),
    StepKind.DANCE_SDE: _KindEntry(coefficients=_dance_sde),
    StepKind.ODE: _KindEntry(coefficients=_euler, stochastic=False),
}


def transition_coefficients(
    kind: StepKind | str,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    sigma_guard: Tensor,
    noise_level: float,
) -> TransitionCoefficients:
    """Coefficients of one reverse step per row, in float64 on sigma's device.

    Give the sigmas on the CPU, as `FlowMatchSchedule.at` returns them: they are checked here, and
    checks of tensors on another device wait for it.

    Args:
        kind: a `StepKind` or its name.
        sigma: [B], where the step starts.
        sigma_next: [B], where it ends.
        sigma_guard: one value, `FlowMatchSchedule.sigma_guard`; `sde` divides by
            1 - min(sigma, sigma_guard). A test for sigma == 1 misses a first sigma of 0.999999.
        noise_level: eta >= 0; 0 makes every kind the Euler step.

    Raises:
        ValueError: unknown kind, shapes other than [B], sigmas that do not decrease, a guard that is
            not below 1, a noise level below 0, or a stochastic step with noise that ends at sigma 0.
    """
    entry = _KINDS[StepKind.parse(kind)]
    if sigma.ndim != 1 or sigma.shape != sigma_next.shape:
        raise ValueError(
            "sigma and sigma_next must be [B] alike, got "
            f"{tuple(sigma.shape)} and {tuple(sigma_next.shape)}"
        )
    if not (math.isfinite(noise_level) and noise_level >= 0.0):
        raise ValueError(f"noise_level must be a number of at least 0, got {noise_level}")
    start, stop = sigma.double(), sigma_next.double()
    guard = sigma_guard.double().reshape(()).to(start.device)
    if not 0.0 <= guard.item() < 1.0:
        raise ValueError(f"sigma_guard must be within [0, 1), got {guard.item():.9g}")
    noisy = entry.stochastic and noise_level > 0.0
    for row, (high, low) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        if not 1.0 >= high > low >= 0.0:
            raise ValueError(
                f"row {row}: a step goes down within [0, 1], got sigma {high:.9g} to {low:.9g}"
            )
        if noisy and low == 0.0:
            raise ValueError(
                f"row {row}: the step from sigma {high:.9g} ends at sigma 0 and is never "
                f"stochastic; take kind {StepKind.ODE.value!r} for it"
            )
    return entry.coefficients(start, stop, guard, float(noise_level))


def transition_std(
    kind: StepKind | str,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    sigma_guard: Tensor,
    noise_level: float,
) -> Tensor:
    """[B]: s, what the noise of a step is multiplied by, bit-equal to `ReverseStep.std`.

    float32, or float64 where sigma is; arguments and errors as in `transition_coefficients`.
    """
    coefficients = transition_coefficients(
        kind, sigma, sigma_next, sigma_guard=sigma_guard, noise_level=noise_level
    )
    dtype = torch.float64 if sigma.dtype == torch.float64 else torch.float32
    return coefficients.std.to(dtype)


def reverse_step(
    kind: StepKind | str,
    sample: Latents,
    velocity: Latents,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    sigma_guard: Tensor,
    noise_level: float,
    noise: Latents | None = None,
    next_sample: Latents | None = None,
) -> ReverseStep:
    """Take one reverse step (`noise` given) or score one that was taken (`next_sample` given).

    Rows may be at different steps. Works in float32, or in float64 where a latent is; lower
    precisions are raised first. What is drawn is scored as a constant, exactly as it is scored when
    it comes back. A caller that stores latents in a lower precision rounds them and scores the
    rounded ones. A row's result has the same bits alone and in any batch.

    Args:
        kind: a `StepKind` or its name.
        sample: modality -> [B, ...], x.
        velocity: the same modalities and shapes, v.
        sigma: [B], where each row's step starts; best on the CPU (see `transition_coefficients`).
        sigma_next: [B], where it ends.
        sigma_guard: one value, `FlowMatchSchedule.sigma_guard`.
        noise_level: eta >= 0.
        noise: standard normal, shaped as the sample: draw the next sample. A deterministic step
            (kind `ode`, or noise level 0) needs none and uses none.
        next_sample: shaped as the sample: score this one; a gradient in it is cut.

    Raises:
        ValueError: as in `transition_coefficients`; modalities, shapes or devices that differ; not
            exactly one of `noise` and `next_sample` for a stochastic step, or a `next_sample` for
            a deterministic one, which has no density.
    """
    kind = StepKind.parse(kind)
    coefficients = transition_coefficients(
        kind, sigma, sigma_next, sigma_guard=sigma_guard, noise_level=noise_level
    )
    stochastic = _KINDS[kind].stochastic and noise_level > 0.0
    _check_noise(kind, stochastic, noise, next_sample)
    for name, latents in (("velocity", velocity), ("noise", noise), ("next_sample", next_sample)):
        if latents is not None:
            _check_alike(sample, latents, name, rows=int(sigma.shape[0]))
    dtype = working_dtype(sample, velocity)
    device = next(iter(sample.values())).device
    scale, pull, std = (
        value.to(dtype).to(device)
        for value in (coefficients.sample, coefficients.velocity, coefficients.std)
    )
    mean = {
        name: _per_row(scale, x) * x.to(dtype) + _per_row(pull, x) * velocity[name].to(dtype)
        for name, x in sample.items()
    }
    if not stochastic:
        constant = {name: mu.detach() for name, mu in mean.items()}
        return ReverseStep(
            next_sample=constant, mean=mean, std=std, log_prob=None, log_density=None
        )
    if next_sample is not None:
        after = {name: next_sample[name].detach().to(dtype) for name in sample}
    else:
        assert noise is not None
        after = {
            name: (mu + _per_row(std, mu) * noise[name].to(dtype)).detach()
            for name, mu in mean.items()
        }
    squared = row_mean({name: (after[name] - mu).square() for name, mu in mean.items()})
    precision = (0.5 / coefficients.std.square()).to(dtype).to(device)
    normaliser = (coefficients.std.log() + _HALF_LOG_TWO_PI).to(dtype).to(device)
    log_density = -(squared * precision) - normaliser
    log_prob = log_density if _KINDS[kind].log_prob_is_density else -squared
    return ReverseStep(
        next_sample=after, mean=mean, std=std, log_prob=log_prob, log_density=log_density
    )


def old_mean(step: ReverseStep, noise: Latents) -> dict[str, Tensor]:
    """Mean of the policy that drew a step, from the noise that it drew it with: x' - s noise.

    The policy itself is not needed. Where the rollout stored x' in float32, this is that policy's
    mean to the rounding of x'.

    Args:
        step: The step as any policy scores it: `next_sample` and `std` are the rollout's.
        noise: modality -> [B, ...], what the rollout multiplied s by.

    Returns:
        modality -> [B, ...], without a gradient.

    Raises:
        ValueError: modalities or shapes that differ.
    """
    _check_alike(step.next_sample, noise, "noise", rows=int(step.std.shape[0]))
    return {
        name: (x - _per_row(step.std, x) * noise[name].to(x)).detach()
        for name, x in step.next_sample.items()
    }


def working_dtype(*latents: Latents) -> torch.dtype:
    """float64 where any of the tensors is float64, else float32: what core computes in."""
    dtypes = {value.dtype for mapping in latents for value in mapping.values()}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _per_row(values: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...] with as many axes as `like`."""
    return values.reshape(-1, *([1] * (like.ndim - 1)))


def _stochastic_names() -> str:
    return ", ".join(kind.value for kind, entry in _KINDS.items() if entry.stochastic)


def _check_noise(
    kind: StepKind, stochastic: bool, noise: Latents | None, next_sample: Latents | None
) -> None:
    if stochastic and (noise is None) == (next_sample is None):
        got = "neither" if noise is None else "both"
        raise ValueError(
            f"kind {kind.value!r} takes noise (to draw) or next_sample (to score), got {got}"
        )
    if not stochastic and next_sample is not None:
        raise ValueError(
            f"kind {kind.value!r} at this noise level is deterministic: there is no density to "
            f"score next_sample with; take one of {_stochastic_names()} with a noise level above 0"
        )


def _check_alike(sample: Latents, latents: Latents, name: str, *, rows: int) -> None:
    if not sample or set(sample) != set(latents):
        raise ValueError(f"sample has modalities {sorted(sample)}, {name} has {sorted(latents)}")
    for modality, x in sample.items():
        value = latents[modality]
        if x.ndim == 0 or x.shape[0] != rows or x.shape != value.shape:
            raise ValueError(
                f"modality {modality!r}: sample {tuple(x.shape)} and {name} {tuple(value.shape)} "
                f"must be shaped alike with {rows} rows (one per sigma)"
            )
        if x.device != value.device:
            raise ValueError(
                f"modality {modality!r}: sample is on {x.device}, {name} on {value.device}"
            )
