"""The words of a run."""

from __future__ import annotations

import math

import pytest

from dfl.reporting.text import clock, no_contraction, size, title_of


@pytest.mark.parametrize(
    ("ratio", "warned"), [(0.999, False), (1.0, True), (4.6, True), (math.nan, False)]
)
def test_messages_contract_while_their_error_is_below_their_length(
    ratio: float, warned: bool
) -> None:
    line = no_contraction({"relative_squared_error": ratio, "round": 3.0})
    assert bool(line) == warned
    assert not warned or f"is {ratio:.3g} times ||x||^2 at some peer in round 3" in line
    assert no_contraction({"round": 3.0}) == ""


def test_numbers_are_written_as_people_read_them() -> None:
    assert size(1234567) == "1.23 MB"
    assert (clock(3.21), clock(4000.0)) == ("3.2 s", "1:06:40")
    assert title_of("accuracy_mean") == "Accuracy"
    assert title_of("consensus_distance") == "Consensus distance"
