"""The reference of the configuration is read from the classes that check it."""

from __future__ import annotations

import enum

import attrs
import pytest

from omni_core import config
from omni_core.options import AlgorithmConfig, OptimizerConfig, RewardTerm
from omni_trainer import cli, config_reference
from omni_trainer.config_reference import Key
from omni_trainer.run_config import DataConfig, EvaluationConfig, SeedsConfig, TrainerConfig


class Colour(enum.StrEnum):
    """What it is painted with."""

    RED = "red"
    BLUE = "blue"


@attrs.frozen(kw_only=True)
class Inner:
    """Of both."""

    weight: float = 0.5
    """None is not
    allowed."""


@attrs.frozen(kw_only=True)
class Base:
    """What all have."""

    count: int
    """How many."""
    colour: Colour = Colour.BLUE


@attrs.frozen(kw_only=True)
class Outer(Base):
    """What one has."""

    inner: Inner = attrs.field(factory=Inner)
    maybe: Inner | None = None
    """None takes none."""
    several: tuple[Inner, ...] = ()
    names: tuple[str, ...] | None = None
    flag: bool = True


def test_keys_have_their_type_default_and_meaning() -> None:
    weight = {"type": "number", "default": "0.5", "meaning": "null is not allowed."}
    assert list(config_reference.keys(Outer, "outer")) == [
        Key(path="outer.count", type="whole number", default="required", meaning="How many."),
        Key(
            path="outer.colour",
            type="red, blue",
            default="blue",
            meaning="What it is painted with.",
        ),
        Key(path="outer.inner.weight", **weight),
        Key(path="outer.maybe", type="mapping or null", default="null", meaning="null takes none."),
        Key(path="outer.maybe.weight", **weight),
        Key(path="outer.several", type="list of mapping", default="[]", meaning="Of both."),
        Key(path="outer.several[].weight", **weight),
        Key(path="outer.names", type="list of text or null", default="null", meaning=""),
        Key(path="outer.flag", type="true or false", default="true", meaning=""),
    ]


@pytest.mark.parametrize(
    ("path", "cls"),
    [
        ("optimizer", OptimizerConfig),
        ("evaluation", EvaluationConfig),
        ("trainer", TrainerConfig),
        ("seeds", SeedsConfig),
    ],
)
def test_defaults_are_what_the_classes_make(path: str, cls: type) -> None:
    """Each default is YAML that an override could give."""
    said = {
        key.path: config.read_yaml(f"x: {key.default}", source="test").values["x"]
        for key in config_reference.keys(cls, path)
    }
    made = {f"{path}.{name}": value for name, value in config.leaves(config.unstructure(cls()))}
    assert {name: said[name] for name in made} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in made.items()
    }


def test_every_key_that_a_section_takes_is_described() -> None:
    titles = {section.title: section for section in config_reference.sections()}
    paths = {key.path for key in titles["data"].keys}
    assert paths == {f"data.{field.name}" for field in attrs.fields(DataConfig)}
    common = {f"algorithm.{field.name}" for field in attrs.fields(AlgorithmConfig)}
    common |= {f"algorithm.rewards[].{field.name}" for field in attrs.fields(RewardTerm)}
    flow_grpo = {key.path for key in titles["algorithm: flow_grpo"].keys}
    assert flow_grpo > common
    assert "algorithm.clip_ratio" in flow_grpo


def test_describe_prints_what_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "describe", "optimizer.betas"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["optimizer.betas", "list", "of", "number", "[0.9,", "0.999]"]
    assert len(lines) == 3
    assert cli.main(["config", "describe", "flow_grpo"]) == 0
    assert capsys.readouterr().out.startswith("algorithm: flow_grpo -- ")
    assert cli.main(["config", "describe", "optimiser"]) == 2
    assert "no key or section is called 'optimiser'; sections: model," in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_shell_is_told_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in ("train", "resume", "config", "doctor", "describe"):
        assert command in script
