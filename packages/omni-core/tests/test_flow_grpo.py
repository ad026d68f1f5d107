"""FlowGRPO: the published loss through `diffusion_loss`, its windows, and every mistake of its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from omni_core.algorithm import Policy
from omni_core.algorithms.flow_dppo_options import FlowDPPOOptions
from omni_core.algorithms.flow_grpo import FlowGRPO
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.choices import AdvantageStd, KLForm, StepKind
from omni_core.config import ConfigError, structure
from omni_core.engine import LossInputs, StepPrediction
from omni_core.losses import diffusion_loss
from omni_core.options import DiffusionLossConfig, RunFacts
from omni_core.schedule import FlowMatchSchedule
from omni_core.testing import loss_inputs

GOLDEN = Path(__file__).parent / "data" / "golden"
VECTORS = load_file(GOLDEN / "vectors.safetensors")
LOSSES: list[dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())["losses"]
FLOW_GRPO = [case for case in LOSSES if case["name"].startswith("flow_grpo")]
KL = [case for case in LOSSES if case["name"].startswith("kl")]
TEN = FlowMatchSchedule.linear(10, shift=3.0)
FACTS = RunFacts(num_inference_steps=10, samples_per_prompt=8, prompts_per_step=4)


def prediction(
    log_probs: Tensor, *, mean: Tensor | None = None, std: float = 0.5
) -> StepPrediction:
    rows = len(log_probs)
    latents = {"image": torch.zeros(rows, 2) if mean is None else mean}
    return StepPrediction(
        next_sample=latents,
        mean=latents,
        std=torch.full((rows,), std),
        log_prob=log_probs,
        log_density=log_probs,
        velocity=latents,
    )


def inputs(log_probs: Tensor, old: Tensor, advantages: Tensor, **changes: Any) -> LossInputs:
    rows = torch.ones(len(log_probs))
    base = LossInputs(
        current=prediction(log_probs),
        old_log_probs=old,
        advantages=advantages,
        weights=rows,
        dt=-0.1 * rows,
    )
    return attrs.evolve(base, **changes)


def config(**options: Any) -> DiffusionLossConfig:
    return DiffusionLossConfig(name="flow_grpo", options=FlowGRPOOptions(**options))


# -- loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FLOW_GRPO, ids=lambda case: str(case["name"]))
def test_the_loss_is_the_published_one(case: dict[str, Any]) -> None:
    name, params = case["name"], case["params"]
    given = {key.removeprefix(f"{name}."): v for key, v in VECTORS.items() if key.startswith(name)}
    log_probs = given["log_probs"].clone().requires_grad_()
    loss_config = config(clip_ratio=params["clip_ratio"], adv_clip=params["adv_clip_max"])
    result = diffusion_loss(
        loss_config, inputs(log_probs, given["old_log_probs"], given["advantages"])
    )
    weights = given.get("rollout_is_weights", torch.ones_like(log_probs))
    loss = (weights * result.terms).mean()
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(
        loss.detach(), given["expected_loss"].squeeze(), rtol=1e-5, atol=2e-6
    )
    torch.testing.assert_close(gradient, given["expected_grad_log_probs"], rtol=1e-5, atol=2e-6)
    means = {key: value.mean().item() for key, value in result.metrics.items()}
    said = {key.removeprefix("actor/"): value for key, value in case["metrics"].items()}
    assert means["approx_kl"] == pytest.approx(said["ppo_kl"], abs=2e-6)
    assert means["clip_fraction"] == said["pg_clipfrac"]
    assert means["clip_fraction_higher"] == said["pg_clipfrac_higher"]
    assert means["clip_fraction_lower"] == said["pg_clipfrac_lower"]
    assert means["ratio"] == pytest.approx(said["ratio_mean"], rel=1e-6)


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    old = torch.tensor([-0.5, -0.7, -0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    log_probs = old.clone().requires_grad_()
    result = diffusion_loss(config(), inputs(log_probs, old, advantages))
    assert result.metrics["ratio"].tolist() == [1.0, 1.0, 1.0]
    assert result.metrics["clip_fraction"].sum() == 0.0
    (gradient,) = torch.autograd.grad(result.terms.sum(), log_probs)
    assert torch.equal(gradient, -advantages)


@pytest.mark.parametrize("case", KL, ids=lambda case: str(case["name"]))
def test_the_kl_is_the_published_one(case: dict[str, Any]) -> None:
    name = case["name"]
    mean, reference = VECTORS[f"{name}.mean"], VECTORS[f"{name}.ref_mean"]
    g, dt = VECTORS[f"{name}.g"], torch.tensor([-0.1, -0.05, -0.2, -0.01])
    std = g * (-dt).sqrt()
    rows = torch.zeros(4)
    current = attrs.evolve(prediction(rows, mean=mean), std=std)
    given = inputs(
        rows, rows, rows, current=current, reference=prediction(rows, mean=reference), dt=dt
    )
    found = diffusion_loss(config(kl_coef=2.0, kl_form=KLForm.FLOW_GRPO), given)
    expected = VECTORS[f"{name}.expected_loss"].squeeze()
    torch.testing.assert_close(found.metrics["kl"].mean(), expected, rtol=1e-5, atol=2e-6)
    # The surrogate of advantage 0 is 0, so the terms are the weighted KL alone.
    torch.testing.assert_close(found.terms, 2.0 * found.metrics["kl"])
    exact = diffusion_loss(config(kl_coef=2.0, kl_form=KLForm.EXACT), given)
    torch.testing.assert_close(exact.metrics["kl"] * -dt, found.metrics["kl"])


def test_case_5_the_kls_deviation_is_the_samplers() -> None:
    for kind in (StepKind.SDE, StepKind.CPS, StepKind.DANCE_SDE):
        given = loss_inputs(kind=kind, noise_level=0.7, apart=0.1)
        assert given.reference is not None
        assert torch.equal(given.current.std, given.reference.std)
        options = FlowGRPOOptions(kind=kind, kl_coef=1.0, kl_form=KLForm.EXACT)
        found = FlowGRPO(options).loss(given).metrics["kl"]
        apart = given.current.mean["image"] - given.reference.mean["image"]
        by_hand = apart.detach().square().flatten(1).mean(1) / (2.0 * given.current.std**2)
        torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=0.0)


def test_equal_policies_have_no_kl_and_it_pulls_back_to_the_reference() -> None:
    algorithm = FlowGRPO(FlowGRPOOptions(kl_coef=1.0, kl_form=KLForm.EXACT))
    given = loss_inputs(apart=0.0)
    assert algorithm.loss(given).metrics["kl"].tolist() == [0.0] * 6
    given = attrs.evolve(loss_inputs(apart=0.1), advantages=torch.zeros(6, dtype=torch.float64))
    assert given.reference is not None
    velocity = given.current.velocity["image"]
    (gradient,) = torch.autograd.grad(algorithm.loss(given).terms.sum(), velocity)
    away = velocity.detach() - given.reference.velocity["image"]
    assert ((gradient * away) > 0).all()


def test_a_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference's prediction"):
        FlowGRPO(FlowGRPOOptions(kl_coef=0.1)).loss(attrs.evolve(loss_inputs(), reference=None))


def test_only_a_kl_asks_for_the_reference() -> None:
    plain, with_kl = FlowGRPO(FlowGRPOOptions()), FlowGRPO(FlowGRPOOptions(kl_coef=0.1))
    assert [p.policy for p in plain.predictions] == [Policy.CURRENT]
    assert [p.policy for p in with_kl.predictions] == [Policy.CURRENT, Policy.REFERENCE]
    assert "kl" not in plain.loss(loss_inputs()).metrics, (
        "no metric of a disabled feature (CASES 36)"
    )


def test_advantages_are_taken_with_the_configured_deviation() -> None:
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 4.0]), ["a", "a", "b", "b"]
    valid = torch.ones(4, dtype=torch.bool)
    by_group = FlowGRPO(FlowGRPOOptions(std=AdvantageStd.GROUP, ddof=0, eps=1e-9))
    assert by_group.advantages(rewards, groups, valid).advantages.tolist() == pytest.approx(
        [-1.0, 1.0, -1.0, 1.0]
    )
    plain = FlowGRPO(FlowGRPOOptions(std=AdvantageStd.NONE, adv_clip=1.0))
    found = plain.advantages(rewards, groups, valid)
    assert found.advantages.tolist() == [-0.5, 0.5, -1.0, 1.0]
    assert found.clipped == 2


# -- windows ---------------------------------------------------------------------------------------


def windows(options: FlowGRPOOptions, seeds: int = 200) -> list[tuple[int, ...]]:
    return [FlowGRPO(options).window(TEN, seed=seed, iteration=0) for seed in range(seeds)]


def test_the_full_window_is_every_step_but_the_last() -> None:
    assert set(windows(FlowGRPOOptions(), 5)) == {tuple(range(9))}


def test_a_full_window_may_be_given_bounds() -> None:
    assert set(windows(FlowGRPOOptions(window_range=(2, 5)), 5)) == {(2, 3, 4)}


def test_a_short_window_lies_in_the_first_half_wherever_its_seed_says() -> None:
    found = windows(FlowGRPOOptions(window_size=2))
    assert set(found) == {(0, 1), (1, 2), (2, 3), (3, 4)}
    assert found == windows(FlowGRPOOptions(window_size=2)), "the same on every rank, every time"
    shares = [found.count(window) / len(found) for window in sorted(set(found))]
    assert min(shares) > 0.15


def test_a_short_window_stays_in_its_range() -> None:
    found = windows(FlowGRPOOptions(window_size=2, window_range=(4, 9)))
    assert set(found) == {(4, 5), (5, 6), (6, 7), (7, 8)}


def test_a_window_of_a_seed_is_part_of_a_runs_record() -> None:
    """Another release that draws other windows could not resume or repeat a run."""
    drawn = [window[0] for window in windows(FlowGRPOOptions(window_size=1), 8)]
    assert drawn == [2, 2, 1, 4, 4, 2, 1, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window_range": (0, 10)}, r"\[0, 10\) includes step 9, the last .* \[0, 9\)"),
        ({"window_range": (3, 3)}, r"algorithm\.window_range: window \[3, 3\) is empty"),
        ({"window_size": 5, "window_range": (0, 3)}, r"5 steps do not fit into \[0, 3\)"),
        ({"window_size": 10}, r"10 steps do not fit into \[0, 5\)"),
    ],
)
def test_case_6_a_window_that_does_not_fit_is_never_drawn(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        FlowGRPO(FlowGRPOOptions(**options)).window(TEN, seed=0, iteration=0)


# -- options ---------------------------------------------------------------------------------------


def test_the_defaults_fit() -> None:
    assert FlowGRPOOptions().mistakes(FACTS) == {}
    assert FlowGRPOOptions(window_size=2, kind=StepKind.CPS).mistakes(FACTS) == {}


def test_a_clip_below_the_noise_floor_is_a_mistake_with_the_least_that_fits():
    (said,) = FlowGRPOOptions(clip_ratio=9e-7).mistakes(FACTS).items()
    assert said[0] == "clip_ratio"
    assert said[1].endswith("expected at least 1e-06")
    assert FlowGRPOOptions(clip_ratio=1e-6).mistakes(FACTS) == {}
    assert set(FlowDPPOOptions(max_kl=1e-8).mistakes(FACTS)) == {"max_kl"}


@pytest.mark.parametrize(
    ("options", "path", "said"),
    [
        ({"window_range": (0, 10)}, "window_range", "the widest window that fits is [0, 9)"),
        ({"window_range": (3, 3)}, "window_range", "[3, 3) holds no step"),
        ({"window_range": (8, 2)}, "window_range", "[8, 2) holds no step"),
        ({"window_range": (-1, 2)}, "window_range", "[-1, 2) holds no step"),
        ({"window_range": (1, 2, 3)}, "window_range", "expected [start, stop], got [1, 2, 3]"),
        ({"window_size": 6}, "window_size", "6 steps do not fit into [0, 5) of 10 steps"),
        ({"window_size": 3, "window_range": (4, 6)}, "window_size", "at most 2 fit"),
        ({"kind": StepKind.CPS, "noise_level": 1.2}, "noise_level", "in (0, 1], got 1.2"),
        ({"kind": StepKind.ODE}, "kind", "choose one of sde, cps, dance_sde"),
    ],
)
def test_case_6_mistakes_have_a_path_and_say_what_fits(
    options: dict[str, Any], path: str, said: str
) -> None:
    found = FlowGRPOOptions(**options).mistakes(FACTS)
    assert list(found) == [path]
    assert said in found[path]


def test_case_16_a_group_of_one_names_both_keys() -> None:
    facts = attrs.evolve(FACTS, samples_per_prompt=1)
    assert FlowGRPOOptions().mistakes(facts) == {
        "name": "flow_grpo compares the samples of a group: rollout.samples_per_prompt is 1, "
        "and must be at least 2"
    }


def test_all_mistakes_come_at_once() -> None:
    facts = RunFacts(num_inference_steps=4, samples_per_prompt=1, prompts_per_step=4)
    options = FlowGRPOOptions(kind=StepKind.ODE, window_range=(0, 4))
    assert set(options.mistakes(facts)) == {"kind", "name", "window_range"}


def test_one_sampling_step_leaves_nothing_to_train() -> None:
    facts = attrs.evolve(FACTS, num_inference_steps=1)
    assert "at least 2" in FlowGRPOOptions().mistakes(facts)["window_size"]
    facts = attrs.evolve(FACTS, num_inference_steps=2)
    assert FlowGRPOOptions().mistakes(facts) == {}
    assert FlowGRPOOptions(window_size=1).mistakes(facts) == {}


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({}, 1e-4),
        ({"kind": StepKind.DANCE_SDE}, 1e-4),
        ({"window_range": (0, 5)}, 1e-4),
        ({"window_size": 2}, 1e-5),
        ({"kind": StepKind.CPS}, 1e-5),
        ({"kind": StepKind.CPS, "clip_ratio": 0.2}, 0.2),
    ],
)
def test_the_clip_belongs_to_the_form_of_the_log_probs(
    options: dict[str, Any], clip: float
) -> None:
    assert FlowGRPOOptions(**options).clip == clip
    if "clip_ratio" not in options:
        assert FlowGRPOOptions(**options, clip_ratio=3e-3).clip == 3e-3


def test_the_clip_in_force_is_the_one_that_the_loss_uses() -> None:
    old = torch.zeros(2, dtype=torch.float64)
    log_probs = torch.tensor([5e-5, 2e-4], dtype=torch.float64)
    full = diffusion_loss(config(), inputs(log_probs, old, old + 1.0))
    assert full.metrics["clip_fraction"].tolist() == [0.0, 1.0]
    short = diffusion_loss(config(window_size=1), inputs(log_probs, old, old + 1.0))
    assert short.metrics["clip_fraction"].tolist() == [1.0, 1.0]


def test_what_a_rollout_is_asked_for() -> None:
    options = FlowGRPOOptions(
        kind=StepKind.CPS, noise_level=0.8, window_size=2, window_range=(1, 6)
    )
    asked = options.rollout_algo()
    assert (asked.kind, asked.noise_level) == ("cps", 0.8)
    assert (asked.window_size, asked.window_range) == (2, (1, 6))
    assert asked.adapter == "default"


def test_options_are_checked_where_they_are_written() -> None:
    with pytest.raises(ConfigError) as error:
        structure(
            {"kind": "sed", "noise_level": 0, "kl_form": "k3", "ddof": 2, "clip_ratio": -1},
            FlowGRPOOptions,
        )
    said = {line.partition(":")[0]: line for line in error.value.mistakes}
    assert set(said) == {"kind", "noise_level", "kl_form", "ddof", "clip_ratio"}
    assert "did you mean 'sde'?" in said["kind"]
    assert "exact, flow_grpo" in said["kl_form"]
