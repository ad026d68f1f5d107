"""DESIGN.md 4 and CASES 27: four ranks, laid out in every way, compute what one rank computes, in float64.

All forms are run by one programme (parallel_forms.py); this process is the one rank. Rows are dealt
unevenly, and neither image nor text positions divide among the ranks.
"""

from __future__ import annotations

import json
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

pytestmark = pytest.mark.timeout(400)  # four processes import everything first, maybe on one core

RANKS = range(4)
GRADIENT, WEIGHTS = 1e-12, 1e-10
"""Of the global norm: DESIGN.md section 4."""


def load(name: str) -> Any:
    """A script beside this file, as its processes see it."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return __import__(name)
    finally:
        sys.path.pop(0)


forms = load("parallel_forms")
FORMS = list(forms.FORMS)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path) -> Path:
    """What the ranks left."""
    folder = tmp_path_factory.mktemp("forms")
    script = Path(__file__).with_name("parallel_forms.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = []
    for rank in RANKS:
        arguments = [str(rank), str(folder / "store"), str(tiny_sd3), str(folder)]
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
        codes = [process.wait(timeout=360) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = "\n".join((folder / f"log.{rank}").read_text()[-3000:] for rank in RANKS)
    assert codes == [0] * len(RANKS), logs
    return folder


@pytest.fixture(scope="module")
def alone(tiny_sd3: Path) -> Iterator[dict[str, dict[str, Tensor]]]:
    """The same of one rank."""
    ranks: ModuleType = forms.ranks
    whole = list(range(5))
    found: dict[str, dict[str, Tensor]] = {}
    ranks.register_two_experts()

    def make(trained: str, **more: Any) -> Any:
        engine = ranks.build(tiny_sd3, dtype=DType.FLOAT64, lora=forms.TRAINED[trained], **more)
        return forms.prepared(engine, trained)

    for trained in forms.TRAINED:
        engine = make(trained, optimizer=forms.AVERAGED)
        found[f"{trained}-gradients"] = ranks.gradients(engine, forms.batch(whole))
        for _ in range(3):
            engine.train_batch(forms.batch(whole), ranks.KLLoss())
        for policy in forms.POLICIES:
            found[f"{trained}-{policy}"] = ranks.weights(engine, policy)
    found["unguided"] = ranks.gradients(make("lora"), forms.batch(whole, guidance=1.0))
    experts = make("lora", family="two_experts")
    found["experts"] = ranks.gradients(experts, ranks.rows(whole, forms.APART, **forms.ODD))
    plain = ranks.build(tiny_sd3, dtype=DType.FLOAT64)
    found["sampled"], apart = forms.sampled(plain, forms.requests(None, 0))
    assert apart == 0.0
    yield found
    plugins.registry(plugins.MODELS).unregister("two_experts")


def tensors(out: Path, name: str, rank: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(out / f"{name}.{rank}.safetensors")
    return found


def said(out: Path, name: str) -> list[Any]:
    return [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in RANKS]


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all tensors."""
    assert ours.keys() == theirs.keys()
    apart = torch.stack([(ours[n] - theirs[n]).double().square().sum() for n in ours]).sum()
    size = torch.stack([value.double().square().sum() for value in theirs.values()]).sum()
    assert size > 0.0
    return float((apart / size).sqrt())


@pytest.mark.parametrize("what", ["lora-gradients", "full-gradients", "unguided", "experts"])
@pytest.mark.parametrize("form", FORMS)
def test_case_27_gradients_are_one_ranks(
    out: Path, alone: dict[str, dict[str, Tensor]], form: str, what: str
) -> None:
    """CASES 27: before the optimizer, for LoRA and all weights, with and without guidance, two experts."""
    for rank in RANKS:
        assert distance(tensors(out, f"{form}-{what}", rank), alone[what]) <= GRADIENT


@pytest.mark.parametrize("policy", forms.POLICIES)
@pytest.mark.parametrize("trained", list(forms.TRAINED))
@pytest.mark.parametrize("form", FORMS)
def test_case_27_weights_after_three_steps_are_one_ranks(
    out: Path, alone: dict[str, dict[str, Tensor]], form: str, trained: str, policy: str
) -> None:
    """CASES 27: held to the reference, clipped by the global norm, averaged; the same on every rank."""
    first = tensors(out, f"{form}-{trained}-{policy}", 0)
    assert distance(first, alone[f"{trained}-{policy}"]) <= WEIGHTS
    for rank in RANKS:
        other = tensors(out, f"{form}-{trained}-{policy}", rank)
        assert all(torch.equal(other[name], value) for name, value in first.items())


@pytest.mark.parametrize("form", ["sequence", "branches", "sequence_and_branches"])
def test_case_7_ranks_sample_together_what_one_does(
    out: Path, alone: dict[str, dict[str, Tensor]], form: str
) -> None:
    """Those that hold the same rows end with the same samples, and replay them exactly (CASES 7)."""
    assert [each["replay"] for each in said(out, form)] == [0.0] * len(RANKS)
    found: dict[str, Tensor] = {}
    for rank in RANKS:
        for name, value in tensors(out, f"{form}-sampled", rank).items():
            assert torch.equal(found.setdefault(name, value), value), name
    assert found.keys() == alone["sampled"].keys()
    for name, value in alone["sampled"].items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-5)


def test_ranks_know_whose_rows_they_hold(out: Path) -> None:
    """(data-parallel rank, size, whether its outputs are the ones to collect)."""
    places = {form: [tuple(each["place"]) for each in said(out, form)] for form in FORMS}
    apart = [(rank, 4, True) for rank in RANKS]
    pairs = [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]
    whole = [(0, 1, True), (0, 1, False), (0, 1, False), (0, 1, False)]
    together = {"sequence": pairs, "branches": pairs, "sequence_in_copies": pairs}
    expected = {form: together.get(form, apart) for form in FORMS}
    assert places == expected | {"sequence_and_branches": whole}


def test_what_does_not_fit_is_refused_with_what_would(out: Path) -> None:
    """Rows that differ between ranks that share them, and numbers that do not divide."""
    for found in said(out, "mistakes"):
        assert "a batch: 1 rows of digest" in found["rows"]
        assert found["ranks"].endswith("groups of 1 or 2 or 4 would")
        assert found["copies"] == (
            "engine.replicate: 4 ranks do not divide into 3 copies; 1 or 2 or 4 would"
        )
        assert found["heads"] == (
            "engine.ulysses: 4 ranks do not divide the 2 attention heads of expert 'transformer'; "
            "1 or 2 would"
        )


def test_a_replicated_lora_computes_in_float32_beside_a_bf16_base(tiny_sd3: Path) -> None:
    """Nobody casts it, and its gradient is that of a sharded one, which FSDP casts, but for bf16's rounding."""
    found = {}
    for placed in ("shard", "replicate"):
        engine = forms.ranks.build(tiny_sd3, dtype=DType.BFLOAT16, shard_trained=placed)
        forms.ranks.warm(engine)
        found[placed] = forms.ranks.gradients(engine, forms.ranks.rows([0, 1, 2]))
        assert {p.dtype for p in engine.trained().values()} == {torch.float32}
    assert 0.0 < distance(found["replicate"], found["shard"]) < 0.05


def test_all_weights_replicated_in_bf16_are_refused(tiny_sd3: Path) -> None:
    """FSDP alone casts them for computation."""
    with pytest.raises(ValueError, match=r"take shard with engine\.replicate, or a LoRA"):
        forms.ranks.build(tiny_sd3, dtype=DType.BFLOAT16, lora=None, shard_trained="replicate")
