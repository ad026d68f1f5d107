"""Every recipe is a run that can be started: its keys, its types and what has to fit together."""

from __future__ import annotations

import math

import pytest

from omni_core import plugins
from omni_core.choices import StepKind
from omni_core.options import DType
from omni_core.recipe import Standing
from omni_trainer.config import Backend, load_run
from omni_trainer.reporting.jsonl import read_metrics
from omni_trainer.reporting.metric_names import describe
from omni_trainer.run import run_training

NAMES = plugins.registry(plugins.RECIPES).names()
OURS = {
    name
    for name in NAMES
    if plugins.registry(plugins.RECIPES).get(name).target.startswith("omni_configs.")
}


def test_our_recipes_are_installed():
    assert {"quickstart", "sd3_ocr_flow_grpo", "smoke"} <= OURS


def test_every_algorithm_has_a_recipe_of_each_size():
    """FlowGRPO's on the tiny pipeline is the quickstart."""
    trained = {load_run(name).config.algorithm.name for name in OURS if not name.startswith("sd3")}
    published = {load_run(name).config.algorithm.name for name in OURS if name.startswith("sd3")}
    names = set(plugins.registry(plugins.ALGORITHMS).names())
    ours = {
        name
        for name in names
        if plugins.registry(plugins.ALGORITHMS).get(name).target.startswith("omni_core.")
    }
    assert trained == published == ours


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_valid_run(name):
    loaded = load_run(name)
    plugin = plugins.registry(plugins.RECIPES).get(name)
    recipe = plugin.build(plugin.options())
    config = loaded.config
    prompts, samples = config.data.prompts_per_step, config.rollout.options.samples_per_prompt
    assert recipe.global_batch == f"{prompts} prompts x {samples}"
    assert isinstance(recipe.standing, Standing)


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_recipe_holds_only_what_differs_from_the_defaults(name):
    """Taking out any single value changes the run (or leaves it without something required)."""
    from omni_core.config import ConfigError, leaves, unstructure
    from omni_trainer.config import DEFAULTS, check

    loaded = load_run(name)
    whole = unstructure(loaded.config)
    for path in [path for path, source in loaded.resolved.sources.items() if source != "default"]:
        if path.endswith(".name"):
            continue  # a choice is written out, also where it is the usual one
        try:
            rest = unstructure(check(without(loaded.resolved.values, path.split("."))))
        except ConfigError:
            continue
        assert dict(leaves(rest)) != dict(leaves(whole)), f"{path} is the default"
    assert DEFAULTS.source == "default"


def without(values, path):
    head, *rest = path
    if not rest:
        return {key: value for key, value in values.items() if key != head}
    return {**values, head: without(values[head], rest)}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers and transformers
def test_case_36_the_smoke_recipe_runs_and_every_metric_has_a_meaning(tmp_path):
    loaded = load_run("smoke", [f"trainer.run_dir={tmp_path}", "trainer.name=smoke"])
    summary = run_training(loaded.config, run_dir=tmp_path / "smoke", resolved=loaded.resolved)
    assert summary.trained == 2
    assert len(summary.before.prompts) == len(summary.after.prompts) == 4
    for path in (summary.export, summary.plot, summary.before_after):
        assert path.is_file()
    steps = dict(read_metrics(tmp_path / "smoke"))
    assert list(steps) == [0, 1, 2]
    for name, value in ((n, v) for metrics in steps.values() for n, v in metrics.items()):
        assert math.isfinite(value), name
        assert describe(name), name
    assert "actor/kl" not in steps[2]  # what is not asked for
    assert steps[1]["canary/exact"] == 0
    assert steps[1]["canary/floor"] <= 1e-6


def test_the_quickstart_runs_the_settings_that_were_measured():
    config = load_run("quickstart").config
    assert config.trainer.backend is Backend.RAY
    assert (config.trainer.ranks, config.trainer.threads, config.trainer.steps) == (1, 1, 60)
    assert config.rows_per_step == 96
    assert config.rollout.options.sampling.num_inference_steps == 6
    assert config.rollout.options.sampling.guidance_scale == 1.0
    algorithm = config.algorithm_options
    assert (algorithm.kind, algorithm.noise_level) == (StepKind.SDE, 0.7)
    assert (algorithm.clip, algorithm.updates_per_rollout, algorithm.kl_coef) == (2e-3, 1, 0)
    assert (config.model.lora.rank, config.model.lora.alpha) == (16, 32)
    assert config.model.dtype is DType.FLOAT32
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-3, 1e-4)
    assert config.optimizer.max_grad_norm == 1.0
    evaluation = config.evaluation
    assert (evaluation.kind, evaluation.samples_per_prompt) == (StepKind.ODE, 4)
    assert evaluation.sampling == config.rollout.options.sampling


def test_the_published_settings_are_those_of_the_paper():
    config = load_run("sd3_ocr_flow_grpo").config
    assert config.rows_per_step == 48 * 24
    assert config.rollout.options.sampling.num_inference_steps == 10
    assert config.evaluation.sampling.num_inference_steps == 40
    assert config.rollout.options.sampling.guidance_scale == 4.5
    assert (config.model.pipeline.height, config.model.pipeline.width) == (512, 512)
    assert (config.model.lora.rank, config.model.lora.alpha) == (32, 64)
    assert config.optimizer.lr == 3e-4
    algorithm = config.algorithm_options
    assert (algorithm.kl_coef, algorithm.kl_form.value) == (0.04, "flow_grpo")
    assert (algorithm.clip, algorithm.adv_clip, algorithm.noise_level) == (1e-4, 5.0, 0.7)
    assert algorithm.updates_per_rollout == 2
    assert config.reward.options.detect
