"""Every algorithm has a page that names its own settings, and the page on writing one trains what it shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import attrs
import pytest
import yaml

from omni_core import plugins
from omni_core.testing.toys import register_toys, unregister_toys

DOCS = Path(__file__).resolve().parents[1] / "docs"
ALGORITHMS = [
    name
    for name in plugins.registry(plugins.ALGORITHMS).names()
    if plugins.registry(plugins.ALGORITHMS).get(name).target.startswith("omni_core.")
]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_names_the_settings_of_its_algorithm(name):
    text = (DOCS / "algorithms" / f"{name}.md").read_text()
    options = plugins.registry(plugins.ALGORITHMS).get(name).options
    fields = {field.name: field for field in attrs.fields(options)}
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))

    assert named <= set(fields)
    assert {n for n, field in fields.items() if not field.inherited} <= named
    for section in ("minimised", "Settings", "When to use it", "What differs from other codes"):
        assert section in text
    recipes = set(re.findall(r"`((?:tiny|sd3_ocr)_\w+|quickstart)`", text))
    assert len(recipes) == 2
    assert recipes <= set(plugins.registry(plugins.RECIPES).names())


def test_the_list_links_every_page():
    listed = (DOCS / "algorithms.md").read_text()
    pages = sorted(path.stem for path in (DOCS / "algorithms").glob("*.md"))

    assert pages == sorted(ALGORITHMS)
    assert sorted(set(re.findall(r"\(algorithms/(\w+)\.md\)", listed))) == pages


@pytest.fixture
def regression(monkeypatch):
    """The example of the page, as a module of its own that is offered in this process."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "own_algorithm.md").read_text(), re.MULTILINE | re.DOTALL
    )
    module = ModuleType("own_regression")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, "own_algorithm.md", "exec", dont_inherit=True), module.__dict__)
    register_toys()
    yield
    unregister_toys()
    plugins.registry(plugins.ALGORITHMS).unregister("regression")


def test_the_page_on_writing_one_trains_it(regression, tmp_path, tiny_sd3):
    from omni_trainer.config import load_run
    from omni_trainer.reporting.jsonl import read_metrics
    from omni_trainer.run import run_training

    (tmp_path / "train.txt").write_text("sign 0\nsign 1\nsign 2\n")
    run = {
        "model": {
            "path": str(tiny_sd3),
            "family": "sd3",
            "lora": {"rank": 2, "alpha": 8.0},
            "pipeline": {"height": 16, "width": 16, "max_sequence_length": 8},
        },
        "rollout": {
            "name": "engine",
            "samples_per_prompt": 4,
            "sampling": {"num_inference_steps": 3, "guidance_scale": 1.0},
        },
        "algorithm": {"name": "regression", "temperature": 0.5},
        "reward": {"name": "toy"},
        "data": {"train": str(tmp_path / "train.txt"), "prompts_per_step": 2},
        "trainer": {"steps": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    loaded = load_run(str(tmp_path / "run.yaml"), [])
    run_training(loaded.config, run_dir=tmp_path / "run", resolved=loaded.resolved)
    steps = dict(read_metrics(tmp_path / "run"))
    last = steps[max(steps)]
    assert last["actor/regression_weight"] > 0.0
    assert last["actor/kl"] > 0.0
    assert last["actor/grad_norm"] > 0.0
