"""Several rewards: summed with weights, each reported raw, and monitors that change nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import attrs
import pytest
import torch

from omni_core import config as core
from omni_core.config import ConfigError
from omni_core.options import RewardConfig
from omni_core.plugins import REWARDS, Plugin, registry
from omni_core.reward import RetryableRewardError, RewardFunction, RewardInput, RewardResult
from omni_core.testing import RewardSuite
from omni_core.testing.toys.options import ToyRewardConfig
from omni_core.trajectory import Media
from omni_trainer.config import load_run
from omni_trainer.config_hints import CHOICES
from omni_trainer.rewards.build import build_reward
from omni_trainer.rewards.options import WeightedRewardConfig
from omni_trainer.rewards.scoring import Scorer


@attrs.frozen(kw_only=True)
class LevelOptions(RewardConfig):
    scale: float = 1.0
    failing: int | None = None
    """Pixel level that cannot be scored."""
    passing_failures: int = 0
    target_word: str | None = None


class Level(RewardFunction):
    """The level of a picture's pixels, scaled; details: `level` and `said`."""

    name = "level"

    def __init__(self, options):
        self.options = options
        self.left = options.passing_failures

    def target(self, prompt):
        if "refused" in prompt:
            raise ValueError("refused")
        return self.options.target_word

    def score(self, media, inputs):
        if len(media.image) != len(inputs):
            raise ValueError(f"{len(media.image)} images for {len(inputs)} inputs")
        if self.left:
            self.left -= 1
            raise RetryableRewardError("busy")
        return [self._one(int(picture[0, 0, 0])) for picture in media.image]

    def _one(self, level):
        if level == self.options.failing:
            return RewardResult.failed("unreadable")
        details = {"level": float(level), "said": str(level)}
        return RewardResult(value=self.options.scale * level, details=details)


@pytest.fixture(autouse=True)
def level(toys, monkeypatch):
    monkeypatch.setitem(sys.modules, "level_of_tests", SimpleNamespace(Level=Level))
    plugin = Plugin(api=1, options=LevelOptions, target="level_of_tests:Level")
    registry(REWARDS).register("level", plugin)
    yield
    registry(REWARDS).unregister("level")


def structured(cls=WeightedRewardConfig, **values):
    return core.structure(values, cls)


def weighted(**values):
    return build_reward("weighted", structured(**values))


def pictures(*levels):
    return Media(image=torch.stack([torch.full((2, 2, 3), v, dtype=torch.uint8) for v in levels]))


def score(reward, *levels, retries=2):
    scorer = Scorer(reward, retries=retries, sleep=lambda _: None)
    scorer.setup()
    return scorer, scorer.score(pictures(*levels), [RewardInput(prompt="p")] * len(levels))


TWO = {
    "terms": {"small": {"name": "level"}, "large": {"name": "level", "scale": 100.0}},
    "weights": {"large": 0.1},
}


class TestWeightedReward(RewardSuite):
    tolerance = 0.0

    @pytest.fixture
    def reward(self, level):
        return weighted(
            terms={"a": {"name": "level", "failing": 9}, "b": {"name": "jpeg_compressibility"}},
            monitors={"c": {"name": "level"}},
        )

    @pytest.fixture
    def media(self):
        return pictures(1, 2, 3)

    @pytest.fixture
    def inputs(self):
        return [RewardInput(prompt="p")] * 3

    @pytest.fixture
    def failing(self, inputs):
        return pictures(1, 9, 3), inputs


def test_the_score_is_the_weighted_sum_and_each_term_is_given_raw():
    _, results = score(weighted(**TWO), 1, 3)
    assert [result.value for result in results] == pytest.approx([11.0, 33.0])
    assert results[1].details == {
        "small": 3.0,
        "small/level": 3.0,
        "small/said": "3",
        "large": 300.0,
        "large/level": 3.0,
        "large/said": "3",
    }
    assert [(term.name, term.weight) for term in structured(**TWO).summed] == [
        ("small", 1.0),
        ("large", 0.1),
    ]


def test_a_term_that_fails_is_a_failure_of_the_sample_alone():
    options = {"terms": {"a": {"name": "level"}, "b": {"name": "level", "failing": 2}}}
    _, (good, bad) = score(weighted(**options), 1, 2)
    assert (good.ok, good.value) == (True, 2.0)
    assert (bad.ok, bad.error) == (False, "b: unreadable")


def test_only_the_term_that_failed_is_tried_again(monkeypatch):
    monkeypatch.setattr("omni_trainer.rewards.scoring.FIRST_WAIT", 0.0)
    options = {"terms": {"a": {"name": "level"}, "b": {"name": "level", "passing_failures": 2}}}
    scorer, results = score(weighted(**options), 1, 2)
    assert [result.value for result in results] == [2.0, 4.0]
    assert (scorer.counts.retries, scorer.counts.failed) == (2, 0)
    scorer, results = score(weighted(retries=1, **options), 1)
    assert "busy (tried 2 times)" in results[0].error
    assert (scorer.counts.retries, scorer.counts.failed) == (1, 1)


def test_terms_agree_on_a_prompts_target():
    def terms(*words):
        named = {f"t{i}": {"name": "level", "target_word": word} for i, word in enumerate(words)}
        return weighted(terms=named)

    assert terms(None, None).target("p") is None
    assert terms(None, "x", "x").target("p") == "x"
    with pytest.raises(ValueError, match="take different targets from the prompt: t0 'x', t1 'y'"):
        terms("x", "y").target("p")
    with pytest.raises(ValueError, match="refused"):
        terms("x").target("refused")


# -- monitors ---------------------------------------------------------------------------------------


def monitored(**monitor):
    options = structured(LevelOptions, scale=2.0, monitors={"seen": {"name": "level", **monitor}})
    return build_reward("level", options)


def test_a_monitor_is_measured_and_changes_no_score():
    plain = build_reward("level", LevelOptions(scale=2.0))
    _, expected = score(plain, 3, 4)
    _, results = score(monitored(failing=4), 3, 4)
    assert [result.value for result in results] == [result.value for result in expected]
    assert all(result.ok for result in results)
    own = {"level": 3.0, "said": "3"}
    assert results[0].details == {
        **own,
        "seen": 3.0,
        "seen/level": 3.0,
        "seen/said": "3",
        "seen/unscored": 0.0,
    }
    assert results[1].details == {"level": 4.0, "said": "4", "seen/unscored": 1.0}


def test_a_monitors_retries_are_counted(monkeypatch):
    monkeypatch.setattr("omni_trainer.rewards.scoring.FIRST_WAIT", 0.0)
    scorer, results = score(monitored(passing_failures=1), 3)
    assert results[0].details["seen"] == 3.0
    assert scorer.counts.retries == 1


def test_a_monitor_refuses_no_prompt_and_may_bring_the_target():
    assert monitored(target_word="x").target("p") == "x"
    options = structured(ToyRewardConfig, monitors={"seen": {"name": "level", "target_word": "x"}})
    assert build_reward("toy", options).target("a refused one") == "bright"


def test_a_monitor_with_the_name_of_a_detail_is_an_error():
    options = structured(LevelOptions, monitors={"level": {"name": "level"}})
    with pytest.raises(ValueError, match=r"reward\.monitors\.level: .* gives 'level' itself"):
        score(build_reward("level", options), 1)


# -- config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "terms: required and missing"),
        ({"terms": {}}, "terms: Length of 'terms' must be >= 1"),
        ({"terms": {"a": {"name": "levl"}}}, "terms.a.name: no omni.rewards plugin named 'levl'"),
        ({"terms": {"a": {"name": "level", "scal": 1}}}, "terms.a.scal: unknown key; did you mean"),
        ({"terms": {"a": 3}}, "terms.a: expected `name:` of a omni.rewards plugin"),
        ({"terms": [{"name": "level"}]}, "terms: expected a mapping, got"),
        ({"terms": {"mean": {"name": "level"}}}, "terms: a part cannot be called 'mean'"),
        ({"terms": {"a b": {"name": "level"}}}, "terms: a part cannot be called 'a b'"),
        (
            {"terms": {"a": {"name": "level", "workers": 2}}},
            "terms: a.workers is set once, for all parts: reward.workers instead of reward.terms.a",
        ),
        (
            {"terms": {"a": {"name": "level"}}, "monitors": {"b": {"name": "level", "retries": 0}}},
            "monitors: b.retries is set once, for all parts: reward.retries instead of",
        ),
        ({**TWO, "weights": {"larg": 1}}, "weights are for larg; the terms are small, large"),
        ({**TWO, "weights": {"large": "much"}}, "weights.large: expected a number, got 'much'"),
    ],
)
def test_a_mistake_is_named_with_its_path(values, said):
    with pytest.raises(ConfigError) as error:
        structured(**values)
    (line,) = error.value.mistakes
    assert line.startswith(said)


def test_a_part_is_swapped_by_its_name_alone(toy_source):
    layers = (
        "reward.name=weighted",
        "reward.terms={a: {name: level, scale: 3}}",
        "reward.monitors.b={name: level, scale: 2}",
    )
    written = core.unstructure(load_run(toy_source, layers).config)["reward"]
    assert written["terms"]["a"]["scale"] == 3.0
    merged = core.merge(
        [
            core.Layer(source="a", values={"reward": written}),
            core.parse_overrides(["reward.terms.a.name=toy", "reward.monitors.b.name=toy"]),
        ],
        choices=CHOICES,
    )
    values = {key: value for key, value in merged.values["reward"].items() if key != "name"}
    again = structured(**values)
    assert (again.terms["a"].name, again.monitors["b"].name) == ("toy", "toy")


def test_paths_of_every_part_are_changed():
    options = structured(
        terms={"a": {"name": "python", "path": "a.py"}},
        monitors={"b": {"name": "python", "path": "b.py"}},
    )
    moved = options.with_paths(lambda path: f"/x/{path}")
    assert moved.terms["a"].options.path == "/x/a.py"
    assert moved.monitors["b"].options.path == "/x/b.py"


# -- runs -------------------------------------------------------------------------------------------

PARTS = (
    "reward.name=weighted",
    "reward.terms={bright: {name: toy}, size: {name: jpeg_compressibility}}",
    "reward.weights.size=0.5",
)


def test_a_run_reports_each_term_and_monitor(train, metrics):
    found = train(*PARTS, "reward.monitors.large={name: jpeg_compressibility, prefer: large}")
    for line in metrics(found.run_dir):
        for group, mean in (("reward", "mean"), ("heldout", "reward_mean")):
            if f"{group}/{mean}" not in line:
                continue
            bright, size = line[f"{group}/bright"], line[f"{group}/size"]
            assert line[f"{group}/{mean}"] == pytest.approx(bright + 0.5 * size)
            assert line[f"{group}/large"] == pytest.approx(-size)
            assert line[f"{group}/large/unscored"] == 0.0


def test_a_monitor_changes_nothing_of_a_run(train, metrics):
    plain = train(*PARTS, name="plain")
    watched = train(*PARTS, "reward.monitors.seen={name: level}", name="watched")
    kept = [
        {name: value for name, value in line.items() if "/seen" not in name}
        for line in metrics(watched.run_dir)
    ]
    assert any("reward/seen" in line for line in metrics(watched.run_dir))
    assert kept == metrics(plain.run_dir)


def test_terms_are_brought_to_one_scale_before_they_are_weighted(train, metrics):
    """Scaled by group, a term in other units trains the same."""
    first, second = (
        metrics(
            train(
                "reward.name=weighted",
                f"reward.terms={{a: {{name: level, scale: {scale}}}, b: {{name: toy}}}}",
                "algorithm.reward_scale=group",
                name=f"scale-{scale}",
            ).run_dir
        )[-1]
        for scale in (1, 4096)
    )
    assert second["reward/a"] == pytest.approx(4096 * first["reward/a"], rel=1e-3)
    assert second["heldout/b"] == pytest.approx(first["heldout/b"], abs=1e-4)
    assert second["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=1e-2)
