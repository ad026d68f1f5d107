"""The report of a run: one file, whatever state the run is in, and no text of it is markup."""

from __future__ import annotations

import html.parser
import json
import re

import numpy as np
import pytest

from omni_trainer import cli
from omni_trainer.evaluation import Evaluation, PromptScores, save_evaluation
from omni_trainer.reporting.charts import Line, chart
from omni_trainer.reporting.intervals import Interval
from omni_trainer.reporting.report import prose, render
from omni_trainer.reporting.report_parts import EDITED, before_after, data_uri, settings
from omni_trainer.run_record import RunRecord

HOSTILE = '<script>alert("a sign")</script> & "more"'


class Page(html.parser.HTMLParser):
    """Collects tags and what they refer to; every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.links, self.texts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "action", "data")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def page(train, toy_source, tmp_path):
    """The report of a toy run whose held-out prompts are hostile, changed on the command line."""
    (tmp_path / "heldout.txt").write_text(f"{HOSTILE}\na dark wall\n")
    run_dir = train("trainer.steps=12", "optimizer.lr=0.02", "trainer.grid_every=4").run_dir
    assert cli.main(["report", str(run_dir), "-o", str(tmp_path / "out" / "page.html")]) == 0
    return (tmp_path / "out" / "page.html").read_text()


def test_a_report_is_one_file_that_asks_nobody(page):
    found = Page(page)

    assert {"script", "link", "iframe", "object", "form"}.isdisjoint(found.tags)
    assert len(found.links) == 4  # two prompts, before and after
    assert all(link.startswith("data:image/png;base64,") for link in found.links)
    assert not re.search(r"url\(|@import|https?://", page)
    assert "prefers-color-scheme: dark" in page
    text = " ".join(found.texts)
    for said in ("held-out reward before", "after 12 steps", "training, mean of 10 steps"):
        assert said in text
    assert "0.02" in text
    assert found.tags.count("svg") > 8


def test_a_prompt_is_never_markup(page):
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#34;a sign&#34;)&lt;/script&gt; &amp; &#34;more&#34;" in page
    assert HOSTILE in " ".join(Page(page).texts)


@pytest.mark.parametrize("left", ["everything", "no evaluation", "no step", "a line cut short"])
def test_a_run_that_ended_early_has_a_report(train, stopped, tmp_path, left):
    heldout = ["evaluation.initial=false"] if left == "no evaluation" else []
    with stopped(0 if left == "no step" else 2):
        train("trainer.steps=5", "trainer.grid_every=1", *heldout)
    run_dir = tmp_path / "run"
    if left == "a line cut short":
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "reward/me')

    text = " ".join(Page(render(RunRecord(run_dir))).texts)

    assert "ended without a word" in text
    assert f"{0 if left == 'no step' else 2} of 5 steps" in text
    assert "The process ended without a word" in text
    assert ("held-out reward before training" in text) == (left != "no evaluation")
    assert ("samples that were trained on" in text) == (left == "no evaluation")


def test_a_run_of_which_only_the_config_is_there_has_a_report(train, tmp_path):
    run_dir = train("trainer.steps=1").run_dir
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.yaml").write_bytes((run_dir / "config.yaml").read_bytes())

    assert "not trained" in Page(render(RunRecord(tmp_path / "bare"))).texts


def test_a_value_that_was_edited_in_the_run_is_a_change(train, tmp_path):
    run_dir = train("trainer.steps=1", "optimizer.lr=0.02").run_dir
    unchanged = {one.path for one in settings(RunRecord(run_dir)) if one.source == EDITED}
    assert unchanged == set()
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.02", "lr: 0.03"))

    (edited,) = (one for one in settings(RunRecord(run_dir)) if one.source == EDITED)

    assert (edited.path, edited.value, edited.was) == ("optimizer.lr", "0.03", "0.02")
    assert edited.changed
    assert "edited in config.yaml" in Page(render(RunRecord(run_dir))).texts


def test_without_an_evaluation_before_the_first_step_nothing_is_called_before(train):
    steps = ("trainer.steps=2", "evaluation.every=1", "evaluation.initial=false")
    text = " ".join(Page(render(RunRecord(train(*steps).run_dir))).texts)

    assert "held-out reward after 1 step" in text
    assert "held-out reward before" not in text


def test_a_directory_without_a_run_is_a_sentence(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_pictures_are_paired_by_prompt(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {steps: 4}\n")
    for step, names in ((0, ["a", "b", "c"]), (4, ["c", "x", "a"])):
        prompts = tuple(
            PromptScores(
                row_id=name, prompt=name, target=None, rewards=(step / 10,), unscored=0, details={}
            )
            for name in names
        )
        pictures = np.stack([np.full((2, 2, 3), ord(name) + step, np.uint8) for name in names])
        found = Evaluation(step=step, prompts=prompts, seconds=1.0)
        save_evaluation(tmp_path / "evaluations", found, pictures)

    shown = before_after(RunRecord(tmp_path))

    assert [one.prompt for one in shown] == ["a", "c"]
    for one in shown:
        expected = [np.full((2, 2, 3), ord(one.prompt) + step, np.uint8) for step in (0, 4)]
        assert [uri for _, uri, _ in one.pictures] == [data_uri(image) for image in expected]
        assert [(said, reward) for said, _, reward in one.pictures] == [
            ("before", 0.0),
            ("after 4 steps", 0.4),
        ]


# -- charts -----------------------------------------------------------------------------------------


def numbers(svg, name):
    (points,) = re.findall(rf'class="line {name}" points="([^"]*)"', svg)
    return [tuple(map(float, pair.split(","))) for pair in points.split()]


def test_a_chart_draws_where_the_data_are():
    svg = chart([Line(points=[(0, 0.0), (10, 1.0)])], title="t", width=320, height=150)

    assert numbers(svg, "main") == [(54.0, 126.0), (310.0, 8.0)]
    Page(svg)


def test_intervals_are_drawn_and_can_be_read():
    interval = Interval(mean=0.5, low=0.25, high=0.75)
    svg = chart([], [(0, interval), (20, interval)], title="t")

    assert svg.count("<title>step 20: 0.500 [0.250, 0.750]</title>") == 1
    assert len(numbers(svg, "interval")) == 2


def test_long_series_are_thinned_to_means():
    points = [(step, float(step % 2)) for step in range(10_000)]
    drawn = numbers(chart([Line(points=points)], title="t"), "main")

    assert 300 < len(drawn) <= 400


@pytest.mark.parametrize("value", [0.0, 3.0, -2e-9])
def test_a_single_point_is_a_dot(value):
    assert 'class="dot main"' in chart([Line(points=[(1, value)])], title="t")


def test_a_title_is_escaped_and_nothing_to_draw_is_an_error():
    assert '"a &lt;b&gt;"' in chart([Line(points=[(1, 1.0)])], title="a <b>")
    with pytest.raises(ValueError, match="nothing to draw"):
        chart([], title="t")


def test_prose_sets_code_and_escapes():
    assert prose("set `a < b` & go") == "set <code>a &lt; b</code> &amp; go"


@pytest.mark.parametrize(("width", "kind"), [(32, "png"), (512, "jpeg")])
def test_small_pictures_stay_as_they_are_and_large_ones_are_packed(width, kind):
    image = np.zeros((8, width, 3), np.uint8)
    assert data_uri(image).startswith(f"data:image/{kind};base64,")


def test_the_status_of_a_run_is_a_record(train):
    run_dir = train("trainer.steps=1").run_dir
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"
