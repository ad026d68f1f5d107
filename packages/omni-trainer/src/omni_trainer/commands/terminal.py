"""How the commands print: aligned tables, with colour on a terminal alone (NO_COLOR turns it off)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 10_000
"""Columns where nobody looks: a pipe gets one line for each row."""


def console() -> Console:
    """Open stdout as it is now."""
    piped = not sys.stdout.isatty()
    return Console(file=sys.stdout, highlight=False, width=_WIDE if piped else None)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print *rows* below *headings*, aligned; on a narrow terminal all but the first two columns wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, no_wrap=place < 2, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    screen = console()
    with screen.capture() as captured:
        screen.print(table)
    # Columns are filled up with blanks, which a long cell would make run on for screens.
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")
