"""Runs a grid from Python: `run_grid`."""

from __future__ import annotations

import csv
import os
import re
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfl.config import Run
from dfl.core.errors import DivergedError, InputError, Suspended, one_line
from dfl.core.files import Lock, atomically
from dfl.core.parse import shown
from dfl.core.registry import flag, name_of, split_specs
from dfl.reporting.console import make_console, print_line
from dfl.store import fingerprints, manifest
from dfl.store.callbacks import COLUMNS
from dfl.store.record import ended
from dfl.store.tables import as_table
from dfl.sweep import folder as sweep_folder
from dfl.sweep import progress
from dfl.sweep.grid import SET_BY_SWEEP, Cell, Grid
from dfl.sweep.live_page import LivePage
from dfl.sweep.scheduler import Scheduler, launcher
from dfl.sweep.status import CELL_LOCK, DONE, CellState, read_state, read_states

if TYPE_CHECKING:
    import pandas as pd

TAKEN = frozenset({"cell", "name", "of", "seeds", "sim_seconds", "status"})
"""Names of columns of the tables of a sweep, beside those of every metrics.csv."""
MODELS = "state.safetensors"
"""The file of a run with its models."""


def run_grid(
    cells: Iterable[Cell],
    folder: Path | str,
    *,
    jobs: int = 1,
    ranks: int = 1,
    in_process: bool = False,
    keep_models: bool | None = None,
    report: bool = True,
) -> pd.DataFrame:
    """Run the cells that have not finished, and return the evaluations of all of them.

        cells = combinations({"peers": 16, "rounds": 50}, {"bits": [8, 4], "seed": range(3)})
        rows = run_grid(cells, "sweeps/bits", jobs=2)
        rows.groupby(["bits", "round"])["accuracy_mean"].mean()

    The folder has a folder for every cell, as that of `python -m dfl.sweep`, and report.html. It
    has no grid.toml, sweep.csv, summary.csv and figures: tables and figures are made of the rows
    that are returned. It may hold further cells. Another call with the same cells resumes those
    that were interrupted and reads those that are done. Progress is printed to stderr.

    Args:
        cells: the cells; `combinations` makes those of all combinations of some lists.
        folder: to write to: a new one, an empty one, or that of a sweep.
        jobs: the number of cells to run at a time, each a launch of `dfl.run`.
        ranks: the number of ranks of each cell, started by mpirun.
        in_process: whether to run the cells one after the other in this process, which saves the
            start of a program for runs of a few seconds. Only so may runs have objects, and names
            that this process registered; a cell that finished with other objects or files is run
            again. Of such a cell run.json, metrics.csv, cell.toml and output.log are kept; it has
            no checkpoints, no models and no figures. SIGTERM and SIGUSR1 are not caught then.
        keep_models: whether to keep the models of the cells (`state.safetensors`); by default they
            are kept, but not `in_process`, which has none.
        report: whether to write report.html, a page that leads to every cell, and to refresh it
            while they run.

    Returns:
        The rows of metrics.csv of every cell, in the order of the cells, with the cell's values as
        further columns. A cell that diverged has the rows before that. A cell that was done
        at the start has the rows that it had then.

    Raises:
        InputError: before any run: a cell that cannot be run, two with one name, a cell in the
            folder with other settings, or a folder that holds something else. After all other
            cells have run: a cell that failed.
        Suspended: SIGTERM or SIGUSR1 stopped the runs.
        KeyboardInterrupt: Ctrl-C stopped them.
    """
    cells = tuple(cells)
    folder = Path(folder)
    if in_process and keep_models:
        raise InputError("in_process keeps no models: leave out keep_models, or in_process")
    _check(cells, jobs, ranks, in_process)
    sweep_folder.write(folder, cells)
    states = read_states(folder, (cell.name for cell in cells))
    left = [cell for cell in cells if not _is_over(cell, folder / cell.name, states[cell.name])]
    varies = tuple(dict.fromkeys(name for cell in cells for name in cell.values))
    page = LivePage(Grid("", varies, cells), folder, report)
    try:
        if in_process:
            _run_here(page, left)
        else:
            _launch(page, left, jobs, ranks)
    finally:
        page.finish()
    states |= read_states(folder, (cell.name for cell in left))
    if keep_models is False:
        for path in (folder / cell.name for cell in cells):
            # Another program may have changed it since its state was read.
            if (path / MODELS).exists() and read_state(path).status == DONE:
                _remove_models(path)
    return _rows(cells, states)


def _check(cells: Sequence[Cell], jobs: int, ranks: int, in_process: bool) -> None:
    """Refuse cells that cannot be run.

    Raises:
        InputError: there is one, or two have the same name, or the arguments exclude each other.
    """
    from dfl.simulation.components import check
    from dfl.simulation.defaults import settle

    if min(jobs, ranks) < 1:
        raise InputError(f"jobs and ranks must be at least 1, not {jobs} and {ranks}")
    if in_process and (jobs, ranks) != (1, 1):
        raise InputError("in_process runs one cell at a time on one rank: leave out jobs and ranks")
    launcher(ranks)
    names = set[str]()
    for cell in cells:
        _check_values(cell)
        if cell.name in names:
            raise InputError(f"two cells are called {cell.name}: give them different values")
        names.add(cell.name)
        if cell.run.objects and not in_process:
            given = ", ".join(cell.run.objects)
            raise InputError(
                f"cell {cell.name} has objects, {given}, which no launch of its own can be given: "
                "give in_process=True, or specs"
            )
        for field in SET_BY_SWEEP:
            if getattr(cell.run, field) is not None:
                raise InputError(f"cell {cell.name}: {field} is set by the grid: leave it out")
        try:
            check(settle(cell.run, ranks))
            if not in_process:
                _refuse_unknown_elsewhere(cell.run)
        except InputError as error:
            raise InputError(f"cell {cell.name}: {error}") from None


def _refuse_unknown_elsewhere(run: Run) -> None:
    """Refuse components that only this process knows by their names.

    Raises:
        InputError: there is one.
    """
    from dfl.simulation.components import registries

    for field, registry in registries().items():
        for spec in split_specs(getattr(run, field) or ""):
            name = name_of(spec)
            if registry.only_here(name):
                raise InputError(
                    f"{flag(field)} {name} was registered in this process, and the launch of a "
                    "cell does not know it: give in_process=True, or install a package with an "
                    f"entry point {name} in the group {registry.group}"
                )


def _check_values(cell: object) -> None:
    """Refuse what is no cell, and labels that name no folder or a column that the tables have."""
    if not isinstance(cell, Cell):
        raise InputError(
            f"cells must be of class Cell, as combinations returns them, not {shown(cell)}"
        )
    if not cell.values:
        raise InputError("a cell needs values, which make its name")
    for label in cell.values:
        if not isinstance(label, str) or not re.fullmatch(
            r"\w[\w. +-]{0,59}", label, flags=re.ASCII
        ):
            raise InputError(
                f"the label {shown(label)} of a cell must be up to 60 ASCII letters, digits, "
                "spaces and any of _ . + -, a letter, a digit or _ first"
            )
        if label in TAKEN or label in COLUMNS or label.endswith("_deviation"):
            raise InputError(
                f"the label {label} of a cell is a column of the sweep's tables: name it otherwise"
            )


def _is_over(cell: Cell, folder: Path, state: CellState) -> bool:
    """Return whether a cell has ended, with the objects that it has now."""
    return state.over and bool(manifest.read(folder).get("objects", {}) == _checksums(cell.run))


def _checksums(run: Run) -> dict[str, str]:
    """Return checksums of the objects of a run, by field."""
    return {
        name: checksum
        for field, value in run.objects.items()
        for name, checksum in fingerprints.of_object(field, value).items()
    }


def _launch(page: LivePage, cells: Sequence[Cell], jobs: int, ranks: int) -> None:
    """Run some cells of the grid of a page as programs of their own.

    Raises:
        InputError: a cell failed.
        Suspended: SIGTERM or SIGUSR1 stopped the runs.
        KeyboardInterrupt: Ctrl-C stopped them.
    """
    folder, total = page.folder, len(page.grid.cells)
    scheduler = Scheduler(deque(folder / cell.name for cell in cells), jobs, ranks)
    console = make_console(stderr=True)
    with progress.progress_bar(console, scheduler, total - len(cells), total) as callback:
        scheduler.run(page.after(callback))
    if scheduler.signals:
        if scheduler.signals[0] == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(scheduler.signals[0]).name
        raise Suspended(f"{folder}: stopped by {name}; the same call resumes")
    _raise_failed(
        {
            path: state.reason or state.status
            for path, state in sorted(scheduler.ended.items())
            if not state.over
        }
    )


def _raise_failed(failed: Mapping[Path, str], cause: Exception | None = None) -> None:
    """Raise the error of the first failed cell, with the number of the others.

    Args:
        failed: the folders of the failed cells, and the reasons.
        cause: the cause of the error.

    Raises:
        InputError: a cell failed.
    """
    for path, reason in failed.items():
        others = f" ({len(failed) - 1} more cells failed)" if len(failed) > 1 else ""
        raise InputError(f"{path}: {reason}{others}") from cause


def _run_here(page: LivePage, cells: Sequence[Cell]) -> None:
    """Run some cells of the grid of a page in this process.

    Raises:
        InputError: after all other cells have run: a cell failed, or another program runs it. Its
            cause is the error of the first such cell, if it is no InputError or OSError.
    """
    folder, total = page.folder, len(page.grid.cells)
    console = make_console(stderr=True)
    failed = dict[Path, str]()
    cause: Exception | None = None  # only one: its traceback holds the models of its cell
    for number, cell in enumerate(cells, total - len(cells) + 1):
        path = folder / cell.name
        try:
            with Lock(path, CELL_LOCK):
                summary = _simulate(path, cell.run)
        except Suspended:
            raise
        except Exception as error:
            known = isinstance(error, InputError | OSError)
            if not failed and not known:
                cause = error
            failed[path] = _reason(error, path)
            summary = f"failed: {failed[path]}"
            with suppress(OSError):
                _write_log(path, [failed[path]], "" if known else traceback.format_exc())
        print_line(console, f"[{number}/{total}] {cell.name}: {summary}")
        page.refresh()
    _raise_failed(failed, cause)


def _reason(error: Exception, folder: Path) -> str:
    """Return why a cell failed, in one line."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {error.strerror or error}"
    return one_line(error)


def _simulate(folder: Path, run: Run) -> str:
    """Run a cell and write run.json, metrics.csv and output.log; return a line on how it ended.

    Raises:
        InputError: the run cannot be done.
    """
    from dfl.reporting.simulate import simulate
    from dfl.simulation.defaults import settle

    begun = time.perf_counter()
    objects = _checksums(run)
    given = fingerprints.of_files(fingerprints.files_of(run))
    for name in (manifest.NAME, "metrics.csv"):  # of a run with other objects, or an earlier try
        (folder / name).unlink(missing_ok=True)
    rows: list[dict[str, float]] = []
    how = ended(None)
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            for row in simulate(run):
                rows.append(row)
        except DivergedError as error:
            how = ended(error)
    text = StringIO()
    if rows:
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    with atomically(folder / "metrics.csv") as part:
        part.write_text(text.getvalue())
    _write_log(folder, [*(f"warning: {each.message}" for each in caught), str(how["ending"])])
    record: dict[str, Any] = {
        "run": replace(settle(run, 1), out=folder).to_dict(),
        "seconds": time.perf_counter() - begun,
        **how,
    }
    if objects:
        record["objects"] = objects
    if given:
        record["given"] = given
    manifest.write(folder, record, ["metrics.csv"])
    return f"{how['ending']}, {record['seconds']:.0f} s"


def _write_log(folder: Path, messages: Iterable[str], before: str = "") -> None:
    """Write output.log: a text, and a line for each message."""
    lines = "".join(f"dfl: {' '.join(line.split())}\n" for line in messages)
    with atomically(folder / "output.log") as part:
        part.write_text(before + lines, errors="backslashreplace")


def _remove_models(folder: Path) -> None:
    """Remove the models of a run, for which its run.json then no longer vouches."""
    record = manifest.read(folder)
    files = record.get("files", {})
    if MODELS in files:
        manifest.write(folder, record, [name for name in files if name != MODELS])
    with suppress(FileNotFoundError):
        os.unlink(folder / MODELS)


def _rows(cells: Sequence[Cell], states: dict[str, CellState]) -> pd.DataFrame:
    """Return the rows of metrics.csv of all cells with their values.

    Raises:
        InputError: a label is a column of the cell's method.
    """
    import pandas as pd

    tables = []
    for cell in cells:
        if text := states[cell.name].table:
            table = as_table(text)
            if taken := [name for name in cell.values if name in table]:
                raise InputError(
                    f"the label {taken[0]} of cell {cell.name} is a column of its metrics.csv: "
                    "name it otherwise"
                )
            for name, value in cell.values.items():
                table[name] = [value] * len(table)
            tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
