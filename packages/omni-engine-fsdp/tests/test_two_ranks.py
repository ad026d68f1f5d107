"""CASES 27 and its kind: two ranks over gloo compute what one rank computes, or fail on both.

Both ranks are started once and run every scenario of ranks.py; this process is the single rank that
they are compared with.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from omni_core import plugins
from omni_core.options import DType

pytestmark = pytest.mark.timeout(300)  # two processes import everything first, maybe on one core

RANKS = (0, 1)
SHARDINGS = ("replicate", "shard")


@pytest.fixture(autouse=True)
def no_family_stays() -> Iterator[None]:
    """What a test offers in this process is taken back."""
    yield
    if "two_experts" in plugins.registry(plugins.MODELS).names():
        plugins.registry(plugins.MODELS).unregister("two_experts")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path, ranks: ModuleType) -> Path:
    """What the ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    engine = ranks.build_full(tiny_sd3)
    for _ in range(2):
        engine.train_batch(ranks.rows([0, 1, 2]), ranks.KLLoss())
    (folder / "one-rank.json").write_text(json.dumps(engine.save_checkpoint(folder / "one-rank")))
    script = Path(__file__).with_name("ranks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = []
    for rank in RANKS:
        arguments = [str(rank), "2", str(folder / "store"), str(tiny_sd3), str(folder)]
        with (folder / f"log.{rank}").open("w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
    try:
        codes = [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = "\n".join((folder / f"log.{rank}").read_text()[-3000:] for rank in RANKS)
    assert codes == [0, 0], logs
    return folder


def tensors(out: Path, name: str, rank: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(out / f"{name}.{rank}.safetensors")
    return found


def said(out: Path, name: str) -> list[Any]:
    return [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in RANKS]


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all tensors."""
    assert ours.keys() == theirs.keys()
    apart = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours)
    size = sum(float(value.double().square().sum()) for value in theirs.values())
    assert size > 0.0
    return math.sqrt(apart / size)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_case_27_three_rows_on_two_ranks_give_one_ranks_gradient(
    out: Path, ranks: ModuleType, tiny_sd3: Path, sharding: str
) -> None:
    """CASES 27: 2 and 1 rows make 2 and 1 micro-batches; the short rank runs a dummy."""
    engine = ranks.build(tiny_sd3)
    ranks.warm(engine)
    alone = ranks.gradients(engine, ranks.rows([0, 1, 2]))
    for rank in RANKS:
        assert distance(tensors(out, f"gradients-{sharding}", rank), alone) <= 1e-5


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_kept_graphs_on_two_ranks_give_one_ranks_gradient(
    out: Path, ranks: ModuleType, tiny_sd3: Path, sharding: str
) -> None:
    """Each rank keeps the steps that the other one trains, too."""
    engine = ranks.build(tiny_sd3)
    ranks.warm(engine)
    alone = ranks.gradients(engine, ranks.sampled_batch(engine, [0, 1, 2]))
    for rank in RANKS:
        assert distance(tensors(out, f"kept-{sharding}", rank), alone) <= 1e-5


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_merged_adapter_is_the_same_on_two_ranks(
    out: Path, ranks: ModuleType, tiny_sd3: Path, sharding: str
) -> None:
    engine = ranks.build(tiny_sd3)
    ranks.warm(engine)
    base = dict(engine.get_per_tensor_param(adapter=None))
    with engine.merged_adapter("default"):
        merged = {n: t.clone() for n, t in engine.get_per_tensor_param(adapter=None)}
    assert any(not torch.equal(merged[name], value) for name, value in base.items())
    for rank in RANKS:
        found = tensors(out, f"merged-{sharding}", rank)
        assert all(torch.equal(found[name], value) for name, value in merged.items())
    assert max(said(out, f"merged-{sharding}")) <= 1e-5


@pytest.fixture
def two_experts(ranks: ModuleType) -> Iterator[str]:
    """Name of a family that is known to this test alone."""
    ranks.register_two_experts()
    yield "two_experts"
    plugins.registry(plugins.MODELS).unregister("two_experts")


def test_case_27_ranks_may_start_on_different_experts(
    out: Path, ranks: ModuleType, tiny_sd3: Path, two_experts: str
) -> None:
    """CASES 27: a rank without rows of an expert runs dummies of it, in the common order."""
    engine = ranks.build(tiny_sd3, family=two_experts)
    ranks.warm(engine)
    alone = ranks.gradients(engine, ranks.rows([0, 1, 2], ((0,), (1,), (2,))))
    assert {name.partition(".")[0] for name in alone} == {"high", "low"}
    for rank in RANKS:
        assert distance(tensors(out, "experts", rank), alone) <= 1e-5


@pytest.mark.parametrize("family", ["sd3", "two_experts"])
def test_case_27_noised_samples_on_two_ranks_give_one_ranks_gradient(
    out: Path, ranks: ModuleType, tiny_sd3: Path, family: str
) -> None:
    """CASES 27: draws are the samples' own, and a rank short of an expert's sigmas runs dummies."""
    ranks.register_two_experts()
    kind = ranks.ForwardDiffusersFSDPEngine
    engine = ranks.build(tiny_sd3, kind=kind, family=family)
    ranks.warm(engine)
    alone = ranks.gradients(engine, ranks.forward_rows([0, 1, 2]), ranks.ForwardLoss())
    for rank in RANKS:
        assert distance(tensors(out, f"forward-{family}", rank), alone) <= 1e-5


@pytest.mark.parametrize("family", ["sd3", "two_experts"])
def test_case_27_rows_of_other_teachers_on_two_ranks_give_one_ranks_gradient(
    out: Path, ranks: ModuleType, tiny_sd3: Path, family: str
) -> None:
    """CASES 27: each rank has rows of one of two teachers, and runs dummies of the other."""
    ranks.register_two_experts()
    made = [out / "teachers" / f"{family}-{name}" for name in ("one", "two")]
    engine = ranks.build(tiny_sd3, family=family, teachers=made)
    ranks.warm(engine)
    alone = ranks.taught(engine, [0, 1, 2])
    for rank in RANKS:
        assert distance(tensors(out, f"taught-{family}", rank), alone) <= 1e-5


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_adapters_follow_the_trained_one_on_two_ranks(
    out: Path, ranks: ModuleType, tiny_sd3: Path, sharding: str
) -> None:
    """All adapters lie alike, so that a rank's part of one is copied to its part of another."""
    kind = ranks.ForwardDiffusersFSDPEngine
    engine = ranks.build(tiny_sd3, kind=kind, adapters=("old", "ema"))
    engine.train_batch(ranks.forward_rows([0, 1, 2]), ranks.ForwardLoss())
    engine.ema_update_adapter("default", "ema", 0.5)
    alone = {n: t.clone() for n, t in engine.get_per_tensor_param(adapter="ema")}
    for rank in RANKS:
        trained = tensors(out, f"adapter-default-{sharding}", rank)
        old = tensors(out, f"adapter-old-{sharding}", rank)
        assert all(torch.equal(old[name], value) for name, value in trained.items())
        assert distance(tensors(out, f"adapter-ema-{sharding}", rank), alone) <= 1e-4


def test_case_27_weights_after_three_steps_are_one_ranks(
    out: Path, ranks: ModuleType, tiny_sd3: Path
) -> None:
    """CASES 27: in float64 within 1e-10, clipping by the global norm included."""
    engine = ranks.build(tiny_sd3, dtype=DType.FLOAT64)
    for _ in range(3):
        norm = engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss).metrics["grad_norm"].mean
        assert norm > ranks.LR.max_grad_norm
    alone = ranks.weights(engine)
    assert next(iter(alone.values())).dtype is torch.float64
    for rank in RANKS:
        assert distance(tensors(out, "float64", rank), alone) <= 1e-10


def test_case_30_a_nan_on_one_rank_stops_both(out: Path) -> None:
    """CASES 30: no rank steps, weights are unchanged, and the run ends on both after the limit."""
    expected = {"skipped": 1.0, "ended": True, "same": True, "version": 1}
    assert said(out, "nan") == [expected, expected]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_case_28_two_ranks_resume_bit_for_bit(out: Path, sharding: str) -> None:
    """CASES 28 at two ranks: 2 + resume + 2 steps are 4."""
    for rank in RANKS:
        straight = tensors(out, f"straight-{sharding}", rank)
        for name, value in tensors(out, f"resumed-{sharding}", rank).items():
            assert torch.equal(value, straight[name]), name
    states = said(out, f"state-{sharding}")
    assert states[0] == states[1]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_checkpoint_of_two_ranks_goes_on_at_one(
    out: Path, ranks: ModuleType, tiny_sd3: Path, sharding: str
) -> None:
    """Weights and moments are read whole: two more steps end where two ranks end."""
    engine = ranks.build(tiny_sd3)
    engine.load_checkpoint(out / f"checkpoint-{sharding}", said(out, f"state-{sharding}")[0])
    assert engine.weight_version == 2
    for _ in range(2):
        engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    assert distance(ranks.weights(engine), tensors(out, f"straight-{sharding}", 0)) <= 1e-4


@pytest.fixture(scope="module")
def full(ranks: ModuleType, tiny_sd3: Path) -> dict[str, dict[str, Tensor]]:
    """Every weight after three steps of one rank, and their average."""
    engine = ranks.build_full(tiny_sd3)
    for _ in range(3):
        engine.train_batch(ranks.rows([0, 1, 2]), ranks.KLLoss())
    return {policy: ranks.weights(engine, policy) for policy in ("default", "ema")}


@pytest.mark.parametrize("policy", ["default", "ema"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_case_27_every_weight_is_trained_against_a_reference_as_on_one_rank(
    out: Path, full: dict[str, dict[str, Tensor]], sharding: str, policy: str
) -> None:
    """CASES 27 without LoRA: float64 weights after 3 steps within 1e-10, the average's too."""
    for rank in RANKS:
        assert distance(tensors(out, f"full-{policy}-{sharding}", rank), full[policy]) <= 1e-10


def test_case_28_every_weight_goes_on_from_a_checkpoint_at_any_number_of_ranks(
    out: Path, ranks: ModuleType, tiny_sd3: Path, full: dict[str, dict[str, Tensor]]
) -> None:
    """CASES 28: bit for bit at the same two ranks; from two to one, and from one to two, to rounding."""
    for rank in RANKS:
        resumed = tensors(out, "full-resumed", rank)
        for name, value in tensors(out, "full-default-shard", rank).items():
            assert torch.equal(resumed[name], value), name
        for policy in ("default", "ema"):
            assert distance(tensors(out, f"full-back-{policy}", rank), full[policy]) <= 1e-10
    engine = ranks.build_full(tiny_sd3)
    engine.load_checkpoint(out / "full-shard", said(out, "full-state-shard")[0])
    engine.train_batch(ranks.rows([0, 1, 2]), ranks.KLLoss())
    for policy in ("default", "ema"):
        assert distance(ranks.weights(engine, policy), full[policy]) <= 1e-10


def test_two_ranks_write_one_pipeline(out: Path) -> None:
    written = load_file(out / "full-pipeline/transformer/diffusion_pytorch_model.safetensors")
    for name, value in tensors(out, "full-resumed", 0).items():
        assert torch.equal(written[name.removeprefix("transformer.")], value), name


def test_case_7_replay_is_exact_on_two_ranks(out: Path) -> None:
    """CASES 7 with 6 and 3 rows, batches of 4: the short rank's dummies are repeated too."""
    assert said(out, "replay") == [{"apart": 0.0}, {"apart": 0.0}]


def test_case_27_ranks_that_do_different_things_fail_on_both(out: Path) -> None:
    """CASES 27: an error with both plans, before any forward; never a hang."""
    for answer in said(out, "disagree"):
        assert "rank 0: train: 2 x transformer" in answer["said"]
        assert "rank 1: predict: 2 x transformer" in answer["said"]
