"""What a prompt asks to be written, and prompts that do not say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omni_core.reward import RewardFunction
from omni_trainer.data import BadRowPolicy, load_prompts
from omni_trainer.targets import first_quoted_text, quoted_parts, quoted_text


class Quoted(RewardFunction):
    """Takes targets as the OCR reward does, and scores nothing."""

    def target(self, prompt):
        return quoted_text(prompt)

    def score(self, media, inputs):
        raise AssertionError


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('a sign that reads "Hello"', "Hello"),
        ("a sign that reads “Hello”", "Hello"),
        ('a sign that reads "say \\"hi\\" twice"', 'say "hi" twice'),
        ('a sign that reads "“curly” inside"', "“curly” inside"),
        ('a sign that reads “straight " inside”', 'straight " inside'),
        ("a sign \"Don't\" on a boy's door", "Don't"),
        ('"C:\\new" on a label', "C:\\new"),
        ('a sign that reads " Hello World "', " Hello World "),
        ('日本 "コーヒー"', "コーヒー"),
    ],
)
def test_case_15_the_quoted_part_is_the_target(prompt, target):
    assert quoted_text(prompt) == target


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("a sign", "no text in double quotes"),
        ("a sign that reads 'Hello'", "no text in double quotes"),
        ('a sign that reads ""', "nothing stands between"),
        ('a sign that reads "  "', "nothing stands between"),
        ('a sign that reads "Hello', 'quote " at column 19 is never closed'),
        ('a sign that reads “Hello"', "quote “ at column 19 is never closed"),
        ("a sign that reads Hello”", "quote ” at column 24 closes nothing"),
        ('a "Stop" sign above a "Go" sign', '2 quoted parts ("Stop", "Go")'),
        ('a 5" nail that reads "Hi"', "never closed"),
    ],
)
def test_case_15_a_prompt_without_one_target_is_refused(prompt, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        quoted_text(prompt)


def test_the_first_of_several_parts_can_be_asked_for():
    assert first_quoted_text('a "Stop" sign above a “Go” sign') == "Stop"
    assert quoted_parts('a "Stop" sign above a “Go” sign') == ["Stop", "Go"]
    with pytest.raises(ValueError, match="nothing stands between"):
        first_quoted_text('"" or "Go"')


def test_case_15_bad_prompts_are_named_by_line_and_the_rest_is_kept(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text(
        'a sign that reads "Hello"\n'
        "a sign\n"
        'a sign that reads ""\n'
        "a sign that reads “Hello”\n"
        'a "Stop" sign above a "Go" sign\n'
        'a sign that reads "say \\"hi\\""\n',
        encoding="utf-8",
    )
    found = load_prompts(path, reward=Quoted(), on_bad_row=BadRowPolicy.SKIP)
    assert [(row.line, row.target) for row in found.rows] == [
        (1, "Hello"),
        (4, "Hello"),
        (6, 'say "hi"'),
    ]
    assert [line.split(": ", 1)[0] for line in found.skipped] == [
        "prompts.txt:2",
        "prompts.txt:3",
        "prompts.txt:5",
    ]
