"""docs/cases.md lists what must never go wrong silently; each case is a test that names it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CASES = list(range(1, 37))
PAGE = ROOT / "docs/cases.md"
ROWS = re.findall(r"^\| (\d+) \|[^|]*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
LISTED = {int(number): re.findall(r"\]\((.*?)\)", links) for number, links in ROWS}
TESTS = [
    path
    for folder in (ROOT / "tests", *ROOT.glob("packages/*/tests"))
    for path in folder.rglob("test_*.py")
]


def named(text: str) -> set[int]:
    """Cases that the functions of a test file name."""
    names = re.findall(r"^\s*(?:async )?def (test_\w+)", text, re.MULTILINE)
    return {int(number) for name in names for number in re.findall(r"case_0*(\d+)", name)}


def test_the_table_lists_the_cases_in_order():
    assert list(LISTED) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_test_names(case):
    assert [path.name for path in TESTS if case in named(path.read_text())], (
        f"no function test_..case_{case}.. in tests/ or packages/*/tests"
    )
    assert LISTED[case], "name the test in docs/cases.md"
    for link in LISTED[case]:
        assert case in named((PAGE.parent / link).read_text()), f"{link} does not name case {case}"
