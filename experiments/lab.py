"""What do the pages of the lab book share? A standard setting, a grid of launches, a table, a figure, a finding."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from cyclopts import App
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import dfl
from dfl.config import Run
from dfl.results import Result
from dfl.run_directory import refuse_foreign
from dfl.specs import flag

Cell = tuple[Mapping[str, str | int], Run]
"""A run of a grid, and the labels that tell it from the others."""

PEERS = 16
"""How many peers learn together in the standard setting."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which colour-blind readers can tell apart."""

DIVERGED = 3
"""The exit code of a run in which a peer diverged: an outcome like another."""

SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "lr": 0.05, "batch_size": 10},
    "mnist": {"model": "2nn", "lr": 0.01, "batch_size": 50, "examples_per_peer": 600},
}
"""What the standard setting has of its own on a data set."""

SUBSETS = {"mnist": 2000}
"""Test examples to look at where a page looks often; all of a small data set."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a page writes to."""

    out: Path = Path("results")
    """Folder to write to."""


@dataclass(frozen=True, kw_only=True)
class Options(Place):
    """What every page about learning can be asked for."""

    data_dir: Path | None = None
    """Folder of the data sets; as for dfl.run where it is not given."""
    dataset: str = "mnist"
    """The data set: mnist, or digits for a quick look."""
    seeds: int = 3
    """How many seeds, from 0."""
    rounds: int = 50
    """Rounds of training and mixing."""
    jobs: int = 2
    """Runs at a time, one core each."""


def standard(options: Options, **changes: Any) -> Run:
    """The standard setting, with changes: peers on a ring who each hold two label shards.

    Raises:
        InputError: no standard setting is known for the data set.
    """
    if options.dataset not in SETTINGS:
        raise dfl.InputError(f"--dataset must be one of {', '.join(SETTINGS)}, not {options.dataset!r}")
    common = {"peers": PEERS, "partition": "shards:per_peer=2", "rounds": options.rounds, "data_dir": options.data_dir}
    return Run(**{"dataset": options.dataset, **common, **SETTINGS[options.dataset], **changes})


def measure(options: Options, cells: Sequence[Cell]) -> pd.DataFrame:
    """Run the cells that have not finished before, and read all of them back.

    Returns:
        The rows of every cell's metrics.csv, with its labels as further columns.

    Raises:
        InputError: a run failed, or a cell of that name holds another run.
    """
    pool = ThreadPoolExecutor(options.jobs)
    try:
        return pd.concat(pool.map(partial(_cell, options.out / "cells"), cells), ignore_index=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _cell(cells: Path, cell: Cell) -> pd.DataFrame:
    labels, run = cell
    folder = cells / ",".join(f"{name}={value}" for name, value in labels.items())
    rows = finished(folder, run).rows
    (folder / "state.safetensors").unlink(missing_ok=True)  # which no page with many cells looks at
    return rows.assign(**labels)


def finished(folder: Path, run: Run) -> Result:
    """The run that a folder holds, models and all; it is launched first unless it has finished there before.

    Raises:
        InputError: the run failed, or the folder holds another.
    """
    if not _finished(folder, run):
        _launch(folder, run)
    return dfl.load(folder)


def _finished(folder: Path, run: Run) -> bool:
    """Whether a folder holds this very run, and all of it."""
    if not (folder / "run.json").exists():
        return False
    found = dfl.load(folder)
    if _bare(found.run) != _bare(run):
        raise dfl.InputError(f"{folder} holds a run with other settings: give another --out")
    return found.record["exit"] in (0, DIVERGED)


def _bare(run: Run) -> Run:
    """A run without its places on the disk."""
    return replace(run.settled(1), data_dir=None, out=None)


def _launch(folder: Path, run: Run) -> None:
    """Run a cell as its own program."""
    refuse_foreign("--out", folder)
    shutil.rmtree(folder, ignore_errors=True)  # an earlier launch was interrupted
    flags = [f"{flag(name)}={value}" for name, value in replace(run, out=folder).to_dict().items()]
    done = subprocess.run([sys.executable, "-m", "dfl.run", *flags], capture_output=True, text=True)
    if done.returncode not in (0, DIVERGED):
        raise dfl.InputError(f"{folder}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    print(f"{folder.name}: {dfl.load(folder).record['seconds']:.0f} s", file=sys.stderr, flush=True)


def last(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """The last evaluation of every cell, by its labels."""
    return rows.groupby(list(labels), sort=False).tail(1).reset_index(drop=True)


def summary(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """How cells end, by labels other than the seed: accuracy, its spread, the worst peer, payload; means over seeds."""
    each = last(rows, [*labels, "seed"]).groupby(list(labels), sort=False)
    return pd.DataFrame(
        {
            "accuracy": each["accuracy_mean"].mean(),
            "std_over_seeds": each["accuracy_mean"].std(),
            "worst_peer": each["accuracy_min"].mean(),
            "MB_per_peer": each["payload_bytes"].mean() / PEERS / 1e6,
        }
    )


def groups(rows: pd.DataFrame, labels: Sequence[str]) -> list[tuple[Any, pd.DataFrame]]:
    """The rows by their labels, in the order in which they come: the label, or the labels in a tuple, and its rows."""
    by: Any = labels[0] if len(labels) == 1 else list(labels)
    return list(rows.groupby(by, sort=False))


def by_label(table: pd.DataFrame, labels: Sequence[str]) -> dict[Any, dict[str, Any]]:
    """The rows of a table as plain dicts, by the label or the tuple of labels that they carry."""
    keyed = [(tuple(row[label] for label in labels), row) for row in table.to_dict("records")]
    return {key if len(labels) > 1 else key[0]: {str(name): value for name, value in row.items()} for key, row in keyed}


def publish(options: Place, table: pd.DataFrame, figure: Figure, finding: str) -> None:
    """Write table.csv, table.md and figure.png, and print the table and the finding."""
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "table.csv", index=False, float_format="%.6g")
    figure.savefig(options.out / "figure.png", dpi=120)
    page = f"{markdown(table)}\n\nFinding: {finding}\n"
    (options.out / "table.md").write_text(page)
    print(page)


def markdown(table: pd.DataFrame) -> str:
    """A table in markdown; a missing value is a dash."""
    rows = [list(table.columns), ["---"] * len(table.columns), *(map(_text, row) for row in table.to_numpy(object))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _text(value: Any) -> str:
    if pd.isna(value):
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def curve(axes: Axes, rows: pd.DataFrame, columns: tuple[str, str], **style: Any) -> None:
    """Draw the means over the seeds of one column against another, a point per round."""
    x, y = columns
    mean = rows.groupby("round", as_index=False).mean(numeric_only=True)
    axes.plot(mean[x], mean[y], **style)


def in_bits(width: str) -> str:
    """A width in words: 1 bit, 4 bits, float32."""
    return f"{width} bit{'s' * (width != '1')}" if width.isdigit() else width


def start(page: Callable[..., None], name: str) -> int:
    """Run a page from the command line; the exit code."""
    app = App(name=f"python -m experiments.{name}", help_format="plaintext", version_flags=[])
    app.default(page)
    try:
        app(result_action="return_value")
    except dfl.InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0
