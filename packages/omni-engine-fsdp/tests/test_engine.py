"""What the engine itself adds to the suite of every engine."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from omni_core import plugins
from omni_core.algorithms.flow_grpo_options import FlowGRPOOptions
from omni_core.options import (
    DiffusionModelConfig,
    DType,
    EngineConfig,
    LRSchedule,
    OptimizerConfig,
)
from omni_core.plugins import EngineRegistry
from omni_engine_fsdp import (
    EngineRolloutConfig,
    FSDPEngineConfig,
    PPODiffusersFSDPEngine,
    RolloutPlacement,
    SD3Family,
    ShardBase,
)
from omni_engine_fsdp.model_index import find_family
from omni_engine_fsdp.options import Offload
from omni_engine_fsdp.sharding import replicates_base


def test_the_registry_builds_the_engine(tiny_sd3: Path) -> None:
    engine = EngineRegistry.new(
        "diffusion",
        "fsdp2",
        "cpu",
        model_config=DiffusionModelConfig(path=str(tiny_sd3)),
        engine_config=FSDPEngineConfig(),
        optimizer_config=None,
        checkpoint_config=None,
    )
    assert isinstance(engine, PPODiffusersFSDPEngine)
    assert issubclass(
        plugins.registry(plugins.ENGINES).get("diffusion.fsdp2").options, EngineConfig
    )


def test_a_family_is_found_by_the_pipelines_class(tiny_sd3: Path, tmp_path: Path) -> None:
    assert isinstance(find_family(DiffusionModelConfig(path=str(tiny_sd3))), SD3Family)
    named = DiffusionModelConfig(path=str(tiny_sd3), family="sd3")
    assert isinstance(find_family(named), SD3Family)
    (tmp_path / "model_index.json").write_text('{"_class_name": "OtherPipeline"}')
    with pytest.raises(ValueError, match="no installed family serves OtherPipeline") as caught:
        find_family(DiffusionModelConfig(path=str(tmp_path)))
    assert "sd3: StableDiffusion3Pipeline" in str(caught.value)


def test_one_rank_replicates_its_base_and_many_do_while_it_fits() -> None:
    device = torch.device("cpu")
    small, config = 10**6, FSDPEngineConfig(base_memory_share=0.01)
    huge = 10**15
    assert replicates_base(config, huge, device=device, ranks=1)
    assert replicates_base(config, small, device=device, ranks=2)
    assert not replicates_base(config, huge, device=device, ranks=2)


def test_a_replicated_base_is_no_dtensor_and_an_adapter_is_one(
    build_engine: Any, tiny_sd3: Path
) -> None:
    for shard, expected in (("replicate", {"Parameter"}), ("shard", {"DTensor"})):
        engine = build_engine(tiny_sd3, shard_base=shard)
        base = engine.base_parameters()["transformer"].values()
        assert {type(parameter).__name__ for parameter in base} == expected
        adapter = engine.adapter_parameters("default")["transformer"].values()
        assert {type(parameter).__name__ for parameter in adapter} == {"DTensor"}


def test_an_engine_without_optimizer_only_predicts(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    engine = build_engine(tiny_sd3)
    assert engine.infer_batch(ranks.rows([0])).log_probs.shape == (1, 2)
    with pytest.raises(RuntimeError, match="without an optimizer config"):
        engine.train_batch(ranks.rows([0]), ranks.loss)


def test_a_schedule_without_its_length_is_refused_at_once(
    build_engine: Any, tiny_sd3: Path
) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.total_steps"):
        build_engine(tiny_sd3, optimizer=OptimizerConfig(schedule=LRSchedule.COSINE))


def test_parts_move_away_and_back(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> None:
    """On the CPU both places are the same: training goes on as if nothing had happened."""
    straight, moved = (build_engine(tiny_sd3, optimizer=ranks.LR) for _ in range(2))
    for step in range(3):
        for engine in (straight, moved):
            engine.train_batch(ranks.rows([step]), ranks.loss)
        with pytest.raises(ValueError, match="gradients lie where their weights lie"):
            moved.to("cpu", model=False)
        moved.optimizer_zero_grad()
        moved.to("cpu")
        moved.to("device")
    ours, theirs = ranks.weights(moved), ranks.weights(straight)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    with pytest.raises(ValueError, match=r"engine\.to\('moon'\): expected 'cpu' or 'device'"):
        moved.to("moon")


def test_whole_tensors_are_given_where_one_place_says(
    build_engine: Any, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a device: with `offload: all` adapters lie in host memory and a replicated base does not."""
    engine = build_engine(tiny_sd3, offload=Offload.ALL, shard_base=ShardBase.REPLICATE)
    assert engine.weights_device == torch.device("cpu")
    kinds: list[dict[str, Any]] = [{"merged": True}, {"adapter": None}, {}]
    shapes = [{n: v.shape for n, v in engine.get_per_tensor_param(**kind)} for kind in kinds]
    monkeypatch.setattr(type(engine), "weights_device", torch.device("meta"))
    for kind, wanted in zip(kinds, shapes, strict=True):
        found = dict(engine.get_per_tensor_param(**kind))
        assert {value.device.type for value in found.values()} == {"meta"}
        assert {name: value.shape for name, value in found.items()} == wanted


def test_weights_are_given_in_host_memory_while_they_rest_there(
    build_engine: Any, tiny_sd3: Path
) -> None:
    engine = build_engine(tiny_sd3)
    engine.device = torch.device("meta")  # as another one than that of host memory
    assert engine.weights_device == torch.device("meta")
    engine._rests = True
    assert engine.weights_device == torch.device("cpu")


def test_an_engine_whose_weights_sample_cannot_rest() -> None:
    config, algorithm = FSDPEngineConfig(rest_on_host=True), FlowGRPOOptions()
    assert config.rests_on_host
    assert not FSDPEngineConfig().rests_on_host
    (said,) = config.mistakes(algorithm, EngineRolloutConfig()).values()
    assert "samples with the trained weights themselves; take rest_on_host=false" in said
    replica = EngineRolloutConfig(placement=RolloutPlacement.REPLICA)
    assert config.mistakes(algorithm, replica) == {}


def test_rows_that_cannot_be_trained_are_refused(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    engine = build_engine(tiny_sd3, optimizer=ranks.LR)
    ode = ranks.rows([0, 1], ((), ()))
    with pytest.raises(ValueError, match="2 rows of 0 steps"):
        engine.train_batch(ode, ranks.loss)
    with pytest.raises(ValueError, match="step 3 is the last of the schedule"):
        engine.train_batch(ranks.rows([0], ((3,),)), ranks.loss)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        engine.optimizer_step()


def test_an_update_in_which_nothing_counts_still_agrees(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    """All rows unscored: gradients of zero, so that every rank does the same."""
    engine = build_engine(tiny_sd3, optimizer=attrs.evolve(ranks.LR, weight_decay=0.0))
    before = ranks.weights(engine)
    batch = attrs.evolve(ranks.rows([0, 1]), weights=torch.zeros(2))
    output = engine.train_batch(batch, ranks.loss)
    assert output.metrics["grad_norm"].mean == 0.0
    assert "log_prob" not in output.metrics
    assert all(torch.equal(v, before[n]) for n, v in ranks.weights(engine).items())


def test_replay_needs_whole_batches(build_engine: Any, ranks: ModuleType, tiny_sd3: Path) -> None:
    engine = build_engine(tiny_sd3)
    trajectory = ranks.rows([0, 1, 2]).trajectory
    assert engine.replay(trajectory).shape == (3, 2)
    with pytest.raises(ValueError, match=r"batch '0/0/0' lacks the rows at places \[1\]"):
        engine.replay(trajectory.select(torch.tensor([0, 2])))
    with pytest.raises(ValueError, match="place 0 twice"):
        engine.replay(trajectory.select(torch.tensor([0, 0])))


def test_the_step_sizes_of_a_loss_are_exact_in_float64(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path
) -> None:
    engine = build_engine(tiny_sd3, dtype=DType.FLOAT64, optimizer=ranks.LR)
    batch, seen = ranks.rows([0]), []

    def loss(inputs: Any) -> Any:
        seen.append(inputs.dt)
        return ranks.loss(inputs)

    engine.train_batch(batch, loss)
    sigmas = batch.trajectory.effective.schedule().sigmas.double()
    steps = batch.trajectory.step_indices.flatten()
    assert torch.equal(torch.cat(seen), sigmas[steps + 1] - sigmas[steps])
