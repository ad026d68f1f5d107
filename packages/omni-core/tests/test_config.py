"""Configs are strict: every mistake at once, with its path, and every value with its source."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import attrs
import pytest

from omni_core import plugins
from omni_core.config import (
    ConfigError,
    Layer,
    PluginChoice,
    leaves,
    merge,
    parse_overrides,
    read_yaml,
    source_of,
    structure,
    unstructure,
)
from omni_core.options import LRSchedule, OptimizerConfig, RewardConfig, positive
from omni_core.plugins import Plugin


class ResumeMode(enum.StrEnum):
    AUTO = "auto"
    NEVER = "never"


@attrs.frozen(kw_only=True)
class Trainer:
    save_freq: int = attrs.field(default=10, validator=positive)
    resume_mode: ResumeMode = ResumeMode.AUTO
    name: str | None = None
    shuffle: bool = True
    run_dir: Path = Path("runs")


@attrs.frozen(kw_only=True)
class Shape:
    sizes: tuple[int, ...] = ()
    parts: tuple[Trainer, ...] = ()
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    low: float = 0.0
    high: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            msg = f"low {self.low} is above high {self.high}"
            raise ValueError(msg)


@attrs.frozen(kw_only=True)
class Run:
    steps: int
    trainer: Trainer = attrs.field(factory=Trainer)
    optimizer: OptimizerConfig = attrs.field(factory=OptimizerConfig)
    shape: Shape = attrs.field(factory=Shape)
    reward: Annotated[PluginChoice, plugins.REWARDS] | None = None
    engine: Annotated[PluginChoice, plugins.ENGINES] | None = None


@attrs.frozen(kw_only=True)
class BrightOptions(RewardConfig):
    scale: float = 1.0


@pytest.fixture
def offers() -> Iterator[None]:
    plugin = Plugin(api=1, options=BrightOptions, target="builtins:dict")
    plugins.registry(plugins.REWARDS).register("bright", plugin)
    plugins.registry(plugins.ENGINES).register("diffusion.bright2", plugin)
    yield
    plugins.registry(plugins.REWARDS).unregister("bright")
    plugins.registry(plugins.ENGINES).unregister("diffusion.bright2")


def mistakes(raw: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        structure(raw, Run)
    assert str(error.value) == "\n".join(error.value.mistakes)
    return list(error.value.mistakes)


# -- structuring -----------------------------------------------------------------------------------


def test_case_33_all_mistakes_at_once_with_path_and_nearest_name() -> None:
    layer = parse_overrides(
        ["steps=3", "trainer.sav_freq=5", "optimizer.lr=abc", "trainer.resume_mode=atuo"]
    )
    said = mistakes(layer.values)
    assert len(said) == 3
    assert said[0].startswith("trainer.sav_freq: unknown key; did you mean 'save_freq'?")
    assert said[1] == "trainer.resume_mode: 'atuo' is none of auto, never; did you mean 'auto'?"
    assert said[2] == "optimizer.lr: expected a number, got 'abc'"


def test_case_33_a_key_is_not_added_with_a_plus() -> None:
    said = mistakes({"steps": 1, "+trainer": {"save_freq": 5}})
    assert said == [
        "+trainer: unknown key; did you mean 'trainer'? "
        "known: steps, trainer, optimizer, shape, reward, engine"
    ]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({}, "steps: required and missing"),
        ({"steps": 1.0}, "steps: expected a whole number, got 1.0"),
        ({"steps": True}, "steps: expected a whole number, got True"),
        ({"steps": "3"}, "steps: expected a whole number, got '3'"),
        ({"steps": None}, "steps: expected a whole number, got None"),
        ({"steps": 1, "trainer": 3}, "trainer: expected a mapping of save_freq, resume_mode"),
        ({"steps": 1, "trainer": {"shuffle": 0}}, "trainer.shuffle: expected true or false, got 0"),
        ({"steps": 1, "trainer": {"name": 7}}, "trainer.name: expected a text, got 7"),
        ({"steps": 1, "trainer": {"run_dir": 7}}, "trainer.run_dir: expected a text, got 7"),
        (
            {"steps": 1, "trainer": {"save_freq": 0}},
            "trainer.save_freq: must be > 0, not 0",
        ),
        (
            {"steps": 1, "trainer": {"resume_mode": ["auto"]}},
            "trainer.resume_mode: ['auto'] is none",
        ),
        ({"steps": 1, "optimizer": {"lr": True}}, "optimizer.lr: expected a number, got True"),
        ({"steps": 1, "shape": {"sizes": "12"}}, "shape.sizes: expected a list, got '12'"),
        ({"steps": 1, "shape": {"sizes": [1, "2"]}}, "shape.sizes[1]: expected a whole number"),
        ({"steps": 1, "shape": {"parts": [{}, {"nam": "x"}]}}, "shape.parts[1].nam: unknown key"),
        ({"steps": 1, "shape": {"low": 2}}, "shape: low 2.0 is above high 1.0"),
        ({"steps": 1, "optimizer": {"betas": [0.9, 2]}}, "optimizer.betas: expected two numbers"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(raw: dict[str, Any], line: str) -> None:
    (said,) = mistakes(raw)
    assert said.startswith(line)


def test_what_does_not_fit_as_a_whole_is_a_config_error_too() -> None:
    with pytest.raises(ConfigError, match="expected a mapping of steps"):
        structure([1], Run)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="above high"):
        structure({"low": 3}, Shape)


def test_right_values_become_their_types_and_go_back() -> None:
    raw = {
        "steps": 3,
        "trainer": {"resume_mode": "never", "name": None, "run_dir": "~/x"},
        "optimizer": {"lr": 1, "schedule": "cosine", "betas": [0.9, 0.95]},
        "shape": {"sizes": [4, 5], "parts": [{"save_freq": 2}], "extra": {"a": [1]}},
    }
    run = structure(raw, Run)
    assert run.trainer.resume_mode is ResumeMode.NEVER
    assert run.trainer.run_dir == Path("~/x").expanduser()
    assert isinstance(run.optimizer.lr, float)
    assert run.optimizer.schedule is LRSchedule.COSINE
    assert run.optimizer.betas == (0.9, 0.95)
    assert run.shape.sizes == (4, 5)
    assert run.shape.parts[0].save_freq == 2
    plain = unstructure(run)
    assert plain["trainer"]["resume_mode"] == "never"
    assert type(plain["trainer"]["resume_mode"]) is str
    assert structure(plain, Run) == run


def test_a_part_that_is_built_already_is_taken_as_it_is() -> None:
    trainer = Trainer(save_freq=3)
    assert structure({"steps": 1, "trainer": trainer}, Run).trainer is trainer


# -- plugins ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("offers")
def test_a_choice_holds_its_plugins_own_options() -> None:
    run = structure({"steps": 1, "reward": {"name": "bright", "scale": 2, "workers": 3}}, Run)
    assert run.reward is not None
    assert run.reward.options == BrightOptions(scale=2.0, workers=3)
    assert run.reward.plugin.options is BrightOptions
    assert unstructure(run)["reward"]["name"] == "bright"
    assert structure(unstructure(run), Run) == run
    assert structure({"steps": 1, "reward": run.reward}, Run).reward is run.reward


@pytest.mark.usefixtures("offers")
def test_mistakes_inside_and_beside_a_choice_are_named_together() -> None:
    said = mistakes({"reward": {"name": "bright", "scal": 2, "workers": 0}, "step": 1})
    assert [line.split(":")[0] for line in said] == [
        "step",
        "steps",
        "reward.scal",
        "reward.workers",
    ]
    assert "did you mean 'scale'?" in said[2]


@pytest.mark.usefixtures("offers")
def test_a_choice_of_an_unknown_plugin_names_the_nearest() -> None:
    (said,) = mistakes({"steps": 1, "reward": {"name": "brigth"}})
    assert said.startswith("reward.name: no omni.rewards plugin named 'brigth'; installed: ")
    assert "did you mean 'bright'?" in said


@pytest.mark.parametrize("raw", ["bright", {"scale": 1}, {"name": 3}, []])
def test_a_choice_needs_a_name(raw: object) -> None:
    (said,) = mistakes({"steps": 1, "reward": raw})
    assert said.startswith("reward: expected `name:` of a omni.rewards plugin")


@pytest.mark.usefixtures("offers")
def test_an_engine_is_named_by_its_backend() -> None:
    run = structure({"steps": 1, "engine": {"name": "bright2"}}, Run)
    assert run.engine is not None
    assert run.engine.plugin.options is BrightOptions
    (said,) = mistakes({"steps": 1, "engine": {"name": "brihgt2"}})
    assert said.startswith("engine.name: no engine backend named 'brihgt2'; installed: ")
    assert "did you mean 'bright2'?" in said


# -- layers ----------------------------------------------------------------------------------------


def test_yaml_reads_numbers_as_people_write_them() -> None:
    text = "a: 1e-4\nb: -2.5E+3\nc: .5e1\nd: 12\ne: 1e\nf: '1e-4'\ng: 1.\nh: 1_000\n"
    assert read_yaml(text, source="x").values == {
        "a": 1e-4,
        "b": -2500.0,
        "c": 5.0,
        "d": 12,
        "e": "1e",
        "f": "1e-4",
        "g": 1.0,
        "h": 1000,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' is given twice"),
        ("a:\n  b: 1\n  b: 2\n", "key 'b' is given twice"),
        ("a: [1\n", "line 2"),
        ("- 1\n", "expected a mapping at the top, got list"),
        ("? [1, 2]\n: 3\n", "a key is a text"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_yaml_that_is_wrong_names_its_source(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_yaml(text, source="run.yaml")
    assert str(error.value).startswith("run.yaml: ")
    assert said in str(error.value)


def test_yaml_anchors_may_be_merged() -> None:
    text = "base: &base {lr: 1e-4, eps: 1.0}\nother:\n  <<: *base\n  eps: 2.0\n"
    assert read_yaml(text, source="x").values["other"] == {"lr": 1e-4, "eps": 2.0}


def test_an_empty_file_is_an_empty_mapping() -> None:
    assert read_yaml("# nothing\n", source="x").values == {}


def test_overrides_are_yaml_values() -> None:
    layer = parse_overrides(["a.b=1e-4", "a.c=[1, 2]", "d=", "e=x=y", "f=true", "a.g.h={i: 1}"])
    assert layer.values == {
        "a": {"b": 1e-4, "c": [1, 2], "g": {"h": {"i": 1}}},
        "d": None,
        "e": "x=y",
        "f": True,
    }
    assert layer.source == "command line"


def test_a_later_override_wins() -> None:
    assert parse_overrides(["a=1", "a=2"]).values == {"a": 2}
    assert parse_overrides(["a=1", "a.b=2"]).values == {"a": {"b": 2}}


def test_overrides_that_are_no_overrides_are_all_named() -> None:
    with pytest.raises(ConfigError) as error:
        parse_overrides(["steps", "=3", "a..b=1", "fine=1", "b=[1"])
    assert [line.split(":")[0] for line in error.value.mistakes] == [
        "'steps'",
        "'=3'",
        "'a..b=1'",
        "'b=[1'",
    ]


def test_layers_merge_key_by_key_and_remember_their_source() -> None:
    resolved = merge(
        [
            Layer(source="recipe", values={"steps": 3, "a": {"b": 1, "c": [1, 2]}}),
            Layer(source="file", values={"a": {"c": [3], "d": {"e": 1}}}),
            Layer(source="command line", values={"a": {"b": 2}}),
        ]
    )
    assert resolved.values == {"steps": 3, "a": {"b": 2, "c": [3], "d": {"e": 1}}}
    assert resolved.sources == {
        "steps": "recipe",
        "a.b": "command line",
        "a.c": "file",
        "a.d.e": "file",
    }
    assert source_of("a.d.e", resolved.sources) == "file"
    assert source_of("a.c.0", resolved.sources) == "file"
    assert source_of("other", resolved.sources) == "default"


def test_merging_changes_no_layer() -> None:
    first = Layer(source="one", values={"a": {"b": 1}})
    merge([first, Layer(source="two", values={"a": {"b": 2}})])
    assert first.values == {"a": {"b": 1}}


def test_an_empty_mapping_takes_nothing_away() -> None:
    layers = [Layer(source="x", values={"a": {"b": 1}}), Layer(source="y", values={"a": {}})]
    resolved = merge(layers)
    assert resolved.values == {"a": {"b": 1}}
    assert resolved.sources == {"a.b": "x"}


def test_another_plugin_takes_the_options_of_the_former_with_it() -> None:
    recipe = Layer(source="recipe", values={"reward": {"name": "ocr", "workers": 2}})
    same = merge([recipe, Layer(source="x", values={"reward": {"name": "ocr", "scale": 1}})])
    assert same.values == {"reward": {"name": "ocr", "workers": 2, "scale": 1}}
    other = merge([recipe, Layer(source="x", values={"reward": {"name": "bright", "scale": 1}})])
    assert other.values == {"reward": {"name": "bright", "scale": 1}}
    assert other.sources == {"reward.name": "x", "reward.scale": "x"}


def test_a_section_that_merely_has_a_name_keeps_its_values() -> None:
    recipe = Layer(source="recipe", values={"trainer": {"name": "a", "save_freq": 3}})
    new = Layer(source="x", values={"trainer": {"name": "b"}})
    assert merge([recipe, new], choices={"reward": ()}).values["trainer"] == {
        "name": "b",
        "save_freq": 3,
    }


def test_a_value_replaces_a_mapping_and_a_mapping_a_value() -> None:
    layers = [
        Layer(source="x", values={"a": {"b": 1}, "c": 1}),
        Layer(source="y", values={"a": None, "c": {"d": 2}}),
    ]
    resolved = merge(layers)
    assert resolved.values == {"a": None, "c": {"d": 2}}
    assert resolved.sources == {"a": "y", "c.d": "y"}


def test_leaves_have_dotted_paths() -> None:
    values = {"a": {"b": 1, "c": {}}, "d": [1, 2]}
    assert list(leaves(values)) == [("a.b", 1), ("a.c", {}), ("d", [1, 2])]


def test_another_plugin_keeps_what_all_of_its_group_take():
    recipe = Layer(
        source="recipe", values={"rollout": {"name": "a", "sampling": {"steps": 6}, "own": 1}}
    )
    other = Layer(source="x", values={"rollout": {"name": "b"}})
    resolved = merge([recipe, other], choices={"rollout": ("sampling",)})

    assert resolved.values == {"rollout": {"name": "b", "sampling": {"steps": 6}}}
    assert resolved.sources == {"rollout.name": "x", "rollout.sampling.steps": "recipe"}
