"""Closed-form numbers of the published formulas in float64 (data/golden/identities.json)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_core.advantages import AdvantageStd, group_advantages
from omni_core.kl import KLForm, gaussian_kl, velocity_kl
from omni_core.reverse_step import ReverseStep, StepKind, reverse_step
from omni_core.schedule import FlowMatchSchedule

IDENTITIES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "golden" / "identities.json").read_text()
)
SIGMAS = torch.tensor(IDENTITIES["sigmas_shift3_T10"], dtype=torch.float64)
K = torch.arange(8, dtype=torch.float64).reshape(2, 4)
SAMPLE, VELOCITY, NOISE = torch.sin(1 + K), torch.cos(2 + 3 * K), torch.sin(5 + 7 * K)
NEW_VELOCITY = VELOCITY + 0.01 * torch.cos(K)
STEPS = sorted(IDENTITIES["steps"])


def take(kind: StepKind, index: int, eta: float, velocity: Tensor, **given: Any) -> ReverseStep:
    return reverse_step(
        kind,
        {"x": SAMPLE},
        {"x": velocity},
        SIGMAS[index].expand(2),
        SIGMAS[index + 1].expand(2),
        sigma_guard=SIGMAS[1],
        noise_level=eta,
        **given,
    )


def old_and_new(kind: StepKind, index: int, eta: float) -> tuple[ReverseStep, ReverseStep]:
    old = take(kind, index, eta, VELOCITY, noise={"x": NOISE})
    return old, take(kind, index, eta, NEW_VELOCITY, next_sample=old.next_sample)


def kl(old: ReverseStep, new: ReverseStep, form: KLForm, index: int) -> Tensor:
    dt = (SIGMAS[index + 1] - SIGMAS[index]).expand(2)
    return gaussian_kl(new.mean, old.mean, new.std, form=form, dt=dt)


def close(got: Tensor, expected: list[float] | float, *, rtol: float = 1e-10) -> None:
    want = torch.tensor(expected, dtype=torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.flatten(), want.expand(got.numel()), rtol=rtol, atol=1e-14)


def test_the_schedule_is_a_schedule() -> None:
    schedule = FlowMatchSchedule.from_values(IDENTITIES["sigmas_shift3_T10"])
    assert schedule.values() == tuple(IDENTITIES["sigmas_shift3_T10"])


@pytest.mark.parametrize("step", STEPS)
def test_flow_sde(step: str) -> None:
    index, expected = int(step), IDENTITIES["steps"][step]["flow_sde eta.7"]
    old, new = old_and_new(StepKind.SDE, index, 0.7)
    assert old.log_prob is not None
    assert new.log_prob is not None
    dt = (SIGMAS[index + 1] - SIGMAS[index]).item()
    close(old.std, expected["trans_std"])
    close(old.std / math.sqrt(-dt), expected["std"])
    close(old.mean["x"], expected["mean"])
    close(old.next_sample["x"], expected["next"])
    close(old.log_prob, expected["logp_old"])
    close(new.log_prob, expected["logp_new"])
    log_ratio = new.log_prob - old.log_prob
    close(log_ratio, expected["log_ratio"], rtol=1e-8)
    exact = kl(old, new, KLForm.EXACT, index)
    close(exact, expected["kl_exact"], rtol=1e-8)
    close(kl(old, new, KLForm.FLOW_GRPO, index), expected["kl_flow_grpo_code"], rtol=1e-8)
    # GRPO-Guard's ratio is s times (log-ratio + exact KL), with the sampler's own s.
    close(new.std * (log_ratio + exact), expected["guard_log_ratio"], rtol=1e-8)
    velocity_form = velocity_kl(
        StepKind.SDE,
        {"x": NEW_VELOCITY},
        {"x": VELOCITY},
        SIGMAS[index].expand(2),
        SIGMAS[index + 1].expand(2),
        sigma_guard=SIGMAS[1],
        noise_level=0.7,
    )
    close(velocity_form, expected["kl_exact"], rtol=1e-8)


@pytest.mark.parametrize("step", STEPS)
def test_cps(step: str) -> None:
    index, expected = int(step), IDENTITIES["steps"][step]["cps .8"]
    old, new = old_and_new(StepKind.CPS, index, 0.8)
    assert old.log_prob is not None
    assert new.log_prob is not None
    assert old.log_density is not None
    assert new.log_density is not None
    close(old.std, expected["std"])
    close(old.mean["x"], expected["mean"])
    close(old.log_prob, expected["logp_code"])
    close(new.log_prob - old.log_prob, expected["log_ratio_code"], rtol=1e-8)
    close(new.log_density - old.log_density, expected["log_ratio_true"], rtol=1e-8)
    close(kl(old, new, KLForm.EXACT, index), expected["kl_exact"], rtol=1e-8)


@pytest.mark.parametrize("step", STEPS)
def test_dance_sde(step: str) -> None:
    index, expected = int(step), IDENTITIES["steps"][step]["dance .3"]
    old, new = old_and_new(StepKind.DANCE_SDE, index, 0.3)
    assert old.log_prob is not None
    assert new.log_prob is not None
    close(old.std, expected["trans_std"])
    close(old.mean["x"], expected["mean"])
    close(old.log_prob, expected["logp_old"])
    close(new.log_prob - old.log_prob, expected["log_ratio"], rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "std", "ddof", "eps"),
    [
        ("flow_grpo_global", AdvantageStd.GLOBAL, 0, 1e-4),
        ("verl_omni_global_ddof1", AdvantageStd.GLOBAL, 1, 1e-4),
        ("group_std_ddof0", AdvantageStd.GROUP, 0, 1e-4),
        ("dance_group_ddof1", AdvantageStd.GROUP, 1, 1e-8),
    ],
)
def test_advantages(name: str, std: AdvantageStd, ddof: int, eps: float) -> None:
    expected = IDENTITIES["advantage"]
    rewards = torch.tensor(expected["rewards"], dtype=torch.float64)
    got = group_advantages(rewards, expected["uid"], std=std, ddof=ddof, eps=eps)
    close(got.advantages, expected[name])
