"""What the experiments share: a standard setting, the runs of a grid, tables, figures.

The figure that an experiment reports of a run is the mean over the last tenth of its rounds
(`tail_mean`), not that of one round, unless the experiment states otherwise: rounds to a target,
a maximum over every round, the round that validation data choose. `measure` evaluates each of
these rounds, however large `eval_every` is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from cyclopts import App
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

import dfl
from dfl.config import Run
from dfl.core.files import atomically
from dfl.evaluation.metrics import rounds_to
from dfl.sweep import Cell, run_grid
from dfl.sweep.grid import name_of
from dfl.sweep.status import read_state

Named = TypeVar("Named")

PEERS = 16
"""Number of peers in the standard setting."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish."""

SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "lr": 0.05, "batch_size": 10},
    "mnist": {"model": "2nn", "lr": 0.01, "batch_size": 50, "examples_per_peer": 600},
}
"""Data set -> the settings that depend on it."""

SUBSETS = {"mnist": 2000}
"""Data set -> number of test examples where evaluations are frequent; all where not listed."""


LEVEL = 0.95
"""Of confidence intervals over seeds."""

MEASURED = (
    "train_loss", "accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_std",
    "accuracy_mean_model", "local_accuracy_mean", "validation_accuracy_mean", "accuracy_ensemble",
    "accuracy_vote", "consensus_distance", "backdoor_success_mean", "trust_mean",
    "trust_mean_attackers", "relative_squared_error", "peers_up",
    "parity_gap_mean", "odds_gap_mean", "adversary_auc_mean",
)  # fmt: skip
"""Columns of metrics.csv that are measured anew at every evaluation."""

COUNTS = ("seeds", "others", "rounds", "quadratic_rounds", "epochs", "devices", "peers", "jobs")
"""The options that are at least 1, in experiments that have them."""
INCIDENTAL = ("out", "data_dir", "seeds", "only")
"""The options on which the rows of a cell do not depend."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The option of every experiment: its folder."""

    out: Path = Path("results")
    """Folder to write to."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            number = getattr(self, name, None)
            if isinstance(number, int) and number < 1:
                flag = name.replace("_", "-")
                raise dfl.InputError(f"--{flag} must be at least 1, not {number}")


@dataclass(frozen=True, kw_only=True)
class Options(Place):
    """The options of experiments that measure the cells of a grid."""

    data_dir: Path | None = None
    """Folder of the data sets; that of dfl.run where it is not given."""
    dataset: str = "mnist"
    """The data set: mnist, or digits for a quick look."""
    seeds: int = 5
    """Number of seeds, from 0."""
    rounds: int = 50
    """Rounds of training and mixing."""
    only: str | None = None
    """Run only the cell of this name, as topology=ring,seed=0, and print its row."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options):
    """The options of experiments whose cells are runs of their own."""

    jobs: int = 2
    """Number of runs at a time, one core each."""


def among(flag: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse names that are not among the known ones.

    Raises:
        InputError: there is such a name.
    """
    if unknown := [name for name in given if name not in known]:
        raise dfl.InputError(f"--{flag} must be among {', '.join(known)}, not {', '.join(unknown)}")


def standard(options: Options, **changes: Any) -> Run:
    """Return the standard setting, with changes: peers on a ring with two label shards each.

    Raises:
        InputError: no standard setting is known for the data set.
    """
    if options.dataset not in SETTINGS:
        raise dfl.InputError(
            f"--dataset must be one of {', '.join(SETTINGS)}, not {options.dataset!r}"
        )
    shared_settings = {
        "peers": PEERS,
        "partition": "shards:per_peer=2",
        "rounds": options.rounds,
        "data_dir": options.data_dir,
    }
    return Run(
        **{"dataset": options.dataset, **shared_settings, **SETTINGS[options.dataset], **changes}
    )


def measure(
    out: Path, cells: Sequence[Cell], *, jobs: int = 1, in_process: bool = False
) -> pd.DataFrame:
    """Run the cells that have not finished in `out/cells`, and return the evaluations of all.

    Every round of the last tenth is evaluated, whatever the `eval_every` of a run, unless the run
    may stop earlier (`until`). Models are not kept.

    Args:
        out: the folder of the experiment.
        cells: the runs.
        jobs, in_process: as in `dfl.sweep.run_grid`.

    Returns:
        The rows of metrics.csv of every cell, with its values as further columns.

    Raises:
        InputError: a run failed, or a cell of that name holds another run.
    """
    return run_grid(
        [Cell(cell.values, with_tail(cell.run)) for cell in cells],
        out / "cells",
        jobs=jobs,
        in_process=in_process,
        keep_models=False,
    )


def rerun(out: Path, only: str, cells: Sequence[Cell], before: Sequence[Cell] = ()) -> None:
    """Run one cell of an experiment and print its row: its values, then `ends`.

    Args:
        out: the folder of the experiment.
        only: the name of the cell.
        cells: all cells of the experiment.
        before: the runs from whose models some cells continue. That of this cell is run first.

    Raises:
        InputError: no cell has that name, or as `measure`.
    """
    cell = named(only, {cell.name: cell for cell in cells})
    needed = [run for run in before if out / "cells" / run.name == cell.run.init_from]
    if needed:
        run_grid(needed, out / "cells")
    rows = measure(out, [cell])
    row = ends(rows, list(cell.values))
    print_rows(row[[*cell.values, *(name for name in row if name not in cell.values)]])


def keep(
    options: Any, grid: Sequence[dict[str, Any]], compute: Callable[..., pd.DataFrame]
) -> pd.DataFrame:
    """Return the rows of all cells, or of the one that --only names. They are kept in `out/rows`.

    Args:
        options: the options of the experiment, a dataclass with `out` and `only`.
        grid: the values of each cell.
        compute: returns the rows of a cell, given the options and its values by name.

    Raises:
        InputError: there is no such cell, or the folder holds rows of other settings.
    """
    if options.only is not None:
        grid = [named(options.only, {name_of(cell): cell for cell in grid})]
    settings = {name: value for name, value in asdict(options).items() if name not in INCIDENTAL}
    folders = [options.out / "rows" / name_of(cell) for cell in grid]
    return pd.concat(
        [
            kept_rows(folder, settings, partial(compute, options, **cell))
            for folder, cell in zip(folders, grid, strict=True)
        ],
        ignore_index=True,
    )


def kept_rows(
    folder: Path, settings: Mapping[str, Any], compute: Callable[[], pd.DataFrame]
) -> pd.DataFrame:
    """Return the rows of a cell, which are computed unless its folder holds them.

    Args:
        folder: the folder of the cell; its rows are in rows.csv.
        settings: what they depend on, beside the name of the cell.
        compute: computes them.

    Raises:
        InputError: the folder holds rows of other settings.
    """
    about = json.dumps(settings, sort_keys=True, default=str)
    rows, known = folder / "rows.csv", folder / "settings.json"
    if rows.exists():
        if not known.exists() or known.read_text() != about:
            raise dfl.InputError(f"{folder} holds rows of other settings: give another --out")
        return pd.read_csv(rows)
    found = compute()
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in ((known, about), (rows, found.to_csv(index=False))):
        with atomically(path) as new:
            new.write_text(text)
    return pd.read_csv(rows)


def named(only: str, by_name: Mapping[str, Named]) -> Named:
    """Return the cell of a name.

    Raises:
        InputError: there is none.
    """
    if only not in by_name:
        near = get_close_matches(only, by_name, n=3, cutoff=0.0)
        raise dfl.InputError(
            f"--only must name a cell, not {only!r}; the nearest of {len(by_name)} are "
            f"{' and '.join(near)}"
        )
    return by_name[only]


def print_rows(rows: pd.DataFrame) -> None:
    """Print rows as csv, with numbers as in the committed tables."""
    print(rows.to_csv(index=False, float_format="%.6g"), end="")


def with_tail(run: Run) -> Run:
    """Return a run with every round of its last tenth evaluated, if it goes to its last round."""
    if run.until is not None or run.eval_every == 1:
        return run
    return replace(run, eval_last=max(1, len(tail_rounds(run.rounds))))


def cell_folder(out: Path, **values: object) -> Path:
    """Return the folder of the cell with these values in an experiment that writes to `out`."""
    return out / "cells" / name_of(values)


def has_finished(out: Path, cell: Cell) -> bool:
    """Return whether a cell has ended in an experiment that writes to `out`."""
    return read_state(cell_folder(out, **cell.values)).over


def tail_rounds(rounds: int) -> range:
    """Return the rounds after the first nine tenths."""
    return range(rounds * 9 // 10 + 1, rounds + 1)


def tail(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the evaluations in the last tenth of a run's rounds.

    Args:
        rows: the evaluations of one run, or of its peers.
    """
    return rows[rows["round"] >= tail_rounds(int(rows["round"].max())).start]


def tail_mean(rows: pd.DataFrame, column: str) -> float:
    """Return the mean of a column over the evaluations in the last tenth of a run's rounds.

    Args:
        rows: the evaluations of one run.
        column: the column; evaluations without a figure are left out.
    """
    return float(tail(rows)[column].mean())


def rounds_to_accuracy(run: pd.DataFrame, target: float) -> float:
    """Return the rounds until the mean accuracy of the peers reaches a target, by `rounds_to`; NaN
    if it never does.

    Args:
        run: the evaluations of one run.
        target: the accuracy to reach.
    """
    return rounds_to(run["round"].tolist(), run["accuracy_mean"].tolist(), target)


def ends(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """Return a row for the end of every run: `tail_mean` of the columns in MEASURED, and the last
    value of all others.

    Args:
        rows: the evaluations of all runs.
        labels: the columns that distinguish runs, the seed among them.
    """
    found = []
    for _, own in groups(rows, labels):
        last = tail(own)
        found.append(
            {
                str(name): float(last[name].mean()) if name in MEASURED else own[name].iloc[-1]
                for name in own
            }
        )
    return pd.DataFrame(found)


def by_seed(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """Return a row per run with its labels, its seed and the columns in MEASURED."""
    each = ends(rows, [*labels, "seed"])
    return each[[*labels, "seed", *(name for name in MEASURED if name in each)]]


def summary(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """Return a row per cell, by labels other than the seed: accuracy, its std over seeds, the worst
    peer and payload; means over seeds.
    """
    each = ends(rows, [*labels, "seed"]).groupby(list(labels), sort=False)
    return pd.DataFrame(
        {
            "accuracy": each["accuracy_mean"].mean(),
            "std_over_seeds": each["accuracy_mean"].std(),
            "worst_peer": each["accuracy_min"].mean(),
            "MB_per_peer": each["payload_bytes"].mean() / PEERS / 1e6,
        }
    )


def chosen(tried: pd.DataFrame) -> float:
    """Return the learning rate with the best validation accuracy, the first of equals.

    Args:
        tried: a row per rate, with columns `lr` and `validation`; NaN counts as 0.
    """
    return float(tried["lr"].iloc[int(np.argmax(tried["validation"].fillna(0).to_numpy()))])


def half_width(std: pd.Series[float], runs: pd.Series[float] | int) -> pd.Series[float]:
    """Return half the widths of the 95 % confidence intervals of means over runs, by Student's t;
    NaN for a single run.
    """
    number = pd.Series(runs, index=std.index, dtype=float)
    quantiles = stats.t.ppf((1 + LEVEL) / 2, (number - 1).where(number > 1))
    return pd.Series(quantiles * std.to_numpy(float) / np.sqrt(number), index=std.index)


def with_intervals(table: pd.DataFrame, seeds: int | None) -> pd.DataFrame:
    """Return a table with half the width of the 95 % confidence interval after each std over seeds:
    X_ci95 after X_std, and ci95 after std_over_seeds.

    Args:
        table: the means.
        seeds: the runs of a row, where the table has no column `seeds`.
    """
    runs = pd.to_numeric(table["seeds"]) if "seeds" in table else seeds
    table = table.copy()
    for name in list(map(str, table)):
        of = name.removesuffix("_std")
        if runs is not None and (name == "std_over_seeds" or (of != name and of in table)):
            place = table.columns.get_loc(name)
            assert isinstance(place, int)
            column = "ci95" if name == "std_over_seeds" else f"{of}_ci95"
            table.insert(place + 1, column, half_width(table[name], runs))
    return table


def groups(rows: pd.DataFrame, labels: Sequence[str]) -> list[tuple[Any, pd.DataFrame]]:
    """Return the rows by their labels, in order of appearance.

    Returns:
        The label, or the tuple of labels, and its rows.
    """
    by: Any = labels[0] if len(labels) == 1 else list(labels)
    return list(rows.groupby(by, sort=False))


def by_label(table: pd.DataFrame, labels: Sequence[str]) -> dict[Any, dict[str, Any]]:
    """Return the rows of a table as dicts, by their label or tuple of labels."""
    keyed = [(tuple(row[label] for label in labels), row) for row in table.to_dict("records")]
    return {
        key if len(labels) > 1 else key[0]: {str(name): value for name, value in row.items()}
        for key, row in keyed
    }


def publish(
    options: Place,
    table: pd.DataFrame,
    figure: Figure,
    finding: str,
    seeds: pd.DataFrame | None = None,
) -> None:
    """Write table.csv, table.md and figure.png, and print the table and the finding. A std over
    seeds is followed by its confidence interval.

    Args:
        options: the folder to write to.
        table, figure, finding: the results.
        seeds: a row per run, written to seeds.csv.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    table = with_intervals(table, getattr(options, "seeds", None))
    table.to_csv(options.out / "table.csv", index=False, float_format="%.6g")
    if seeds is not None:
        seeds.to_csv(options.out / "seeds.csv", index=False, float_format="%.6g")
    figure.savefig(options.out / "figure.png", dpi=120)
    page = f"{markdown(table)}\n\nFinding: {finding}\n"
    (options.out / "table.md").write_text(page)
    print(page)


def markdown(table: pd.DataFrame) -> str:
    """Return a table in markdown; a missing value is a dash."""
    rows = [
        list(table.columns),
        ["---"] * len(table.columns),
        *(map(_text, row) for row in table.to_numpy(object)),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _text(value: Any) -> str:
    if pd.isna(value):
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def caption(figure: Figure, axes: Axes, title: str, columns: int) -> None:
    """Put a title above all axes of a figure, and the legend of some of them below all."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
    figure.suptitle(title)


def curve(axes: Axes, rows: pd.DataFrame, columns: tuple[str, str], **style: Any) -> None:
    """Draw the mean over seeds of one column against another, a point per round."""
    x, y = columns
    mean = rows.groupby("round", as_index=False).mean(numeric_only=True)
    axes.plot(mean[x], mean[y], **style)


def in_bits(width: str) -> str:
    """Return a width for a legend: "1 bit", "4 bits" or "float32"."""
    return f"{width} bit{'s' * (width != '1')}" if width.isdigit() else width


def start(experiment: Callable[..., None], name: str) -> int:
    """Run an experiment from the command line.

    Args:
        experiment: its function.
        name: its module below `experiments`, as "speed.scale".

    Returns:
        The exit code.
    """
    app = App(name=f"python -m experiments.{name}", help_format="plaintext", version_flags=[])
    app.default(experiment)
    try:
        app(result_action="return_value")
    except (dfl.InputError, dfl.DivergedError, dfl.Suspended) as error:
        print(f"{name.rpartition('.')[2]}: {error}", file=sys.stderr)
        return error.code
    return 0
