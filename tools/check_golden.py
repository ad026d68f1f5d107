"""Run every reference vector of a folder through omni_core's public functions.

    python tools/check_golden.py DIR

DIR holds `cases.json` (section -> list of cases with their parameters) and `vectors.safetensors`
(tensors `<case>.<field>`). What a case expects is compared within rtol 1e-5 and atol 2e-6: the
tensors `expected`, `expected_<name>` (also as a list among the parameters) and `expected_grad_<input>`
(the gradient of the case's loss), and those of its metrics that core has. Failures, and cases that core has no function for, are named;
the last line is `N cases, M failed, K not implemented`, and the exit status is 1 when M > 0 and 2
when the folder cannot be read.

A new algorithm is one entry in `HANDLERS`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor

from omni_core.advantages import AdvantageStd, group_advantages
from omni_core.algorithms.diffusion_dpo import dpo_terms, online_dpo_pairs
from omni_core.algorithms.diffusion_nft import nft_terms, reward_probability
from omni_core.algorithms.flow_dppo import dppo_terms
from omni_core.algorithms.grpo_guard import guard_log_ratio, guard_terms
from omni_core.choices import ImportanceLevel, RejectionStatistic, RewardProbability
from omni_core.forward_process import denoising_error, velocity_error
from omni_core.kl import KLForm, gaussian_kl
from omni_core.language_advantages import gae_advantages, outcome_advantages
from omni_core.language_loss import ppo_loss, value_loss
from omni_core.language_options import Aggregation, PolicyForm, PPOLossOptions, ValueLossOptions
from omni_core.policy_loss import clipped_surrogate
from omni_core.reverse_step import StepKind, reverse_step
from omni_core.rollout_correction import rollout_correction
from omni_core.rollout_correction_options import RolloutCorrectionOptions

RTOL = 1e-5
ATOL = 2e-6
NO_SECTION = "(no section)"


class NotImplementedByCoreError(Exception):
    """Core has no function for this section, loss, kind or form."""


class CaseError(Exception):
    """A case is malformed, or core's numbers differ from it."""


@attrs.frozen(kw_only=True)
class Case:
    """One reference vector: parameters, and tensors by field."""

    section: str
    name: str
    params: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def param(self, name: str) -> Any:
        """A parameter; CaseError when it is missing."""
        if name not in self.params:
            raise CaseError(f"parameter {name!r} is missing")
        return self.params[name]

    def tensor(self, name: str) -> Tensor:
        """A tensor; CaseError when it is missing."""
        if name not in self.tensors:
            raise CaseError(f"tensor {self.name}.{name} is missing")
        return self.tensors[name]

    def choice(self, enum: Any, text: str) -> Any:
        """A member of one of core's enums; not implemented when core has no such name."""
        if text not in {member.value for member in enum}:
            raise NotImplementedByCoreError(f"{enum.__name__} {text!r}")
        return enum(text)


@attrs.frozen(kw_only=True)
class Result:
    """What core computed: `<name>` for `expected_<name>`, and metrics without their prefix.

    Every value must be expected by the case: a missing vector is a failure, not one check less.
    """

    values: Mapping[str, Tensor]
    metrics: Mapping[str, Tensor] = attrs.field(factory=dict)


def _reverse_steps(case: Case) -> Result:
    kind = case.choice(StepKind, case.param("kind"))
    step = reverse_step(
        kind,
        {"latents": case.tensor("sample")},
        {"latents": case.tensor("velocity")},
        case.tensor("sigma"),
        case.tensor("sigma_next"),
        sigma_guard=case.tensor("sigma_max"),
        noise_level=case.param("noise_level"),
        next_sample=None if kind is StepKind.ODE else {"latents": case.tensor("prev_sample")},
    )
    values = {"mean": step.mean["latents"], "transition_std": step.std}
    if step.log_prob is not None:
        values["log_prob"] = step.log_prob
    if "expected_sqrt_dt" in case.tensors:
        values["sqrt_dt"] = (case.tensor("sigma") - case.tensor("sigma_next")).sqrt()
    return Result(values=values)


def _advantages(case: Case) -> Result:
    std = AdvantageStd.NONE
    if case.param("norm_by_std"):
        std = AdvantageStd.GLOBAL if case.param("global_std") else AdvantageStd.GROUP
    result = group_advantages(
        case.tensor("rewards").flatten(),
        case.param("group"),
        std=std,
        ddof=case.params.get("ddof", 1),
        eps=case.param("eps"),
        clip=case.params.get("clip"),
    )
    return Result(values={"": result.advantages})


def _flow_grpo(case: Case) -> Result:
    terms = clipped_surrogate(
        case.tensor("log_probs"),
        case.tensor("old_log_probs"),
        case.tensor("advantages"),
        clip_ratio=case.param("clip_ratio"),
        adv_clip_max=case.param("adv_clip_max"),
        weights=case.tensors.get("rollout_is_weights"),
    )
    return Result(values={"loss": terms.loss.mean()}, metrics=terms.metrics())


def _kl(case: Case) -> Result:
    form = case.choice(KLForm, str(case.params.get("kl_form", "exact")).split(":")[0].strip())
    mean, mean_ref = {"latents": case.tensor("mean")}, {"latents": case.tensor("ref_mean")}
    if form is KLForm.EXACT:
        kl = gaussian_kl(mean, mean_ref, case.tensor("std"), form=form)
    else:
        # g is given: take any dt < 0 and s = g sqrt(-dt).
        g = case.tensor("g")
        dt = torch.full_like(g, -0.25)
        kl = gaussian_kl(mean, mean_ref, g * (-dt).sqrt(), form=form, dt=dt)
    return Result(values={"loss": kl.mean()}, metrics={"kl_loss": kl.mean()})


def _distill_kl(case: Case) -> Result:
    kl = gaussian_kl(
        {"latents": case.tensor("mean")},
        {"latents": case.tensor("teacher_mean")},
        case.tensor("std"),
        form=KLForm.EXACT,
    )
    return Result(values={"loss": kl.mean()}, metrics={"distill_kl_loss": kl.mean()})


def _distill_fm_mse(case: Case) -> Result:
    error = velocity_error(
        {"latents": case.tensor("noise_pred")}, {"latents": case.tensor("teacher_noise_pred")}
    )
    return Result(values={"loss": error.mean()}, metrics={"distill_fm_mse_loss": error.mean()})


def _grpo_guard(case: Case) -> Result:
    log_ratio = guard_log_ratio(
        case.tensor("log_probs"),
        case.tensor("old_log_probs"),
        {"latents": case.tensor("mean")},
        {"latents": case.tensor("old_mean")},
        case.tensor("transition_std"),
    )
    terms = guard_terms(
        log_ratio,
        case.tensor("advantages"),
        -case.tensor("sqrt_dt").square(),
        clip_ratio=case.param("clip_ratio"),
        adv_clip_max=case.param("adv_clip_max"),
    )
    plain = (case.tensor("old_log_probs") - case.tensor("log_probs")).mean()
    return Result(values={"loss": terms.loss.mean()}, metrics={**terms.metrics(), "ppo_kl": plain})


def _flow_dppo(case: Case) -> Result:
    std = case.tensor("transition_std")
    kl = gaussian_kl(
        {"latents": case.tensor("mean")},
        {"latents": case.tensor("old_mean")},
        std if case.param("add_kl_coefficient") else torch.ones_like(std),
        form=KLForm.EXACT,
    )
    terms = dppo_terms(
        case.tensor("log_probs"),
        case.tensor("old_log_probs"),
        case.tensor("advantages"),
        kl,
        max_kl=case.param("kl_mask_threshold"),
    )
    return Result(values={"loss": terms.loss.mean()}, metrics=terms.metrics())


def _dpo(case: Case) -> Result:
    latents, noise = {"latents": case.tensor("latents")}, {"latents": case.tensor("noise")}
    error = denoising_error({"latents": case.tensor("noise_pred")}, latents, noise)
    reference = denoising_error({"latents": case.tensor("ref_noise_pred")}, latents, noise)
    terms = dpo_terms(
        error[0::2], error[1::2], reference[0::2], reference[1::2], beta=case.param("dpo_beta")
    )
    return Result(values={"loss": terms.loss.mean()}, metrics=terms.metrics())


def _diffusion_nft(case: Case) -> Result:
    velocity = {"latents": case.tensor("forward_prediction")}
    old = {"latents": case.tensor("old_prediction")}
    terms = nft_terms(
        velocity,
        old,
        {"latents": case.tensor("xt")},
        {"latents": case.tensor("x0")},
        case.tensor("t"),
        case.tensor("reward_prob"),
        beta=case.param("mix_beta"),
        scale=case.param("adv_clip_max"),
        min_weight=case.param("adaptive_weight_min"),
    )
    kl = velocity_error(velocity, {"latents": case.tensor("ref_prediction")})
    loss = (terms.loss + case.param("ref_kl_coef") * kl).mean()
    return Result(
        values={"loss": loss},
        metrics={
            "policy_loss": terms.loss.mean(),
            "positive_loss": terms.positive.mean(),
            "negative_loss": terms.negative.mean(),
            "ref_kl_loss": kl.mean(),
            "old_deviate": velocity_error(velocity, old).mean(),
            "reward_prob_mean": case.tensor("reward_prob").mean(),
            "total_loss": loss,
        },
    )


def _nft_reward_prob(case: Case) -> Result:
    probability = reward_probability(
        case.tensor("advantages"),
        mode=case.choice(RewardProbability, case.param("adv_mode")),
        adv_clip_max=case.param("adv_clip_max"),
    )
    return Result(values={"": probability})


def _online_dpo_pairs(case: Case) -> Result:
    return Result(values={"indices": online_dpo_pairs(case.tensor("scores"), case.param("group"))})


def _rollout_correction(case: Case) -> Result:
    level, statistic = case.param("rollout_is"), case.param("rollout_rs")
    band = case.param("rollout_rs_threshold")
    options = RolloutCorrectionOptions(
        importance=None if level is None else case.choice(ImportanceLevel, level),
        importance_threshold=case.param("rollout_is_threshold"),
        rejection=None if statistic is None else case.choice(RejectionStatistic, statistic),
        **({} if band is None else {"band": tuple(float(n) for n in str(band).split("_"))}),
    )
    found = rollout_correction(
        options,
        case.tensor("old_log_probs"),
        case.tensor("rollout_log_probs"),
        floor=case.tensors.get("floor"),
    )
    return Result(values={"weights": found.weights})


def _language_policy(case: Case) -> Result:
    form = case.choice(PolicyForm, case.param("loss"))
    aggregation = case.choice(Aggregation, case.param("agg"))
    if form is PolicyForm.GEO_MEAN:
        aggregation = None  # the published code takes the mean over sequences, whatever `agg` says
    options = PPOLossOptions(
        form=form,
        clip_ratio_low=case.param("clip_ratio_low"),
        clip_ratio_high=case.param("clip_ratio_high"),
        dual_clip=case.param("dual_clip_c"),
        aggregation=aggregation,
    )
    loss = ppo_loss(
        options,
        case.tensor("log_probs"),
        case.tensor("old_log_probs"),
        case.tensor("advantages"),
        case.tensor("mask").bool(),
    )
    return Result(values={"loss": loss.loss})


def _language_value(case: Case) -> Result:
    options = ValueLossOptions(
        clip_range=case.param("cliprange_value"),
        aggregation=case.choice(Aggregation, case.param("agg")),
    )
    loss = value_loss(
        options,
        case.tensor("vpreds"),
        case.tensor("values"),
        case.tensor("returns"),
        case.tensor("mask").bool(),
    )
    return Result(values={"loss": loss.loss})


def _gae(case: Case) -> Result:
    result = gae_advantages(
        case.tensor("token_level_rewards"),
        case.tensor("values"),
        case.tensor("mask").bool(),
        gamma=case.param("gamma"),
        lam=case.param("lam"),
    )
    return Result(values={"advantages": result.advantages, "returns": result.returns})


def _grpo_outcome(case: Case) -> Result:
    result = outcome_advantages(
        case.tensor("token_level_rewards"), case.param("group"), case.tensor("mask").bool()
    )
    return Result(values={"advantages": result.advantages})


HANDLERS: dict[str, Callable[[Case], Result]] = {
    "reverse_steps": _reverse_steps,
    "advantages": _advantages,
    "losses/flow_grpo": _flow_grpo,
    "losses/kl": _kl,
    "losses/distill_kl": _distill_kl,
    "losses/distill_fm_mse": _distill_fm_mse,
    "losses/grpo_guard": _grpo_guard,
    "losses/flow_dppo": _flow_dppo,
    "losses/dpo": _dpo,
    "losses/diffusion_nft": _diffusion_nft,
    "nft_reward_prob": _nft_reward_prob,
    "online_dpo_pairs": _online_dpo_pairs,
    "rollout_correction": _rollout_correction,
    **{f"language/{form}": _language_policy for form in PolicyForm},
    "language/value": _language_value,
    "language/lm_gae": _gae,
    "language/lm_grpo": _grpo_outcome,
}
"""`section/loss`, `section/name` (a case's name without its number), or `section` for all its cases."""


def check(case: Case) -> None:
    """Compare one case.

    Raises:
        NotImplementedByCoreError: core has no function for it.
        CaseError: the case is malformed or core's numbers differ; the message holds every difference.
    """
    handler = _handler(case)
    expected = {
        name.removeprefix("expected").removeprefix("_"): value
        for name, value in {**_listed(case), **case.tensors}.items()
        if name == "expected" or name.startswith("expected_")
    }
    inputs = [name.removeprefix("grad_") for name in expected if name.startswith("grad_")]
    leaves = {name: case.tensor(name).clone().requires_grad_() for name in inputs}
    result = handler(attrs.evolve(case, tensors={**case.tensors, **leaves}))
    values = dict(result.values)
    for name in values.keys() - expected.keys():
        raise CaseError(f"tensor {case.name}.{_field(name)} is missing")
    if leaves:
        grads = torch.autograd.grad(values["loss"], list(leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            values[f"grad_{name}"] = torch.zeros_like(leaf) if grad is None else grad
    differences = []
    for name, value in expected.items():
        differences.append(_difference(_field(name), values.get(name), value))
    for name, number in case.params.get("metrics", {}).items():
        got = result.metrics.get(name.rsplit("/", 1)[-1])
        if got is not None:
            differences.append(_difference(name, got, torch.tensor(number, dtype=torch.float64)))
    if any(differences):
        raise CaseError("; ".join(text for text in differences if text))


def _handler(case: Case) -> Callable[[Case], Result]:
    kind = case.params.get("loss", case.name.rstrip("0123456789"))
    for key in (f"{case.section}/{kind}", case.section):
        if key in HANDLERS:
            return HANDLERS[key]
    raise NotImplementedByCoreError(f"{case.section}/{kind}")


def _listed(case: Case) -> dict[str, Tensor]:
    """What a case expects as a list of numbers among its parameters."""
    return {
        name: torch.tensor(value)
        for name, value in case.params.items()
        if name.startswith("expected_") and isinstance(value, list)
    }


def _field(name: str) -> str:
    return f"expected_{name}" if name else "expected"


def _difference(name: str, got: Tensor | None, expected: Tensor) -> str:
    """Why core's value is not the expected one; empty when it is."""
    if got is None:
        return f"core gave no value for {name}"
    ours, theirs = got.detach().double().flatten(), expected.double().flatten()
    if ours.shape != theirs.shape:
        return f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if torch.allclose(ours, theirs, rtol=RTOL, atol=ATOL):
        return ""
    error = (ours - theirs).abs()
    worst = int(error.nan_to_num(nan=float("inf")).argmax())
    return (
        f"{name}[{worst}] is {float(ours[worst]):.9g}, expected {float(theirs[worst]):.9g} "
        f"(off by {float(error[worst]):.3g})"
    )


def load_cases(folder: Path) -> list[Case]:
    """Every case of a folder, and one (malformed) for each group of tensors that no case names.

    Raises:
        OSError, ValueError: a file is missing or not in the format.
    """
    sections = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    if not isinstance(sections, dict):
        raise ValueError("cases.json must map sections to lists of cases")
    vectors: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(folder / "vectors.safetensors").items():
        name, _, field = key.partition(".")
        vectors.setdefault(name, {})[field] = value
    cases: list[Case] = []
    for section, entries in sections.items():
        for index, entry in enumerate(entries):
            params = _parameters(entry)
            name = str(params.get("name", f"[{index}]"))
            tensors = vectors.get(name, {})
            cases.append(Case(section=section, name=name, params=params, tensors=tensors))
    named = {case.name for case in cases}
    orphans = [
        Case(section=NO_SECTION, name=name, params={}, tensors=tensors)
        for name, tensors in vectors.items()
        if name not in named
    ]
    return cases + orphans


def _parameters(entry: Any) -> dict[str, Any]:
    """A case's fields with its `params` among them; what is no case stays to be named as malformed."""
    if not isinstance(entry, dict) or not isinstance(entry.get("params", {}), dict):
        return {"malformed": entry}
    return {**entry, **entry.get("params", {})}


def run(cases: Iterable[Case], report: Callable[[str], None]) -> tuple[int, int, int]:
    """Check all cases, reporting a line for each that is not a plain success.

    Returns:
        (cases, failed, not implemented)
    """
    count = failed = missing = 0
    for case in cases:
        count += 1
        label = f"{case.section}/{case.name}"
        try:
            if case.section == NO_SECTION:
                raise CaseError("vectors.safetensors has tensors of a case that cases.json lacks")
            if "name" not in case.params:
                raise CaseError(f"no case, or one without a name: {dict(case.params)}")
            check(case)
        except NotImplementedByCoreError as error:
            missing += 1
            report(f"not implemented: {label}: {error}")
        # A malformed case reaches core's own argument checks (ValueError and its like).
        except (CaseError, ValueError, TypeError, LookupError, RuntimeError) as error:
            failed += 1
            report(f"failed: {label}: {error}")
    return count, failed, missing


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds cases.json and vectors.safetensors")
    folder = parser.parse_args(arguments).folder
    try:
        cases = load_cases(folder)
    except Exception as error:  # noqa: BLE001 - whatever the two parsers raise means the same here
        print(f"{folder} is no folder of reference vectors: {error}", file=sys.stderr)
        return 2
    count, failed, missing = run(cases, print)
    print(f"{count} cases, {failed} failed, {missing} not implemented")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
