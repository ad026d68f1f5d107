"""How the commands print: aligned tables, with colour on a terminal alone (NO_COLOR turns it off)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_WIDE = 10_000
"""Columns where nobody looks: a pipe gets one line for each row."""
_READABLE = 12
"""Columns that a cell needs which wraps."""
_GAP = 2


def console() -> Console:
    """Open stdout as it is now."""
    piped = not sys.stdout.isatty()
    return Console(file=sys.stdout, highlight=False, width=_WIDE if piped else None)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print *rows* below *headings*, aligned; all but the first two columns wrap.

    A terminal too narrow for that gets a block for each row, a line for each of its cells.
    """
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    screen = console()
    with screen.capture() as captured:
        if _needed(headings, cells) > screen.width:
            for row in cells:
                _print_block(screen, headings, row)
        else:
            screen.print(_table(headings, cells))
    # Columns are filled up with blanks, which a long cell would make run on for screens.
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


def _needed(headings: Sequence[str], rows: Sequence[Sequence[Text]]) -> int:
    """Columns that a table takes at least."""
    widths = [len(heading) for heading in headings]
    for row in rows:
        for place, cell in enumerate(row):  # a row may end early
            widths[place] = max(widths[place], cell.cell_len)
    wrapping = (min(width, _READABLE) for width in widths[2:])
    return sum(widths[:2]) + sum(wrapping) + _GAP * (len(headings) - 1)


def _table(headings: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, no_wrap=place < 2, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _print_block(screen: Console, headings: Sequence[str], row: Sequence[Text]) -> None:
    screen.print(row[0], style="bold", overflow="fold")
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, cell in zip(headings[1:], row[1:], strict=False):
        if cell.plain:
            grid.add_row(heading, cell)
    screen.print(Padding(grid, (0, 0, 0, _GAP)))
