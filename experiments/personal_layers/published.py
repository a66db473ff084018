"""Columns of a table with the std over seeds and the published figures."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd


def insert_published(
    table: pd.DataFrame,
    column: str,
    published: Sequence[float],
    std: pd.Series[float] | None,
    name: str = "published",
) -> None:
    """Insert the std over seeds and the published figures after a column of a table, in place.

    Args:
        table: the means.
        column: the name of the column.
        published: the published figure of every row, NaN for none.
        std: of every row; no column where not given.
        name: the end of the name of the column; published_full_setting where the setting here is a
            reduced one.
    """
    place = table.columns.get_loc(column)
    assert isinstance(place, int)
    table.insert(place + 1, f"{column}_{name}", list(published))
    if std is not None:
        table.insert(place + 1, f"{column}_std", std)
