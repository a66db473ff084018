"""The command `python -m dfl.compare DIR...`: table, figure and page of runs, finished or not."""

from __future__ import annotations

if __name__ == "__main__":
    from dfl.core.command_line import leave_on_interrupt, spare_imports

    leave_on_interrupt()
    spare_imports()

import csv
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from dfl.core import command_line
from dfl.core.errors import InputError, printable
from dfl.core.files import atomically, writing
from dfl.core.reading import open_regular
from dfl.reporting.console import make_console, print_line, print_table
from dfl.reporting.differences import differences
from dfl.reporting.page import X, write
from dfl.reporting.text import size, title_of
from dfl.store import manifest
from dfl.store.run_directory import beginning, claim
from dfl.store.tables import as_table
from dfl.sweep.status import DAMAGED, DONE, CellState, read_state

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_ABOUT = "Compare runs: a table, compare.csv, compare.png and report.html."

FIRST = ("folder", "status")
"""The first columns of compare.csv, which mark a file as written by this command."""
SIGNED = "dfl.compare"
"""The metadata of compare.png, which mark a file as written by this command."""
LEGEND_WIDTH = 60
"""The most characters on a line of the legend."""
DRAWN = ("round", "payload_bytes", "accuracy_mean", "accuracy_min", "train_loss")
"""The columns of metrics.csv that are drawn."""


@dataclass(frozen=True)
class Compared:
    """A run to compare.

    Attributes:
        folder: its folder.
        differs: the settings that distinguish it from the others, by name.
        state: its state.
        rows: its metrics.csv; empty if there is none yet.
    """

    folder: Path
    differs: Mapping[str, str]
    state: CellState
    rows: pd.DataFrame

    @property
    def label(self) -> str:
        """The label of the run in a figure."""
        label = ", ".join(
            f"{name}={text}" if name != "run" else text for name, text in self.differs.items()
        )
        return label if self.state.status == DONE else f"{label} ({self.state.status})"


def main() -> int:
    """Run the command line of this process and return the exit code: 0, 2, or 130 for Ctrl-C."""
    return command_line.run_command(_run_command_line)


def _run_command_line(tokens: Sequence[str]) -> None:
    app = command_line.app("compare", _ABOUT)

    @app.default
    def command(
        *folders: Path,
        out: Path | None = None,
        report: bool = True,
        quiet: Annotated[bool, Parameter(negative="")] = False,
    ) -> None:
        """Compare.

        Parameters
        ----------
        folders: Path
            Folders of runs, one or more.
        out: Path
            Folder for compare.csv, compare.png and report.html, new, empty or written by dfl
            [default: .]
        report: bool
            Write report.html, a page to open in a browser.
        quiet: bool
            Print damaged runs and the last line only.
        """
        if not folders:
            raise InputError("DIR is missing: give the folders of some runs")
        once: dict[str, Path] = {}
        for folder in folders:
            once.setdefault(os.path.realpath(folder), folder)
        compare(list(once.values()), out, make_console(), report, quiet)

    command_line.call(app, tokens)


def compare(
    folders: Sequence[Path],
    out: Path | None,
    console: Console,
    report: bool = True,
    quiet: bool = False,
) -> None:
    """Write and print a comparison of runs.

    Args:
        folders: the folders of the runs.
        out: where to write; the current folder where not given.
        console: where to print.
        report: whether to write report.html.
        quiet: whether to print damaged runs and the last line only.

    Raises:
        InputError: a folder holds no run, or `out` holds files of another program.
    """
    runs = gather(folders)
    if out is not None:
        claim(out)
    out = out or Path()
    _refuse_foreign(out, report)
    with writing(f"--out {out}"):
        with atomically(out / "compare.csv") as part:
            table(runs, out).to_csv(
                part, index=False, lineterminator="\n", errors="surrogateescape"
            )
        with atomically(out / "compare.png") as part:
            figure(runs).savefig(part, format="png", dpi=150, metadata={"Software": SIGNED})
        if report:
            write(out, page(runs, out))
    if not quiet:
        labels = len(runs[0].differs) + 1
        print_table(console, screen(runs), labels, str(out / "compare.csv"))
    for run in runs:
        if run.state.status == DAMAGED:
            print_line(console, f"{DAMAGED:<10} {run.folder}: {run.state.reason}")
    names = (*(("report.html",) if report else ()), "compare.png")
    print_line(console, command_line.look_at(out, names))


def write_again(out: Path) -> Path:
    """Write the page of a comparison from its compare.csv, and return its path.

    Raises:
        InputError: compare.csv is damaged or names no runs, a folder in it holds no run any more,
            or `out` cannot be written to.
    """
    try:
        with open_regular(out / "compare.csv") as file:
            text = file.read().decode(errors="surrogateescape")
        named = [row[FIRST[0]] for row in csv.DictReader(StringIO(text, newline=""))]
    except (OSError, KeyError, csv.Error) as error:
        raise InputError(f"{out}/compare.csv cannot be read: {error}") from None
    if not named:
        raise InputError(f"{out}/compare.csv names no runs")
    _refuse_foreign(out, advice="move it away")
    folders = [
        Path(name if os.path.isabs(name) else os.path.relpath(out.resolve() / name))
        for name in named
    ]
    with writing(str(out)):
        return write(out, page(gather(folders), out))


def page(runs: Sequence[Compared], out: Path) -> str:
    """Return the page of a comparison.

    Args:
        runs: the runs.
        out: the folder of the page, from which it leads to theirs.
    """
    from dfl.reporting.collection import LINES, TITLES, Cell, Link, Table, collection_page
    from dfl.reporting.page import Line, chart, columns

    names = [name for name in TITLES if any(name in run.state.row for run in runs)]
    rows = []
    for run in runs:
        path = os.path.relpath(run.folder.resolve(), out.resolve())
        there = Link.to(run.folder, path, _seen_from(out, run.folder))
        figures = [
            Cell.of(name, float(run.state.row.get(name) or "nan"))
            for name in ("round", *names, "payload_bytes")
        ]
        differs = map(Cell, run.differs.values())
        rows.append([Cell(links=(there,)), Cell(run.state.status), *differs, *figures])
    head = [*FIRST, *runs[0].differs, "round", *names, "payload_bytes"]
    table = Table("runs", "Runs", "The last evaluation of every run.", head, rows)
    drawn = [run for run in runs if not run.rows.empty][:LINES]
    held = [columns(run.rows, (*X, *TITLES)) for run in drawn]
    charts = []
    for measure, title in TITLES.items():
        lines = [
            Line(k, measure, run.label)
            for k, run in enumerate(drawn)
            if measure in run.rows and run.rows[measure].notna().any()
        ]
        if lines:
            charts.append(chart(title, lines, log=measure == "consensus_distance"))
    content = {
        "generator": SIGNED,
        "kind": "Comparison",
        "title": f"{len(runs)} runs" if len(runs) > 1 else "1 run",
        "subtitle": f"They differ in {', '.join(runs[0].differs)}." if runs[0].differs else "",
        "folder": str(out),
    }
    begun = sum(not run.rows.empty for run in runs)
    more = [f"The first {LINES} runs with rows are drawn."] if len(drawn) < begun else []
    return collection_page(content, [table], (held, charts), notes=more)


def gather(folders: Sequence[Path]) -> list[Compared]:
    """Read runs and the settings by which each differs.

    Raises:
        InputError: a folder holds no run.
    """
    import pandas as pd

    settings = [manifest.read(folder)["run"] for folder in folders]
    found = []
    for folder, differs in zip(folders, differences(settings, folders), strict=True):
        state = read_state(folder)
        table = as_table(state.table) if state.row else pd.DataFrame()
        if missing := [name for name in DRAWN if name not in table]:
            table = table.reindex(columns=[*table, *missing])
        found.append(Compared(folder, differs, state, table))
    return found


def table(runs: Sequence[Compared], out: Path) -> pd.DataFrame:
    """Return a row per run: folder, status, differing settings, and the last row of metrics.csv.

    Args:
        runs: the runs.
        out: the folder of the table. Paths of the folders start there, unless they are absolute.
    """
    import pandas as pd

    rows = []
    for run in runs:
        first = dict(zip(FIRST, (_seen_from(out, run.folder), run.state.status), strict=True))
        rows.append({**first, **run.differs, **run.state.row})
    return pd.DataFrame(rows)


def _seen_from(out: Path, folder: Path) -> str:
    """Return the path of a folder from another one, or as it is where it is absolute."""
    if folder.is_absolute():
        return str(folder)
    return os.path.relpath(folder.resolve(), out.resolve())


def screen(runs: Sequence[Compared]) -> Table:
    """Return the table for a terminal, with the main columns."""
    found = Table(*runs[0].differs, "status", box=None, pad_edge=False, header_style="bold")
    for name in ("round", "accuracy", "worst peer", "loss", "consensus distance", "payload"):
        found.add_column(name, justify="right")
    for run in runs:
        row = {name: float(value or "nan") for name, value in run.state.row.items()}
        figures = [f"{row[name]:{form}}" if name in row else "-" for name, form in _SHOWN]
        payload = size(row["payload_bytes"]) if "payload_bytes" in row else "-"
        found.add_row(*map(printable, run.differs.values()), run.state.status, *figures, payload)
    return found


_SHOWN = (
    ("round", ".0f"), ("accuracy_mean", ".4f"), ("accuracy_min", ".4f"), ("train_loss", ".4g"),
    ("consensus_distance", ".4g"),
)  # fmt: skip


def figure(runs: Sequence[Compared]) -> Figure:
    """Draw accuracy by round and by bytes, with a thin line for the worst peer of each run; a loss
    where no run has accuracies, that on the test set where all have it.
    """
    from matplotlib.figure import Figure

    from dfl.reporting.lines import Y_LABELS, label_x, measure_of, run_styles, title

    drawn = [run for run in runs if not run.rows.empty]
    found = {measure_of(run.rows) for run in drawn} or {"accuracy_mean"}
    measure = "accuracy_mean" if "accuracy_mean" in found else "train_loss"
    measure = found.pop() if len(found) == 1 else measure
    legend_lines = [line for run in runs for line in _wrapped(run.label).split("\n")]
    widest = max(map(len, legend_lines))
    made = Figure(
        figsize=(10.5 + 0.08 * widest, max(4.2, 0.25 * len(legend_lines) + 1)),
        layout="constrained",
    )
    panels = made.subplots(1, 2, sharey=True)
    for run, look in zip(drawn, run_styles([run.differs for run in drawn]), strict=True):
        _draw(panels, run, measure, look)
    what = title_of(measure)
    thin = "thin lines: the worst peer" if measure == "accuracy_mean" else ""
    for axes, x, by in zip(
        panels, ("round", "payload_bytes"), ("round", "bytes sent"), strict=True
    ):
        title(axes, f"{what} by {by}", thin)
        axes.spines[["top", "right"]].set_visible(False)
        label_x(axes, x)
    panels[0].set_ylabel(Y_LABELS[measure])
    if drawn:
        lines = panels[0].get_legend_handles_labels()
        made.legend(*lines, loc="outside right upper", frameon=False, fontsize=8)
    return made


def _draw(panels: Sequence[Axes], run: Compared, measure: str, look: Mapping[str, Any]) -> None:
    """Draw a run by round and by bytes."""
    from dfl.reporting.lines import draw
    from dfl.reporting.plots import plain

    rows = run.rows.assign(mean=run.rows[measure])
    for axes, x in zip(panels, ("round", "payload_bytes"), strict=True):
        draw(axes, rows, x, {**look, "label": _wrapped(plain(run.label))})
        if measure == "accuracy_mean":
            draw(
                axes,
                rows.assign(mean=rows["accuracy_min"]),
                x,
                {**look, "linewidth": 0.7, "alpha": 0.8},
            )


def _wrapped(label: str) -> str:
    """Return the label of a run on several lines if it is long."""
    return textwrap.fill(label, LEGEND_WIDTH, break_long_words=True, break_on_hyphens=False)


def _refuse_foreign(out: Path, report: bool = True, advice: str = "give another --out") -> None:
    """Refuse to overwrite files of another program, and the page of a run or a sweep.

    Args:
        out: the folder.
        report: whether the page of the comparison is written, too.
        advice: the end of the message.

    Raises:
        InputError: the folder has such a file.
    """
    marks = {"compare.csv": rf"\A{','.join(FIRST)},", "compare.png": SIGNED}
    if report:
        marks["report.html"] = f'content="{SIGNED}"'
    for name, mark in marks.items():
        head = beginning(out / name)
        if head is not None and not re.search(mark.encode(), head):
            ours = b'content="dfl.' in head
            what = "is the page of a run or a sweep" if ours else "was not written by dfl"
            raise InputError(f"{out / name} {what} and is left as it is: {advice}")


if __name__ == "__main__":
    sys.exit(main())
