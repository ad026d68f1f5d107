"""The GPU check runs everywhere in its smoke mode, and survives what it measures."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from omni_core.plugins import MODELS, registry

CHECK = Path(__file__).resolve().parents[1] / "tools" / "gpu_check"


@pytest.fixture(scope="module")
def check():
    """Modules of tools/gpu_check, whose names and family are taken back."""
    before = set(sys.modules)
    sys.path[:0] = [str(CHECK), str(CHECK.parent)]
    try:
        yield importlib.import_module("check")
    finally:
        for name in registry(MODELS).registered():
            registry(MODELS).unregister(name)
        sys.path[:] = [p for p in sys.path if p not in (str(CHECK), str(CHECK.parent))]
        ours = ("check", "measure", "random_sd3", "prepare_wheels", "tiny_models")
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ours:
                sys.modules.pop(name)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_the_smoke_mode_measures_every_section(check, tmp_path, capsys):
    assert check.main(["--smoke", "--out", str(tmp_path)]) == 0

    said = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(said["sections"]) == [section.name for section in check.SECTIONS]
    assert [n for n, found in said["sections"].items() if "error" in found] == []
    assert said["versions"]["device"] == "cpu"
    canary = said["sections"]["lora"]["canary"]
    assert list(canary) == ["sde", "cps", "dance_sde"]
    assert [kind["exact"] for kind in canary.values()] == [0.0, 0.0, 0.0]
    assert said["sections"]["lora compile"]["compile_s"] > 0.0
    table = (tmp_path / "gpu_check.md").read_text()
    assert table in capsys.readouterr().out
    assert "| lora merge_lora | sde |" in table


def test_a_section_that_fails_or_hangs_is_reported_and_the_next_goes_on(check):
    sections = [check.Section(name="a", limit=9.0), check.Section(name="b")]
    limits, saved = [], []

    def save(found):
        saved.append(list(found))

    def run(section, limit):
        limits.append(limit)
        return {"error": "OutOfMemoryError: x"} if section.name == "a" else {"load_s": 1.0}

    found = check.check(sections, run, budget=100.0, save=save)

    assert saved == [["a"], ["a", "b"]]
    assert limits[0] == 9.0
    assert 9.0 < limits[1] <= 45.0
    assert [found["a"]["error"], found["b"]["load_s"]] == ["OutOfMemoryError: x", 1.0]
    late = check.check(sections, run, budget=0.0, save=save)
    assert [result["error"] for result in late.values()] == ["not run: 0 s were left"] * 2


def test_a_process_is_held_to_its_limit(check):
    def words(code, limit=30.0):
        return check.supervised([sys.executable, "-S", "-c", code], limit)

    assert words("print('noise'); print('{\"load_s\": 2}')") == {"load_s": 2}
    for noise in ("done", "3"):
        assert words(f"print('{noise}')") == {"error": f"its last words are no result: {noise}"}
    assert words("raise SystemExit(3)") == {"error": "ended with 3"}
    assert words("import sys; sys.exit('killed by x')") == {"error": "killed by x"}
    assert words("import time; time.sleep(60)", 0.2) == {"error": "not done after 0 s"}


def test_wheels_are_those_of_this_environment_but_what_is_there(check):
    wheels = importlib.import_module("prepare_wheels")
    pins = wheels.needed(wheels.OURS, [*wheels.THERE, "transformers"])

    assert {"attrs", "cattrs", "structlog", "tensordict", "diffusers", "peft"} <= pins.keys()
    assert not {"torch", "numpy", "transformers", "omni-core"} & pins.keys()
    build, download = wheels.commands(
        Path("out"), pins.items(), python="3.12", platforms=["any_linux"]
    )
    assert [Path(p).name for p in build[-2:]] == list(wheels.OURS)
    assert f"diffusers=={pins['diffusers']}" in download
    assert {"--python-version=3.12", "--platform=any_linux", "--no-deps"} <= set(download)
