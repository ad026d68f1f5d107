"""tools/check_golden.py: the published vectors pass, and every way to be wrong is told apart."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parent / "data" / "golden"
TOOL = Path(__file__).parents[3] / "tools" / "check_golden.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_golden", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_golden"] = module  # attrs reads the module of a class it builds
    spec.loader.exec_module(module)
    return module


def cases(tool: ModuleType) -> list[Any]:
    return list(tool.load_cases(GOLDEN))


def test_every_vector_passes(tool: ModuleType) -> None:
    lines: list[str] = []
    assert tool.run(cases(tool), lines.append) == (84, 0, 0)
    assert lines == []


def test_a_changed_expectation_fails(tool: ModuleType) -> None:
    # Every expected tensor and every compared metric is really compared.
    for case in cases(tool):
        for name in [name for name in case.tensors if name.startswith("expected")]:
            changed = {**case.tensors, name: case.tensors[name] + 1e-3}
            broken = tool.attrs.evolve(case, tensors=changed)
            with pytest.raises(tool.CaseError, match=name):
                tool.check(broken)
        for name, number in case.params.get("metrics", {}).items():
            metrics = {**case.params["metrics"], name: number + 1e-3}
            broken = tool.attrs.evolve(case, params={**case.params, "metrics": metrics})
            with pytest.raises(tool.CaseError, match=name):
                tool.check(broken)
        for name in [name for name in case.params if name.startswith("expected_")]:
            changed = [case.params[name][0] + 1, *case.params[name][1:]]
            broken = tool.attrs.evolve(case, params={**case.params, name: changed})
            with pytest.raises(tool.CaseError, match=name):
                tool.check(broken)


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def _drop(key: str) -> Edit:
    def edit(_: dict[str, Any], vectors: dict[str, torch.Tensor]) -> None:
        del vectors[key]

    return edit


def _set(section: str, key: str, value: Any) -> Edit:
    def edit(sections: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        sections[section][0][key] = value

    return edit


def _add(section: str, entry: Any) -> Edit:
    def edit(sections: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        sections.setdefault(section, []).append(entry)

    return edit


def _without(section: str) -> Edit:
    def edit(sections: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        del sections[section][0]

    return edit


@pytest.mark.parametrize(
    ("edit", "summary", "line"),
    [
        (_drop("step00.expected_mean"), "84 cases, 1 failed", "step00.expected_mean is missing"),
        (_drop("step00.velocity"), "84 cases, 1 failed", "step00.velocity is missing"),
        (_set("advantages", "group", ["a"]), "84 cases, 1 failed", "adv0: rewards must be [B]"),
        (
            _set("reverse_steps", "noise_level", "x"),
            "84 cases, 1 failed",
            "failed: reverse_steps/step00",
        ),
        (_set("reverse_steps", "kind", "heun"), "84 cases, 0 failed", "step00: StepKind 'heun'"),
        (_add("reverse_steps", {"name": "new"}), "85 cases, 1 failed", "new: parameter 'kind'"),
        (_add("reverse_steps", 3), "85 cases, 1 failed", "reverse_steps/[27]: no case"),
        (_add("losses", {"name": "n0", "params": {"loss": "n"}}), "85 cases, 0 failed", "losses/n"),
        (_add("later", {"name": "l0"}), "85 cases, 0 failed", "not implemented: later/l0"),
        (
            _without("reverse_steps"),
            "84 cases, 1 failed",
            "step00: vectors.safetensors has tensors",
        ),
    ],
)
def test_a_wrong_case_is_told_apart_from_a_missing_function(
    tool: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Edit,
    summary: str,
    line: str,
) -> None:
    sections = json.loads((GOLDEN / "cases.json").read_text())
    vectors = load_file(GOLDEN / "vectors.safetensors")
    edit(sections, vectors)
    (tmp_path / "cases.json").write_text(json.dumps(sections))
    save_file(vectors, tmp_path / "vectors.safetensors")
    status = tool.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(summary)
    assert lines[-1].endswith(" not implemented")
    assert any(line in text for text in lines[:-1])
    assert status == (0 if ", 0 failed" in summary else 1)


def test_a_folder_without_vectors_cannot_be_read(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(tmp_path)]) == 2
    shutil.copy(GOLDEN / "cases.json", tmp_path)
    assert tool.main([str(tmp_path)]) == 2
    assert "no folder of reference vectors" in capsys.readouterr().err
