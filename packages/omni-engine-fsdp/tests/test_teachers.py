"""Adapters that others trained: bound whole to the base that they belong to, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_core.algorithms.distillation import Distillation
from omni_core.algorithms.distillation_options import DistillationOptions, TeacherConfig
from omni_core.engine import CheckpointError, LossInputs, LossTerms
from omni_core.options import CheckpointConfig, LoRAConfig, OptimizerConfig
from omni_engine_fsdp import FSDPEngineConfig, PPODiffusersFSDPEngine, sharding
from tiny_models.sd3 import build_tiny_sd3

Build = Callable[..., PPODiffusersFSDPEngine]
LORA = LoRAConfig(rank=2, alpha=8.0)


class Held:
    """The loss of online distillation."""

    needs_teacher = True

    def __init__(self) -> None:
        options = DistillationOptions(teachers=(TeacherConfig(path="-"),))
        self.algorithm = Distillation(options)
        self.inputs: list[LossInputs] = []

    def __call__(self, inputs: LossInputs) -> LossTerms:
        self.inputs.append(inputs)
        return self.algorithm.loss(inputs)


@pytest.fixture(scope="module")
def trained(
    build_engine: Any, ranks: ModuleType, tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Exports of one adapter after one update, and after four."""
    engine = build_engine(tiny_sd3, optimizer=OptimizerConfig(lr=2e-2))
    folder, found = tmp_path_factory.mktemp("teachers"), []
    for name, steps in (("one", 1), ("four", 3)):
        for _ in range(steps):
            engine.train_batch(ranks.rows([0, 1, 2]), ranks.loss)
        engine.export_adapter(folder / name)
        found.append(folder / name)
    return found[0], found[1]


@pytest.fixture
def student(build_engine: Any, tiny_sd3: Path) -> Build:
    """Build a student with teachers `t0`, `t1`, ... at these directories."""

    def build(*directories: Path, path: Path = tiny_sd3, lora: LoRAConfig = LORA) -> Any:
        class WithTeachers(PPODiffusersFSDPEngine):
            def initialize(self) -> None:
                for place, directory in enumerate(directories):
                    self.add_teacher(f"t{place}", directory)
                super().initialize()

        return build_engine(path, lora=lora, optimizer=OptimizerConfig(lr=1e-2), kind=WithTeachers)

    return build


def without_peft(directory: Path, target: Path) -> Path:
    shutil.copytree(directory, target)
    shutil.rmtree(target / "peft")
    return target


@pytest.mark.parametrize("layout", ["peft", "diffusers"])
def test_a_teacher_is_bound_as_it_was_exported_and_stays_frozen(
    student: Build, ranks: ModuleType, trained: tuple[Path, Path], tmp_path: Path, layout: str
) -> None:
    directory = trained[1] if layout == "peft" else without_peft(trained[1], tmp_path / "t")
    engine = student(directory)
    file = load_file(trained[1] / "peft" / "adapter_model.safetensors")

    def bound() -> dict[str, torch.Tensor]:
        found = engine.get_per_tensor_param(adapter="teacher_t0")
        return {
            name.replace("transformer.", "base_model.model.", 1): value.clone()
            for name, value in found
        }

    engine.train_batch(ranks.rows([0, 1, 2]), Held())
    values = bound()
    assert values.keys() == file.keys()
    assert all(torch.equal(values[name], file[name]) for name in file)
    assert all("teacher" not in name for name in engine.trained())


def test_a_student_that_is_its_teacher_has_kl_0_and_gradient_0(
    student: Build, ranks: ModuleType, trained: tuple[Path, Path]
) -> None:
    """Up to the rounding by which forwards with and without a graph differ."""
    engine, norms, distances = student(trained[1]), [], []
    for equal in (False, True):
        if equal:
            engine.copy_adapter("teacher_t0", "default")
        engine.optimizer_zero_grad()
        with engine.train_mode():
            output = engine.forward_backward_batch(ranks.rows([0, 1, 2]), Held())
        gradients = [p.grad for p in engine.trained().values() if p.grad is not None]
        assert len(gradients) == len(engine.trained())
        norms.append(float(sum(sharding.whole(g).square().sum() for g in gradients)) ** 0.5)
        distances.append(output.metrics["teacher_distance"].high)
    assert distances[0] > 1e-6
    assert distances[1] < 1e-12
    assert norms[1] < 1e-4 * norms[0]


def test_a_student_comes_closer(
    student: Build, ranks: ModuleType, trained: tuple[Path, Path]
) -> None:
    engine = student(trained[1])
    rows = ranks.rows([0, 1, 2])
    distances = [
        engine.train_batch(rows, Held()).metrics["teacher_distance"].mean for _ in range(20)
    ]
    assert distances[0] > 0.0
    assert distances[-1] < 0.3 * distances[0]


def test_each_row_sees_its_own_teacher_whatever_the_micro_batches(
    student: Build, ranks: ModuleType, trained: tuple[Path, Path]
) -> None:
    engine = student(*trained)
    batch = ranks.rows([0, 1, 2])
    places = torch.arange(batch.trajectory.rows) % 2
    both = engine.infer_batch(attrs.evolve(batch, teachers=places), Held()).metrics
    total = both["teacher_distance"].total
    alone = []
    for place, directory in enumerate(trained):
        only = student(directory)
        rows = batch.select((places == place).nonzero().flatten())
        alone.append(only.infer_batch(rows, Held()).metrics["teacher_distance"].total)
    assert alone[0] != alone[1]
    assert total == pytest.approx(sum(alone), rel=1e-5)


def test_rows_that_do_not_say_whose_they_are_are_refused(
    student: Build, ranks: ModuleType, trained: tuple[Path, Path]
) -> None:
    engine, batch = student(*trained), ranks.rows([0, 1, 2])
    with pytest.raises(ValueError, match="teachers t0, t1"):
        engine.infer_batch(batch, Held())
    wrong = attrs.evolve(batch, teachers=torch.full((batch.trajectory.rows,), 2))
    with pytest.raises(ValueError, match=r"have teachers \[2\]; there are 2"):
        engine.infer_batch(wrong, Held())
    with pytest.raises(ValueError, match="has none: add_teacher"):
        student().infer_batch(batch, Held())


def test_a_teacher_of_another_rank_scale_or_set_of_targets_is_refused(
    student: Build, trained: tuple[Path, Path]
) -> None:
    with pytest.raises(ValueError, match=r"rank is 2, and model\.lora\.rank is 4"):
        student(trained[0], lora=LoRAConfig(rank=4, alpha=8.0))
    with pytest.raises(ValueError, match=r"alpha is 8\.0, and model\.lora\.alpha is 4\.0"):
        student(trained[0], lora=LoRAConfig(rank=2, alpha=4.0))
    lora = LoRAConfig(rank=2, alpha=8.0, targets=("to_q",))
    with pytest.raises(ValueError, match=r"missing none; too many .* and \d+ more"):
        student(trained[0], lora=lora)


def test_a_teacher_of_another_base_is_refused(
    student: Build, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """Names and shapes are the same; the weights are not."""
    other = tmp_path / "other"
    build_tiny_sd3(other)
    file = next((other / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["proj_out.bias"] = tensors["proj_out.bias"] + 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="trained on another base"):
        student(trained[0], path=other)


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_a_teacher_beside_another_encoder_or_codec_is_refused(
    student: Build, tiny_sd3: Path, trained: tuple[Path, Path], tmp_path: Path, part: str
) -> None:
    """Only one value of one tensor is another; the same value in another format says nothing."""
    other = tmp_path / "other"
    shutil.copytree(tiny_sd3, other)
    student(trained[0], path=other)
    file = next((other / part).glob("*.safetensors"))
    tensors = load_file(file)
    half = {name: value.half() for name, value in tensors.items()}
    first = next(iter(tensors.values()))
    first.view(-1)[0] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"other weights of {part} than model.path has"):
        student(trained[0], path=other)
    save_file(half, file, metadata={"format": "pt"})
    student(trained[0], path=other)


def test_files_that_are_no_adapter_are_refused(
    student: Build, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        student(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="it holds nothing"):
        student(tmp_path / "empty")
    shutil.copytree(trained[0], tmp_path / "lacking")
    file = tmp_path / "lacking" / "peft" / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = sorted(tensors)[0]
    save_file({name: value for name, value in tensors.items() if name != gone}, file)
    with pytest.raises(ValueError, match="missing " + gone.removeprefix("base_model.model.")):
        student(tmp_path / "lacking")
    bare = without_peft(trained[0], tmp_path / "bare")
    weights = bare / "pytorch_lora_weights.safetensors"
    save_file(load_file(weights), weights)
    with pytest.raises(ValueError, match="says no rank and alpha"):
        student(bare)
    shutil.copytree(trained[0], tmp_path / "dora")
    config = tmp_path / "dora" / "peft" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    with pytest.raises(ValueError, match="not a plain LoRA: use_dora"):
        student(tmp_path / "dora")


def test_teachers_are_added_before_initialize_to_an_adapted_model(
    student: Build, build_engine: Any, tiny_sd3: Path, trained: tuple[Path, Path]
) -> None:
    with pytest.raises(RuntimeError, match="before initialize"):
        student().add_teacher("late", trained[0])
    whole = student().model_config
    engine = PPODiffusersFSDPEngine(
        attrs.evolve(whole, lora=None), FSDPEngineConfig(device="cpu"), None, CheckpointConfig()
    )
    with pytest.raises(ValueError, match="every weight is trained"):
        engine.add_teacher("t", trained[0])


def test_a_checkpoint_goes_on_with_the_same_teacher_only(
    student: Build, ranks: ModuleType, trained: tuple[Path, Path], tmp_path: Path
) -> None:
    engine, rows = student(trained[1]), ranks.rows([0, 1, 2])
    engine.train_batch(rows, Held())
    state = json.loads(json.dumps(engine.save_checkpoint(tmp_path)))
    saved = [n for f in tmp_path.rglob("*.safetensors") for n in load_file(f)]
    assert saved
    assert not [name for name in saved if "teacher" in name]
    again = student(trained[1])
    again.load_checkpoint(tmp_path, state)
    for each in (engine, again):
        each.train_batch(rows, Held())
    ours, theirs = (dict(e.get_per_tensor_param()) for e in (engine, again))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    with pytest.raises(CheckpointError, match="another kind of run"):
        student(trained[0]).load_checkpoint(tmp_path, state)
