"""The gradient of kept graphs is the gradient of training forwards, or is refused with a reason."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from omni_core import device as devices
from omni_core.algorithms.awm_options import AWMOptions
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.engine import LossTerms, TrainBatch
from omni_core.options import AlgorithmConfig, DiffusionRolloutConfig, DType
from omni_core.testing.samples import requests_for
from omni_core.trajectory import Trajectory
from omni_engine_fsdp import (
    EngineRollout,
    EngineRolloutConfig,
    ForwardDiffusersFSDPEngine,
    FSDPEngineConfig,
)


def sampled(engine: Any, ranks: ModuleType, windows: Sequence[tuple[int, ...]]) -> Trajectory:
    """Two groups of three rows, with guidance, denoised four and two together."""
    asked = [
        attrs.evolve(request, window=window)
        for request, window in zip(
            requests_for(ranks.SPEC, samples_per_prompt=3), windows, strict=False
        )
    ]
    rollout = EngineRollout(EngineRolloutConfig(batch_size=4), engine=engine)
    return Trajectory.concat(rollout.generate(asked, decode=False))


def batch_of(trajectory: Trajectory) -> TrainBatch:
    generator = torch.Generator().manual_seed(3)
    weights = torch.ones(trajectory.rows)
    weights[1] = 0.0  # unscored
    return TrainBatch(
        trajectory=trajectory,
        advantages=torch.randn(trajectory.rows, generator=generator),
        weights=weights,
        denominator=float(trajectory.step_indices.numel()),
    )


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    apart = sum(
        float((ours[name] - value).double().square().sum()) for name, value in theirs.items()
    )
    size = sum(float(value.double().square().sum()) for value in theirs.values())
    assert size > 0.0
    return math.sqrt(apart / size)


@pytest.fixture(scope="module")
def plain(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> Any:
    engine = build_engine(tiny_sd3, optimizer=ranks.LR)
    ranks.warm(engine)
    return engine


@pytest.fixture
def keeping(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> Any:
    engine = build_engine(tiny_sd3, optimizer=ranks.LR, keep_graph=True)
    ranks.warm(engine)
    return engine


WINDOWS = ((0, 1), (1, 2))


@pytest.fixture(scope="module")
def expected(plain: Any, ranks: ModuleType) -> tuple[Trajectory, dict[str, Tensor]]:
    """What is sampled and its gradient, by training forwards."""
    trajectory = sampled(plain, ranks, WINDOWS)
    return trajectory, ranks.gradients(plain, batch_of(trajectory))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_training_forwards(
    build_engine: Any,
    ranks: ModuleType,
    tiny_sd3: Path,
    expected: tuple[Trajectory, dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    checkpointing: bool,
) -> None:
    engine = build_engine(
        tiny_sd3, optimizer=ranks.LR, keep_graph=True, gradient_checkpointing=checkpointing
    )
    ranks.warm(engine)
    engine.begin_rollout()
    trajectory = sampled(engine, ranks, WINDOWS)
    assert torch.equal(trajectory.latents["image"], expected[0].latents["image"])
    assert torch.equal(trajectory.log_probs, expected[0].log_probs)
    assert torch.equal(engine.replay(trajectory), trajectory.log_probs)  # the canary, in between
    assert engine.infer_batch(batch_of(trajectory)).log_probs.isfinite().all()
    calls = []
    original = engine.denoiser.velocity
    monkeypatch.setattr(engine.denoiser, "velocity", lambda *a: calls.append(1) or original(*a))
    found = ranks.gradients(engine, batch_of(trajectory))
    assert calls == []
    assert distance(found, expected[1]) <= 1e-6


def test_in_float64_both_gradients_agree_to_the_last_digits(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    """What differs is rounding alone: the order in which rows are added."""
    engine = build_engine(tiny_sd3, optimizer=ranks.LR, keep_graph=True, dtype=DType.FLOAT64)
    ranks.warm(engine)
    engine.begin_rollout()
    batch = batch_of(sampled(engine, ranks, WINDOWS))
    kept = ranks.gradients(engine, batch)
    engine.graphs = None
    assert distance(kept, ranks.gradients(engine, batch)) <= 1e-12


def test_every_weight_may_be_trained(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> None:
    engine = build_engine(tiny_sd3, lora=None, optimizer=ranks.LR, keep_graph=True)
    engine.begin_rollout()
    batch = batch_of(sampled(engine, ranks, WINDOWS))
    kept = ranks.gradients(engine, batch)
    engine.graphs = None
    assert distance(kept, ranks.gradients(engine, batch)) <= 1e-6


def test_the_ratio_is_1_exactly(keeping: Any, ranks: ModuleType) -> None:
    keeping.begin_rollout()
    batch = batch_of(sampled(keeping, ranks, WINDOWS))
    seen = []

    def loss(inputs: Any) -> Any:
        seen.append(inputs.current.require_log_prob().detach() - inputs.old_log_probs)
        return ranks.loss(inputs)

    ranks.gradients(keeping, batch, loss)
    assert len(torch.cat(seen)) == 2 * (batch.trajectory.rows - 1)
    assert torch.cat(seen).abs().max() == 0.0


class ReferenceLoss:
    needs_reference = True

    def __call__(self, inputs: Any) -> Any:
        away = (inputs.current.mean["image"] - inputs.reference.mean["image"]).square()
        return LossTerms(terms=away.flatten(1).mean(1))


def test_a_reference_is_predicted_beside_it(keeping: Any, plain: Any, ranks: ModuleType) -> None:
    keeping.begin_rollout()
    batch = batch_of(sampled(keeping, ranks, WINDOWS))
    ours, theirs = (ranks.gradients(e, batch, ReferenceLoss()) for e in (keeping, plain))
    assert distance(ours, theirs) <= 1e-6


def test_graphs_end_with_the_update_and_are_only_kept_when_asked(
    keeping: Any, ranks: ModuleType
) -> None:
    sampled(keeping, ranks, WINDOWS)  # an evaluation
    assert keeping.graphs.forwards == []
    keeping.begin_rollout()
    trajectory = sampled(keeping, ranks, WINDOWS)
    assert [(f.batch[-1], f.step) for f in keeping.graphs.forwards] == [
        *(("0", step) for step in (0, 1, 2)),  # rows of both groups
        *(("1", step) for step in (1, 2)),
    ]
    keeping.train_batch(batch_of(trajectory), ranks.loss)
    assert keeping.graphs.forwards == []
    keeping.begin_rollout()
    sampled(keeping, ranks, WINDOWS)
    keeping.end_rollout()
    assert keeping.graphs.forwards == []


def test_rows_without_a_graph_are_refused(keeping: Any, ranks: ModuleType) -> None:
    keeping.begin_rollout()
    batch = batch_of(sampled(keeping, ranks, WINDOWS))
    elsewhere = ranks.rows([0, 1, 2])
    places = tuple(attrs.evolve(p, batch="1/0/0") for p in elsewhere.trajectory.places)
    elsewhere = attrs.evolve(
        elsewhere, trajectory=attrs.evolve(elsewhere.trajectory, places=places)
    )
    with pytest.raises(
        ValueError, match=r"0 of 6 .* pairs of this batch were sampled with their graph"
    ):
        ranks.gradients(keeping, elsewhere)
    with pytest.raises(ValueError, match="update 1 of a rollout"):
        ranks.gradients(keeping, attrs.evolve(batch, update=1))
    keeping.graphs.forwards *= 2
    with pytest.raises(ValueError, match=r"24 of 12 .* pairs of this batch"):
        ranks.gradients(keeping, batch)


def test_two_rollouts_whose_batches_have_the_same_names_are_refused(
    keeping: Any, ranks: ModuleType
) -> None:
    keeping.begin_rollout()
    sampled(keeping, ranks, WINDOWS)
    with pytest.raises(ValueError, match=r"a batch named 0/0/0 was sampled since begin_rollout"):
        sampled(keeping, ranks, WINDOWS)


def test_graphs_that_would_not_fit_are_refused_by_the_first(
    keeping: Any, ranks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = itertools.count(0, 3 * 2**30)
    monkeypatch.setattr(devices, "memory_allocated", lambda _: next(held))
    monkeypatch.setattr(devices, "total_memory", lambda _: 8 * 2**30)
    keeping.begin_rollout()
    with pytest.raises(
        ValueError, match=r"graphs of 5 forwards take about 15\.0 GiB .* 13\.0 GiB more"
    ):
        sampled(keeping, ranks, WINDOWS)
    assert keeping.graphs.forwards == []


def test_an_engine_of_the_forward_process_keeps_none(build_engine: Any, tiny_sd3: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.keep_graph: samples are noised again"):
        build_engine(tiny_sd3, kind=ForwardDiffusersFSDPEngine, keep_graph=True)


class Pushed(DiffusionRolloutConfig):
    """Of a rollout in another process."""


def test_ranks_that_share_a_forward_keep_no_graphs() -> None:
    config = FSDPEngineConfig(keep_graph=True, cfg_parallel=2)
    found = config.mistakes(FlowGRPOOptions(), EngineRolloutConfig())
    assert "ranks that share a forward" in found["keep_graph"]


@pytest.mark.parametrize("shared", [{"cfg_parallel": 2}, {"ulysses": 2}])
def test_an_engine_refuses_what_its_options_refuse(
    build_engine: Any, tiny_sd3: Path, shared: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match=r"engine\.keep_graph: ranks that share a forward"):
        build_engine(tiny_sd3, keep_graph=True, **shared)


def test_a_rollout_merges_no_adapter_whose_graph_is_kept(keeping: Any) -> None:
    with pytest.raises(ValueError, match=r"engine\.keep_graph: rollout\.merge_lora"):
        EngineRollout(EngineRolloutConfig(merge_lora=True), engine=keeping)


@pytest.mark.parametrize(
    ("algorithm", "rollout", "reason"),
    [
        (FlowGRPOOptions(), EngineRolloutConfig(), None),
        (FlowGRPOOptions(updates_per_rollout=2), EngineRolloutConfig(), "updates_per_rollout is 2"),
        (AWMOptions(), EngineRolloutConfig(), "samples that are noised again"),
        (FlowGRPOOptions(), Pushed(), "weights that are pushed to it"),
    ],
)
def test_what_cannot_keep_graphs_is_refused_with_the_reason(
    algorithm: AlgorithmConfig, rollout: DiffusionRolloutConfig, reason: str | None
) -> None:
    assert FSDPEngineConfig().mistakes(algorithm, rollout) == {}
    found = FSDPEngineConfig(keep_graph=True).mistakes(algorithm, rollout)
    assert list(found) == ([] if reason is None else ["keep_graph"])
    assert reason is None or reason in found["keep_graph"]
