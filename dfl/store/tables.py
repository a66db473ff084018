"""Reading of the tables of a run, among them metrics.csv, to which it may be appending."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.files import read_bytes

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Rows:
    """The complete rows of a metrics.csv.

    Attributes:
        text: the file up to its last complete line; empty where there is none.
        columns: the names in the header.
        values: the fields of each row, as they are written.
    """

    text: str
    columns: Sequence[str]
    values: Sequence[Sequence[str]]

    @property
    def last(self) -> dict[str, str]:
        """The last row by column; empty where there is no row."""
        return dict(zip(self.columns, self.values[-1], strict=True)) if self.values else {}

    @property
    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """The numbers of each column, for what can do without pandas: it takes 0.25 s to import."""
        numbers = np.array([list(map(float, row)) for row in self.values])
        return dict(zip(self.columns, numbers.reshape(-1, len(self.columns)).T, strict=True))


def read(path: Path) -> Rows:
    """Read a metrics.csv.

    What follows the last line end is a row that is being written, and is left out; an empty file is
    one without rows yet. The header begins with `round` and names no column twice. Every row has
    a number in every column, NaN as "nan". Rounds are whole, not negative, and increase.

    Raises:
        FileNotFoundError: there is none.
        InputError: it is damaged.
    """
    try:
        held = read_bytes(path).decode()
        text = held[: held.rfind("\n") + 1]
        lines = list(csv.reader(StringIO(text), strict=True))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} is damaged: {why}") from None
    if not lines and "round".startswith(held[:5]):
        return Rows("", (), ())
    header, *rows = lines or [[]]
    if header[:1] != ["round"] or len(set(header)) < len(header):
        raise InputError(f"{path} is damaged: its first line is not a header")
    last = -1
    for number, row in enumerate(rows, 2):
        if len(row) != len(header) or not all(map(_is_number, row)):
            raise InputError(f"{path} is damaged: line {number} is no row of {len(header)} numbers")
        reached = float(row[0])
        if not (reached > last and reached.is_integer()):
            after = f" after {last}" if last >= 0 else ""
            raise InputError(f"{path} is damaged: line {number} has round {row[0]!r}{after}")
        last = int(reached)
    return Rows(text, header, rows)


def as_table(text: str) -> pd.DataFrame:
    """Return the rows of a table; its numbers are those that were written, to the last bit."""
    import pandas as pd

    return pd.read_csv(StringIO(text))


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text)) or text == "nan"
    except ValueError:
        return False
