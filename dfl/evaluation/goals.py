"""Goals of a run, as `--until` and `--share-all-until` state them."""

from __future__ import annotations

from collections.abc import Mapping


def reached(row: Mapping[str, float], goal: tuple[str, float, bool] | None) -> bool:
    """Return whether a row of metrics.csv is as good as a goal, which is False without a goal.

    Args:
        row: figures by column.
        goal: `Run.goal` or `Run.opening`: a column, its value, and whether that is a least or a
            most.
    """
    if goal is None:
        return False
    column, wanted, at_least = goal
    return row[column] >= wanted if at_least else row[column] <= wanted
