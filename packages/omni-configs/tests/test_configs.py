"""Recipes are light, short and complete; the tiny pipeline and its prompts are in the package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import resources as package_resources
from pathlib import Path

import pytest
import torch

from omni_core import plugins, resources
from omni_core.config import leaves, read_yaml
from omni_core.recipe import Recipe, Standing

ALGORITHMS = (
    "awm", "dance_grpo", "dgpo", "diffusion_dpo", "diffusion_nft", "distillation",
    "elbo", "flow_dppo", "grpo_guard",
    "mix_grpo", "ram",
)  # fmt: skip
NAMES = (
    "flux_pickscore_flow_grpo",
    "ltx2_flow_grpo",
    "quickstart",
    "qwen_image_edit_pickscore_flow_grpo",
    "qwen_image_ocr_flow_grpo",
    "sd3_ocr_flow_grpo",
    "sd3_ocr_verl_omni",
    "sd3_pickscore_flow_grpo",
    "smoke",
    "spelling",
    "tiny_flow_grpo_full",
    "wan22_dance_grpo",
    *(f"{model}_{name}" for model in ("sd3_ocr", "tiny") for name in ALGORITHMS),
)
SECTIONS = {
    "model", "engine", "optimizer", "checkpoint", "rollout", "algorithm", "reward", "data",
    "evaluation", "trainer", "seeds",
}  # fmt: skip
FOLDER = Path(str(package_resources.files("omni_configs")))
PIPELINES = (FOLDER / "tiny_signs", FOLDER / "tiny_spelling")
PROMPTS = FOLDER / "prompts" / "tiny_signs"


def recipe(name: str) -> Recipe:
    plugin = plugins.registry(plugins.RECIPES).get(name)
    built = plugin.build(plugin.options())
    assert isinstance(built, Recipe)
    return built


def prompts(name: str) -> list[str]:
    return (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def test_every_recipe_file_is_a_plugin():
    files = sorted(path.stem for path in (FOLDER / "recipes").glob("*.yaml"))
    assert files == sorted(NAMES)
    assert set(NAMES) <= set(plugins.registry(plugins.RECIPES).names())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_short_mapping_of_known_sections(name):
    found = recipe(name)
    values = read_yaml(found.yaml, source=name).values
    assert set(values) <= SECTIONS
    assert all(isinstance(section, dict) for section in values.values())
    assert len(list(leaves(values))) <= 40
    assert found.summary
    assert found.hardware
    assert re.fullmatch(r"\d+ prompts x \d+", found.global_batch)
    assert (found.standing is Standing.NOT_RUN) == bool(found.source)


@pytest.mark.parametrize("name", NAMES)
def test_the_global_batch_is_what_the_recipe_says(name):
    found = recipe(name)
    values = read_yaml(found.yaml, source=name).values
    default = 8  # of both keys
    count = values["data"].get("prompts_per_step", default)
    samples = values["rollout"].get("samples_per_prompt", default)
    assert found.global_batch == f"{count} prompts x {samples}"


@pytest.mark.parametrize("name", NAMES)
def test_paths_into_the_package_exist(name):
    values = read_yaml(recipe(name).yaml, source=name).values
    paths = [v for _, v in leaves(values) if isinstance(v, str) and v.startswith("package:")]
    large = name.startswith(("sd3", "flux", "qwen_image", "wan", "ltx2"))
    assert len(paths) == (0 if large else 3)
    for path in paths:
        assert resources.resolve(path).exists()


def test_listing_recipes_imports_neither_torch_nor_yaml():
    code = (
        "import sys\n"
        "from omni_core import plugins\n"
        "found = plugins.registry(plugins.RECIPES)\n"
        "assert all(found.get(name).summary for name in found.names())\n"
        "print(sorted({'torch', 'yaml'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_prompts_are_split_by_pairs_of_object_and_number():
    train, heldout = prompts("train"), prompts("heldout")
    assert (len(train), len(heldout)) == (120, 40)
    assert len({*train, *heldout}) == 160
    pairs = [re.fullmatch(r'A ([a-z -]+) that reads "(\d\d)"', line) for line in train + heldout]
    assert all(pairs)
    assert (len({p[1] for p in pairs}), len({p[2] for p in pairs})) == (8, 20)
    # Each object and each number of the held-out prompts is trained on, in another pair.
    trained = [pair[0] for pair in pairs[:120]]
    for pair in pairs[120:]:
        assert any(pair[1] in line for line in trained)
        assert any(f'"{pair[2]}"' in line for line in trained)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda folder: folder.name)
def test_a_pipeline_has_the_standard_layout_in_bfloat16(pipeline):
    from safetensors import safe_open

    index = json.loads((pipeline / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    parts = [name for name, value in index.items() if isinstance(value, list) and value[0]]
    assert len(parts) == 9
    weights = sorted(pipeline.rglob("*.safetensors"))
    assert [path.parent.name for path in weights] == [
        "text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae",
    ]  # fmt: skip
    count = 0
    for path in weights:
        with safe_open(path, "pt") as file:
            tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
        count += sum(tensor.numel() for tensor in tensors)
    assert 2.9e6 < count < 3.1e6
    assert sum(path.stat().st_size for path in pipeline.rglob("*")) < 7e6


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda folder: folder.name)
def test_a_pipeline_carries_its_card_and_nothing_of_where_it_was_made(pipeline):
    files = sorted(path for path in pipeline.rglob("*") if path.is_file())
    assert pipeline / "README.md" in files
    card = (pipeline / "README.md").read_text(encoding="utf-8")
    assert "## How it was made" in card
    assert "## What it cannot do" in card
    numbers = {line.rpartition(" ")[2].strip('"') for line in prompts("train")}
    assert all(number in card for number in numbers)
    for path in files:
        if path.suffix == ".json":
            assert "_name_or_path" not in path.read_text(encoding="utf-8")
