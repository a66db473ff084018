"""What do the pages of the lab book share? A standard setting, a grid of launches, a table, a
figure, a finding.

The figure of merit of a page is a mean over the last tenth of a run's rounds (`tail_mean`), never
the figure of one round, unless the page says what it takes instead: rounds to a target, a maximum
over every round, the round that validation data choose. `measure` evaluates a run in every round of
its last tenth, however seldom it does before.
"""

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
from dfl.core.registry import flag
from dfl.simulation.settle import settle
from dfl.store.results import Result
from dfl.store.run_directory import refuse_foreign

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


MEASURED = (
    "train_loss", "accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_std", "accuracy_mean_model",
    "local_accuracy_mean", "validation_accuracy_mean", "accuracy_ensemble", "accuracy_vote", "consensus_distance",
    "backdoor_success_mean", "trust_mean", "trust_mean_attackers", "quantization_error", "peers_up",
)  # fmt: skip
"""Columns of metrics.csv that are measured anew at every evaluation."""

COUNTED = (
    "round", "seconds", "payload_bytes", "wire_bytes", "upload_bytes", "download_bytes", "parameters_k_plus_m",
    "messages_lost", "sim_seconds",
)  # fmt: skip
"""Columns of metrics.csv that count from the first round on."""


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


def measure(options: Options, cells: Sequence[Cell]) -> pd.DataFrame:
    """Run the cells that have not finished before, and read all of them back.

    A run that goes to its last round is evaluated in every round of its last tenth, whatever its
    `eval_every`.

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
    tail = tail_rounds(run.rounds) if run.until is None and run.eval_every > 1 else range(0)
    rows = finished(folder, run, tail).rows
    (folder / "state.safetensors").unlink(missing_ok=True)  # which no page with many cells looks at
    return rows.assign(**labels)


def finished(folder: Path, run: Run, tail: range = range(0)) -> Result:
    """The run that a folder holds, models and all; it is launched first unless it has finished
    there before.

    Args:
        folder, run: the folder and the run.
        tail: the last rounds, in each of which it is evaluated, beside every `eval_every`-th.

    Raises:
        InputError: the run failed, or the folder holds another.
    """
    if not folder.exists():
        _launch(folder, run, tail)
    found = dfl.load(folder)
    if _bare(found.run) != _bare(replace(run, eval_every=1) if len(tail) > 1 else run):
        raise dfl.InputError(f"{folder} holds a run with other settings: give another --out")
    return found


def _bare(run: Run) -> Run:
    """A run without its places on the disk, and without checkpoints."""
    return replace(settle(run, 1), data_dir=None, out=None, checkpoint_every=None)


def _launch(folder: Path, run: Run, tail: range) -> None:
    """Run a cell as its own program; as two where every round of its tail is evaluated.

    The first ends before the tail and the second resumes it, which changes no number. The folder
    has its name when both are done.
    """
    part = folder.with_name(f"{folder.name},unfinished")
    refuse_foreign("--out", part)
    shutil.rmtree(part, ignore_errors=True)  # an earlier launch was interrupted
    before: dict[str, Any] = (
        {"rounds": tail[0] - 1, "checkpoint_every": tail[0] - 1} if len(tail) > 1 else {}
    )
    code = _program(
        [f"{flag(k)}={v}" for k, v in replace(run, out=part, **before).to_dict().items()], folder
    )
    if before and code == 0:
        _program([f"--resume={part}", f"--rounds={run.rounds}", "--eval-every=1"], folder)
    elif before:  # it diverged on the way
        shutil.rmtree(part)
        _launch(folder, replace(run, eval_every=1), range(0))
        return
    part.rename(folder)
    print(f"{folder.name}: {dfl.load(folder).record['seconds']:.0f} s", file=sys.stderr, flush=True)


def _program(flags: Sequence[str], folder: Path) -> int:
    """The exit code of dfl.run, which is 0 or that of a run that diverged.

    Raises:
        InputError: it failed; what it said last is named after the folder.
    """
    done = subprocess.run([sys.executable, "-m", "dfl.run", *flags], capture_output=True, text=True)
    if done.returncode not in (0, DIVERGED):
        raise dfl.InputError(f"{folder}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return done.returncode


def tail_rounds(rounds: int) -> range:
    """The rounds after the first nine tenths."""
    return range(rounds * 9 // 10 + 1, rounds + 1)


def tail_mean(rows: pd.DataFrame, column: str) -> float:
    """The mean of a column over the evaluations in the last tenth of a run's rounds.

    Args:
        rows: the evaluations of one run.
        column: what is averaged; evaluations without a figure are left out.
    """
    return float(
        rows.loc[rows["round"] >= tail_rounds(int(rows["round"].max())).start, column].mean()
    )


def ends(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """How every run ends, a row each: what is measured as `tail_mean`, all else as in its last
    evaluation.

    Args:
        rows: the evaluations of all runs.
        labels: the columns that tell runs apart, the seed among them.
    """
    return pd.DataFrame(
        [
            {
                str(name): tail_mean(own, str(name)) if name in MEASURED else own[name].iloc[-1]
                for name in own
            }
            for _, own in groups(rows, labels)
        ]
    )


def by_seed(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """A row per run with its labels, its seed and what is measured, for seeds.csv."""
    each = ends(rows, [*labels, "seed"])
    return each[[*labels, "seed", *(name for name in MEASURED if name in each)]]


def summary(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """How cells end, by labels other than the seed: accuracy, its spread, the worst peer, payload;
    means over seeds.
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


def groups(rows: pd.DataFrame, labels: Sequence[str]) -> list[tuple[Any, pd.DataFrame]]:
    """The rows by their labels, in the order in which they come: the label, or the labels in a
    tuple, and its rows.
    """
    by: Any = labels[0] if len(labels) == 1 else list(labels)
    return list(rows.groupby(by, sort=False))


def by_label(table: pd.DataFrame, labels: Sequence[str]) -> dict[Any, dict[str, Any]]:
    """The rows of a table as plain dicts, by the label or the tuple of labels that they carry."""
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
    """Write table.csv, table.md and figure.png, and print the table and the finding.

    Args:
        options: where to write to.
        table, figure, finding: what a page found.
        seeds: a row per run, as `ends` has it; written to seeds.csv.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "table.csv", index=False, float_format="%.6g")
    if seeds is not None:
        seeds.to_csv(options.out / "seeds.csv", index=False, float_format="%.6g")
    figure.savefig(options.out / "figure.png", dpi=120)
    page = f"{markdown(table)}\n\nFinding: {finding}\n"
    (options.out / "table.md").write_text(page)
    print(page)


def markdown(table: pd.DataFrame) -> str:
    """A table in markdown; a missing value is a dash."""
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
    """Run an experiment from the command line.

    Args:
        page: its function.
        name: its module below `experiments`, as "speed.scale".

    Returns:
        The exit code.
    """
    app = App(name=f"python -m experiments.{name}", help_format="plaintext", version_flags=[])
    app.default(page)
    try:
        app(result_action="return_value")
    except dfl.InputError as error:
        print(f"{name.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 2
    return 0
