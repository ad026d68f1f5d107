from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from omni_core.options import DType, LoRAConfig, LoRAReference
from omni_core.testing.engine_suite import kl_loss
from omni_engine_fsdp import PPODiffusersFSDPEngine
from omni_engine_fsdp.lora import check_targets

ADAPTERS = ("old",)


@pytest.fixture
def engine(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> PPODiffusersFSDPEngine:
    """Adapters `default` (not zero) and `old` (equal to its start)."""
    built: PPODiffusersFSDPEngine = build_engine(tiny_sd3, adapters=ADAPTERS, optimizer=ranks.LR)
    ranks.warm(built)
    return built


def adapter(engine: PPODiffusersFSDPEngine, name: str = "default") -> dict[str, Tensor]:
    return {key: value.clone() for key, value in engine.get_per_tensor_param(adapter=name)}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def flags(engine: PPODiffusersFSDPEngine) -> dict[str, bool]:
    module = engine.denoiser.experts["transformer"]
    return {name: p.requires_grad for name, p in module.named_parameters()}


def predict(engine: PPODiffusersFSDPEngine, ranks: ModuleType) -> Tensor:
    found = engine.infer_batch(ranks.rows([0, 1, 2])).log_probs
    assert found is not None
    return found


# -- what is injected -----------------------------------------------------------------------------


def test_case_26_a_target_that_matches_nothing_is_named_with_the_counts(
    build_engine: Any, tiny_sd3: Path
) -> None:
    """CASES 26: to_q is in both blocks; the unknown one is the error."""
    with pytest.raises(ValueError, match="no_such_layer") as caught:
        build_engine(tiny_sd3, lora=LoRAConfig(targets=("to_q", "no_such_layer")))
    assert "model.lora.targets: 'no_such_layer' matches no" in str(caught.value)
    assert "'to_q' matched 2, 'no_such_layer' matched 0" in str(caught.value)


def test_a_target_is_a_whole_part_of_a_name(build_engine: Any, tiny_sd3: Path) -> None:
    """`o_q` is the end of `to_q`, and no module's name."""
    with pytest.raises(ValueError, match="'o_q' matched 0"):
        build_engine(tiny_sd3, lora=LoRAConfig(targets=("o_q",)))


@pytest.mark.parametrize("init", ["gaussian", "kaiming"])
def test_the_start_follows_from_the_seed_and_changes_nothing(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, init: str
) -> None:
    lora = LoRAConfig(rank=4, alpha=8.0, init=init)
    torch.manual_seed(1)
    first = build_engine(tiny_sd3, lora=lora, seed=3)
    drawn = torch.random.get_rng_state()
    torch.manual_seed(2)
    again, other = (build_engine(tiny_sd3, lora=lora, seed=seed) for seed in (3, 4))
    assert same(adapter(first, "default"), adapter(again, "default"))
    assert not same(adapter(first, "default"), adapter(other, "default"))
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.random.get_rng_state())  # nobody else's draws are moved
    for name, value in adapter(first, "default").items():
        assert value.dtype is torch.float32
        assert bool(value.any()) == ("lora_A" in name)
    if init == "gaussian":
        drawn_a = torch.cat(
            [v.flatten() for n, v in adapter(first, "default").items() if "_A" in n]
        )
        assert drawn_a.std() == pytest.approx(1 / lora.rank, rel=0.1)
    with first.disable_adapter():
        base = predict(first, ranks)
    assert torch.equal(predict(first, ranks), base)


def test_every_weight_is_trained_without_lora(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    engine = build_engine(tiny_sd3, lora=None, optimizer=ranks.LR)
    before = dict(engine.get_per_tensor_param(adapter=None))
    assert {f"transformer.{name}" for name in flags(engine)} == set(before)
    before = {name: value.clone() for name, value in before.items()}
    assert engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss).metrics["skipped"].mean == 0.0
    moved = [
        n for n, v in engine.get_per_tensor_param(adapter=None) if not torch.equal(v, before[n])
    ]
    assert len(moved) > len(before) / 2
    with engine.use_adapter("default"):
        pass  # names the trained weights
    with pytest.raises(ValueError, match="no adapter named 'old'; there are: default"):
        engine.copy_adapter("default", "old")


# -- a start from files ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An adapter after one step, for PEFT and for diffusers."""
    engine = build_engine(tiny_sd3, optimizer=ranks.LR)
    engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    folder = tmp_path_factory.mktemp("start")
    engine.export_adapter(folder)
    return folder


def starting_from(path: Path, reference: LoRAReference, **changes: Any) -> LoRAConfig:
    config = LoRAConfig(rank=2, alpha=8.0, path=str(path), reference=reference)
    return attrs.evolve(config, **changes)


@pytest.mark.parametrize("reference", list(LoRAReference))
def test_a_lora_starts_from_files_and_keeps_the_reference_that_is_asked_for(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, exported: Path, reference: LoRAReference
) -> None:
    config = starting_from(exported, reference)
    engine = build_engine(tiny_sd3, lora=config, optimizer=ranks.LR)
    start = adapter(engine)
    with safe_open(exported / "pytorch_lora_weights.safetensors", framework="pt") as file:
        assert same(start, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    kl = engine.infer_batch(ranks.rows([0, 1, 2]), kl_loss()).metrics["kl"]
    if reference is LoRAReference.BASE:
        assert engine.adapters == ("default",)
        assert kl.low > 1e-5
    else:
        assert engine.adapters == ("default", "reference")
        assert kl.high < 1e-12  # not the same bits: its weights lie elsewhere
        engine.train_batch(ranks.rows([0, 1, 2]), kl_loss())
        assert same(adapter(engine, "reference"), start)
        assert not same(adapter(engine), start)


def test_a_start_of_another_shape_is_refused(
    build_engine: Any, tiny_sd3: Path, exported: Path, tmp_path: Path
) -> None:
    other = starting_from(exported, LoRAReference.BASE, rank=4)
    with pytest.raises(
        ValueError, match=r"model\.lora\.path \(.*rank is 2, and model\.lora\.rank is 4"
    ):
        build_engine(tiny_sd3, lora=other)
    missing = starting_from(tmp_path / "nowhere", LoRAReference.BASE)
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        build_engine(tiny_sd3, lora=missing)


def test_a_start_has_to_say_its_reference() -> None:
    with pytest.raises(ValueError, match="has to say its reference: base or initial_policy"):
        LoRAConfig(path="somewhere")
    with pytest.raises(ValueError, match="without `path` the policy starts as the base"):
        LoRAConfig(reference=LoRAReference.INITIAL_POLICY)


def test_targets_are_counted() -> None:
    block = {"to_q": nn.Linear(2, 2), "norm": nn.LayerNorm(2)}
    module = nn.ModuleDict(
        {"one": nn.ModuleDict(block), "two": nn.ModuleDict(block), "out": nn.Linear(2, 2)}
    )
    module["two"]["to_q"] = nn.Linear(2, 2)
    assert check_targets(module, ("to_q", "out"), name="x") == {"to_q": 2, "out": 1}


# -- named adapters -------------------------------------------------------------------------------


def test_adapters_are_added_before_sharding(engine: PPODiffusersFSDPEngine) -> None:
    assert engine.adapters == ("default", "old")
    with pytest.raises(RuntimeError, match="before initialize"):
        engine.add_adapter("late")


def test_only_default_is_trained(engine: PPODiffusersFSDPEngine, ranks: ModuleType) -> None:
    assert all(".default." in name for name in engine.trained())
    old = adapter(engine, "old")
    engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    assert same(adapter(engine, "old"), old)


def test_copy_and_moving_average(engine: PPODiffusersFSDPEngine) -> None:
    new, old = adapter(engine, "default"), adapter(engine, "old")
    assert not same(new, old)
    engine.ema_update_adapter("default", "old", 0.75)
    for name, value in adapter(engine, "old").items():
        torch.testing.assert_close(value, 0.75 * old[name] + 0.25 * new[name])
    engine.copy_adapter("default", "old")
    assert same(adapter(engine, "old"), new)
    assert same(adapter(engine, "default"), new)
    with pytest.raises(ValueError, match="decay must be within"):
        engine.ema_update_adapter("default", "old", 1.5)
    with pytest.raises(ValueError, match="no adapter named 'older'; there are: default, old"):
        engine.copy_adapter("older", "old")


def test_a_copy_is_seen_by_the_next_forward(
    engine: PPODiffusersFSDPEngine, ranks: ModuleType
) -> None:
    """Gathered copies of the weights from earlier forwards are dropped."""
    current = predict(engine, ranks)
    with engine.use_adapter("old"):
        start = predict(engine, ranks)
        engine.copy_adapter("default", "old")
        copied = predict(engine, ranks)
    # Not bit for bit: a product of equal factors is rounded by where in memory its input happens to lie
    # (MKL with AVX-512), and what ran in between moved it.
    torch.testing.assert_close(copied, current, rtol=1e-6, atol=1e-6)
    assert (start - current).abs().max() > 1e-4


def test_case_24_switching_adapters_leaves_requires_grad_alone(
    engine: PPODiffusersFSDPEngine,
) -> None:
    """CASES 24 with adapters default + old, one frozen; nested, and left by exceptions."""
    before = flags(engine)
    with engine.disable_adapter():
        assert flags(engine) == before
    with engine.use_adapter("old"), engine.disable_adapter(), engine.use_adapter("default"):
        assert flags(engine) == before
    assert flags(engine) == before
    for context in (engine.disable_adapter(), engine.use_adapter("old")):
        with pytest.raises(KeyError), context:
            raise KeyError
        assert flags(engine) == before
    with pytest.raises(ValueError, match="no adapter named"), engine.use_adapter("older"):
        pass
    assert flags(engine) == before


def test_leaving_a_context_brings_the_former_policy_back(
    engine: PPODiffusersFSDPEngine, ranks: ModuleType
) -> None:
    current = predict(engine, ranks)
    with engine.use_adapter("old"):
        old = predict(engine, ranks)
        with engine.disable_adapter():
            base = predict(engine, ranks)
        assert torch.equal(predict(engine, ranks), old)
    assert torch.equal(predict(engine, ranks), current)
    assert torch.equal(old, base)  # B of `old` is zero
    assert not torch.equal(current, base)


def test_case_24_training_goes_on_after_the_reference(
    engine: PPODiffusersFSDPEngine, ranks: ModuleType
) -> None:
    """The gradient is the same whether or not the base was run before it."""
    batch = ranks.rows([0, 1, 2])
    alone = ranks.gradients(engine, batch)
    with engine.disable_adapter():
        predict(engine, ranks)
    after = ranks.gradients(engine, batch)
    assert same(alone, after)


# -- names of weights -----------------------------------------------------------------------------


def test_weights_have_the_names_of_the_stock_module(
    engine: PPODiffusersFSDPEngine, tiny_sd3: Path
) -> None:
    from diffusers import SD3Transformer2DModel

    stock = SD3Transformer2DModel.from_pretrained(
        tiny_sd3, subfolder="transformer", local_files_only=True
    )
    expected = {f"transformer.{name}": value for name, value in stock.named_parameters()}
    assert same(dict(engine.get_per_tensor_param(adapter=None)), expected)
    name = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
    assert adapter(engine, "default")[name].shape == (2, 32)


def test_bfloat16_weights_lie_beside_a_float32_adapter(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    engine = build_engine(tiny_sd3, dtype=DType.BFLOAT16, optimizer=ranks.LR)
    base = dict(engine.get_per_tensor_param(adapter=None))
    assert {value.dtype for value in base.values()} == {torch.bfloat16}
    before = adapter(engine, "default")
    engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
    after = adapter(engine, "default")
    assert {value.dtype for value in after.values()} == {torch.float32}
    assert not same(before, after)
    assert {p.dtype for p in engine.trained().values()} == {torch.float32}
