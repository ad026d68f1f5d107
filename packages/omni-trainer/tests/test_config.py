"""A run's config: sections, layers, and everything that is wrong with it at once."""

import subprocess
import sys

import pytest

from omni_core import config as core
from omni_core.config import ConfigError
from omni_core.plugins import ROLLOUTS, Plugin, PluginNotFoundError, registry
from omni_core.testing.toys.options import ToyRolloutConfig
from omni_trainer.config import check, known_paths, load_run


def mistakes(source, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_run(source, overrides)
    return caught.value.mistakes


def one(lines, start):
    (found,) = [line for line in lines if line.startswith(f"{start}:")]
    return found


def test_a_config_is_checked_without_torch():
    code = (
        "import sys, omni_trainer.config; "
        "print([m for m in ('torch', 'ray', 'datasets', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_later_layers_win_and_each_value_says_where_it_is_from(toy_source):
    loaded = load_run(toy_source, ["optimizer.lr=5e-4", "trainer.name=first"])
    sources = loaded.resolved.sources

    assert loaded.config.optimizer.lr == 5e-4
    assert core.source_of("optimizer.lr", sources) == "command line"
    assert core.source_of("optimizer.weight_decay", sources) == "default"
    assert core.source_of("engine.name", sources) == str(toy_source)
    assert loaded.config.trainer.steps == 2, "a run's name is no plugin: other values stay"


def test_an_unknown_recipe_names_those_that_are_installed():
    with pytest.raises(PluginNotFoundError, match="plugin named 'quikstart'"):
        load_run("quikstart")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        load_run(str(tmp_path / "nowhere.yaml"))


def test_case_16_a_group_of_one_is_refused_by_both_keys(toy_source):
    line = one(mistakes(toy_source, "rollout.samples_per_prompt=1"), "algorithm.name")

    assert "flow_grpo" in line
    assert "rollout.samples_per_prompt is 1, and must be at least 2" in line


def test_case_20_rows_that_do_not_divide_are_refused_with_values_that_fit(toy_source):
    lines = mistakes(toy_source, "trainer.ranks=8", "trainer.backend=ray")
    line = one(lines, "data.prompts_per_step")

    assert "3 prompts x rollout.samples_per_prompt 4 = 12 rows" in line
    assert "prompts_per_step 2 or 4 would" in line
    assert "trainer.ranks 1, 2, 3, 4, 6, 12" in line


def test_updates_divide_the_rows_too(toy_source):
    line = one(mistakes(toy_source, "algorithm.updates_per_rollout=5"), "data.prompts_per_step")

    assert "algorithm.updates_per_rollout 5" in line
    assert "prompts_per_step 5 would" in line


def test_case_33_a_key_a_type_and_a_choice_are_reported_together(toy_source):
    lines = mistakes(
        toy_source, "+trainer.sav_freq=5", "optimizer.lr=abc", "trainer.resume_mode=atuo"
    )

    assert len(lines) == 3
    assert "did you mean 'checkpoint.every'" in one(lines, "trainer.sav_freq")
    assert one(lines, "optimizer.lr") == "optimizer.lr: expected a number, got 'abc'"
    assert one(lines, "trainer.resume_mode").endswith("did you mean 'auto'?")


def test_mistakes_of_an_algorithm_appear_beside_unknown_keys_anywhere(toy_source):
    lines = mistakes(
        toy_source,
        "algorithm.window_range=[0,10]",
        "algorithm.clip_ration=1",
        "trainer.lr=1",
        "rollout.sampling.num_inference_stps=3",
    )

    assert "reaches the last of 4 steps" in one(lines, "algorithm.window_range")
    assert "did you mean 'clip_ratio'" in one(lines, "algorithm.clip_ration")
    assert "did you mean 'optimizer.lr'" in one(lines, "trainer.lr")
    assert "num_inference_steps" in one(lines, "rollout.sampling.num_inference_stps")


def test_a_plus_before_a_key_that_exists_is_a_mistake(toy_source):
    assert mistakes(toy_source, "+trainer.steps=3") == (
        "trainer.steps: a key that exists is set without `+`: write trainer.steps=...",
    )


@pytest.mark.parametrize(
    ("override", "path", "said"),
    [
        ("trainer.ranks=2", "trainer.ranks", "need trainer.backend=ray"),
        ("trainer.trackers=[jsnl]", "trainer.trackers[0].name", "did you mean 'jsonl'"),
        ("engine.seed=3", "engine.seed", "seeds.train"),
        ("engine.device=cpu", "engine.device", "trainer.device"),
        ("evaluation.kind=sde", "evaluation.noise_level", "above 0"),
        ("trainer.trackers=[jsonl,jsonl]", "trainer.trackers", "both would write the same files"),
        ("algorithm={kind: cps, noise_level: 2}", "algorithm.noise_level", "(0, 1], got 2"),
        ("evaluation={kind: cps, noise_level: 1.5}", "evaluation.noise_level", "(0, 1], got 1.5"),
        (
            "optimizer={schedule: cosine, total_steps: 1}",
            "optimizer.total_steps",
            "the run has 2: the rest would train with a rate of 0",
        ),
        ("evaluation.noise_level=0.7", "evaluation.noise_level", "kind ode"),
        ("reward=null", "reward", "algorithm 'flow_grpo' needs one"),
        ("nonsense=1", "nonsense", "unknown key"),
        (
            "rollout.servers=2",
            "rollout.servers",
            "2 servers are Ray actors: set trainer.backend=ray",
        ),
        ("rollout.transport=object_store", "rollout.transport", "rollout.servers is 0; take auto"),
        ("engine.name=fsdp3", "engine.name", "no engine backend named 'fsdp3'"),
    ],
)
def test_rules_between_sections(toy_source, override, path, said):
    assert said in one(mistakes(toy_source, override), path)


def test_servers_hold_a_rollout_that_can_live_without_the_engine(toy_source):
    lived_in = Plugin(
        api=1, options=ToyRolloutConfig, target="omni_core.testing.toys.rollout:ToyRollout"
    )
    registry(ROLLOUTS).register("lodger", lived_in)
    try:
        served = ("trainer.backend=ray", "rollout.servers=1")
        line = one(mistakes(toy_source, "rollout.name=lodger", *served), "rollout.servers")
        assert "'lodger' samples in the process of the training engine; take 0" in line
        assert load_run(toy_source, served).config.rollout.options.servers == 1
    finally:
        registry(ROLLOUTS).unregister("lodger")


def test_required_sections_are_named():
    with pytest.raises(ConfigError) as caught:
        check({})

    assert set(caught.value.mistakes) >= {
        "model: required and missing",
        "data: required and missing",
        "algorithm: required and missing",
    }


def test_the_actor_gets_what_other_sections_decide(toy_source):
    actor = load_run(
        toy_source, ["seeds.train=7", "trainer.device=cpu", "algorithm.updates_per_rollout=2"]
    ).config.actor()

    assert (actor.engine.seed, actor.engine.device) == (7, "cpu")
    assert actor.optimizer.total_steps == 4
    assert actor.loss.name == "flow_grpo"


def test_every_key_of_a_run_is_listed():
    assert {"optimizer.lr", "model.lora.rank", "evaluation.sampling.shift", "reward.name"} <= set(
        known_paths()
    )
