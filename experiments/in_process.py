"""Runs that are too short to be programs of their own: a grid in this process, each cell kept as
one small file.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

import dfl
from dfl.config import Run
from dfl.core.errors import DivergedError
from experiments import common


def measure(options: common.Place, cells: Sequence[common.Cell]) -> pd.DataFrame:
    """Run the cells that are not kept from before, one after the other, and read all of them back.

    A run that diverges ends early: its rows stop before the last round.

    Returns:
        The rows of figures of every cell, with its labels as further columns.

    Raises:
        InputError: a run cannot be done, or a cell of that name is kept from another run.
    """
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    return pd.concat([_cell(options.out / "cells", cell) for cell in cells], ignore_index=True)


def _cell(cells: Path, cell: common.Cell) -> pd.DataFrame:
    labels, run = cell
    file = cells / f"{','.join(f'{name}={value}' for name, value in labels.items())}.json"
    asked = replace(run, data_dir=None).to_dict()
    if not file.exists():
        _keep(file, {"run": asked, "rows": _rows(run)})
    kept = json.loads(file.read_text())
    if kept["run"] != asked:
        raise dfl.InputError(f"{file} is of a run with other settings: give another --out")
    return pd.DataFrame(kept["rows"]).astype(float).assign(**labels)


def _rows(run: Run) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    with warnings.catch_warnings(
        action="ignore"
    ):  # notes on the setting, as that a graph averages slowly
        try:
            rows += dfl.simulate(run)
        except DivergedError as error:
            print(error, file=sys.stderr)
    return rows


def _keep(file: Path, found: dict[str, Any]) -> None:
    """Write a file that is there in whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(file)
    print(f"{file.stem}: done at {time.strftime('%X')}", file=sys.stderr, flush=True)
