"""Experiments that run in this process: no interpreter starts for an experiment or a cell."""

import io
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import dfl
from dfl.sweep import Cell, runner
from dfl.sweep.live_page import LivePage
from experiments import common


@contextmanager
def here() -> Iterator[list[str]]:
    """Run the cells of grids in this process, with their models; yield the names of those run."""
    names: list[str] = []

    def launch(page: LivePage, cells: Sequence[Cell], jobs: int, ranks: int) -> None:
        for cell in cells:
            names.append(cell.name)
            _simulate(page.folder / cell.name, cell.run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_launch", launch)
        yield names


def run_experiment(name: str, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an experiment as its command line does, with every cell in this process, one at a time.

    The figures of the cells are not drawn; the figure of the experiment is.

    Args:
        name: the module below `experiments`, as "messages_and_graphs.bits".
        out: the value of --out.
        arguments: the other arguments.
    """
    experiment = import_module(f"experiments.{name}").experiment
    printed, complaints = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), here():
        warnings.simplefilter("ignore")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # of programs that it starts
        patch.setattr(sys, "argv", [f"{name}.py", "--out", str(out), *arguments])
        patch.setattr("dfl.reporting.plots.figures", lambda *given: {})
        with redirect_stdout(printed), redirect_stderr(complaints):
            try:
                code = common.start(experiment, name)
            except SystemExit as refused:
                code = int(refused.code or 0)
    return subprocess.CompletedProcess(sys.argv, code, printed.getvalue(), complaints.getvalue())


def _simulate(folder: Path, run: dfl.Run) -> None:
    """Simulate a cell in its folder; one that diverges ends there.

    Raises:
        InputError: the run is refused.
    """
    try:
        with suppress(dfl.DivergedError):
            for _ in dfl.simulate(replace(run, resume=folder)):
                pass
    except dfl.InputError as error:
        raise dfl.InputError(f"{folder}: {error}") from None
