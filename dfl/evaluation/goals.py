"""Goals of a run: a figure and its value, as `--until` and `--share-all-until` state them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

GOALS = {
    "accuracy": ("accuracy_mean", True),
    "accuracy_min": ("accuracy_min", True),
    "accuracy_mean_model": ("accuracy_mean_model", True),
    "accuracy_ensemble": ("accuracy_ensemble", True),
    "accuracy_vote": ("accuracy_vote", True),
    "local_accuracy": ("local_accuracy_mean", True),
    "validation_accuracy": ("validation_accuracy_mean", True),
    "train_loss": ("train_loss", False),
    "consensus_distance": ("consensus_distance", False),
}
"""Name of a figure -> the column of metrics.csv, and whether a higher value is better."""
FALLING = {column for column, higher in GOALS.values() if not higher} | {
    "test_loss_mean", "test_loss_max", "test_loss_mean_model", "perplexity_mean", "parity_gap_mean",
    "odds_gap_mean", "relative_squared_error",
}  # fmt: skip
"""Columns of metrics.csv of which a lower value is better."""
SHARING_GOALS = [name for name in GOALS if name != "consensus_distance"]
"""The figures of `--share-all-until`: all but the consensus distance, which begins at 0."""
ROUNDING = 1e-12
"""A figure that misses a goal by at most this share of it reaches it: the mean of 100 accuracies of
0.99 is 0.9899999999999999.
"""


class Goal(NamedTuple):
    """A figure at which a run stops, or stops sharing all parameters.

    Attributes:
        column: the column of metrics.csv.
        value: the figure.
        at_least: whether the goal is reached at this value or above it; else at it or below it.
    """

    column: str
    value: float
    at_least: bool


def reached(row: Mapping[str, float], goal: Goal | None) -> bool:
    """Return whether a row of metrics.csv reaches a goal; False without a goal.

    Args:
        row: figures by column.
        goal: `Run.goal`, or `Run.share_all_goal` where it is one.
    """
    if goal is None:
        return False
    figure = row[goal.column]
    if goal.at_least:
        return figure >= goal.value - slack(goal.value)
    return figure <= goal.value + slack(goal.value)


def slack(value: float) -> float:
    """Return the most by which a figure that reaches a goal of this value may miss it."""
    return ROUNDING * abs(value)
