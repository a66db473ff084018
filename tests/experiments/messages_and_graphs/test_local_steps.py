"""The verdict on fewer rounds with more local steps."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from experiments.messages_and_graphs import local_steps as experiment


@pytest.mark.parametrize(
    ("rounds", "verdict"),
    [
        ((40.0, 20.0, 9.0), "the claim holds throughout"),
        ((math.nan, 20.0, 9.0), "the claim holds throughout"),
        ((math.nan, math.nan, 9.0), "fewer than two reach the target, so the claim is not tested"),
        ((math.nan, math.nan, math.nan), "fewer than two reach the target"),
        ((40.0, 20.0, 30.0), "the claim does NOT hold throughout"),
        ((20.0, 20.0, 9.0), "the claim does NOT hold throughout"),
        ((40.0, 20.0, math.nan), "the claim does NOT hold throughout"),
        ((9.0, 20.0, 40.0), "the claim does NOT hold throughout"),
    ],
)
def test_the_claim_is_that_every_larger_number_of_steps_needs_fewer_rounds(
    rounds: tuple[float, ...], verdict: str
) -> None:
    table = pd.DataFrame(
        {
            "partition": next(iter(experiment.PARTITIONS)),
            "steps": (1, 3, 9),
            "rounds_to_target": rounds,
            "steps_to_target": [r * s for r, s in zip(rounds, (1, 3, 9), strict=True)],
            "accuracy": 0.9,
            "consensus_distance": 1.0,
        }
    )
    found = experiment.finding(table, experiment.Options())
    assert verdict in found
    assert "nan" not in found
