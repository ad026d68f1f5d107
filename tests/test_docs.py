"""What the documents quote exists: files, commands and links."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

from omni_trainer.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *ROOT.glob("packages/*/README.md"),
]
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_plugins_page_quotes_the_fork():
    quoted = [b for b in blocks(ROOT / "docs/plugins.md") if b.startswith(("# src/", "# pyproj"))]

    assert len(quoted) >= 4
    for block in quoted:
        first, _, text = block.partition("\n")
        assert text in (ROOT / "tests/fork" / first.removeprefix("# ")).read_text(), first


@each_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


@each_page
def test_omni_commands_parse(page):
    """Every `omni ...` line of a code block is a command that the parser takes."""
    lines = [line.strip() for block in blocks(page) for line in block.splitlines()]
    commands = [li.removeprefix("$ ") for li in lines if re.match(r"(\$ )?omni [a-z]", li)]
    for command in commands:
        arguments = re.split(r"\s{2,}#|\s+>", command)[0].split()[1:]
        if arguments[:1] != ["--help"]:
            build_parser().parse_args(arguments)


@each_page
def test_python_blocks_compile(page):
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for block in found:
        compile(textwrap.dedent(block), str(page), "exec")


@each_page
def test_what_python_blocks_import_is_there(page):
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for block in found:
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            text = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
            if text.startswith(("from omni_", "import omni_")):
                exec(text, {})
