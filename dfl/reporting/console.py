"""What commands print: lines and tables, on a terminal and elsewhere."""

from __future__ import annotations

from functools import partial

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from dfl.core.command_line import escape_output
from dfl.core.errors import printable

WIDEST = 10_000
"""Columns of an output that is not a terminal."""
FOLDED = 12
"""The least width of a label on a terminal, where a longer one is folded."""
LEAST = 4
"""The least width of a label, where there are many."""
GAP = 2
"""Columns between two columns of a table."""


def make_console(stderr: bool = False, quiet: bool = False, verbose: bool = False) -> Console:
    """Return a console on stdout or stderr that prints text as it is, without markup.

    Where it is not a terminal, tables are as wide as they need to be.

    Args:
        stderr: whether it prints to stderr.
        quiet: whether it prints nothing.
        verbose: whether a terminal is used as a pipe is: lines in place of a bar.
    """
    escape_output()  # a terminal of ASCII shows é as \xe9
    plain = partial(Console, highlight=False, markup=False, emoji=False, stderr=stderr, quiet=quiet)
    console = plain()
    if console.is_terminal and not verbose:
        return console
    return plain(width=WIDEST, force_terminal=False)


def print_line(console: Console, text: str) -> None:
    """Print a line, however wide."""
    console.print(printable(text), soft_wrap=True)


def print_table(console: Console, table: Table, labels: int, where: str) -> None:
    """Print a table of labels and figures in the width of a terminal.

    Long labels are folded. The last columns of figures are left out where there is no room, and
    named below the table.

    Args:
        console: where to print.
        table: every row, as text.
        labels: the number of its first columns that are labels.
        where: the file that has all columns.
    """
    widths = [
        max(map(cell_len, (str(column.header), *map(str, column.cells)))) + GAP
        for column in table.columns
    ]
    least = sum(min(width, FOLDED + GAP) for width in widths[:labels])
    left_out: list[str] = []
    while least + sum(widths[labels:]) > console.width and len(widths) > labels + 1:
        name = str(table.columns.pop().header)
        if name == "std" and len(table.columns) > labels + 1:
            name = str(table.columns.pop().header)  # a mean goes with its deviation
        left_out.insert(0, name)
        del widths[len(table.columns) :]
    while sum(widths) > console.width and (widest := max(widths[:labels])) > LEAST + GAP:
        widths[widths.index(widest)] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width - GAP
        column.overflow = "fold"
    console.print(table)
    if left_out:
        print_line(console, f"no room for {', '.join(left_out)}: all columns are in {where}")
