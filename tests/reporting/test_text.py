"""The words of a run."""

from __future__ import annotations

import math

import pytest

import dfl
from dfl.reporting.text import clock, no_contraction, size, summary, title_of
from dfl.store.callbacks import Outcome
from tests.evaluation.test_fairness import run_of


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


class Last(dfl.Callback):
    """Keeps the figures of the peers at the end."""

    def finish(self, outcome: Outcome) -> None:
        self.peers = outcome.peers


@pytest.mark.parametrize("algorithm", ["dfedavgm", "fedavg"])
def test_fairness_and_validation_are_lines_of_the_summary(algorithm: str) -> None:
    run = run_of(algorithm=algorithm, validation=0.2, fairness_adversary="adversary", model="mlp")
    *_, row = dfl.simulate(run, [last := Last()])
    lines = dict(summary(last.peers, row))
    mean = {name: last.peers[name].mean() for name in last.peers}
    assert lines["fairness"] == (
        f"parity gap {mean['parity_gap']:.4f}, odds gap {mean['odds_gap']:.4f}, adversary AUC "
        f"{mean['adversary_auc']:.4f}, "
        + ("of the server's model" if algorithm == "fedavg" else "means over the peers")
    )
    held_out = mean["validation_accuracy"]
    assert lines["  held out"] == f"{held_out:.4f} mean, each on the peer's own validation examples"
