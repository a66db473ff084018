"""What a method assumes of a run is checked before round 0."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy.sparse import csr_array

from dfl.algorithms import assumptions as of
from dfl.algorithms.assumptions import Assumption, Conditions
from dfl.algorithms.gossip.dfedavgm import DFedAvgM
from dfl.core.errors import InputError
from dfl.environment.faults import FAULTS
from tests.support.quadratic import digits, info, quadratic


@dataclass(frozen=True, kw_only=True)
class Careful(DFedAvgM):
    """DFedAvgM with assumptions."""

    requires: ClassVar[dict[Assumption, str]] = {of.MESSAGES_ARRIVE: "it would break"}
    expects: ClassVar[dict[Assumption, str]] = {of.STATIC: "it is slow"}
    messages: ClassVar[int] = 3


def conditions(*weights: Any, **values: Any) -> Conditions:
    given: dict[str, Any] = {"endless": False, "smallest": 0.0, "rate": lambda t: 0.1}
    given |= {"rounds": 3, "faults": (), "falsified": False, **values}
    return Conditions(tuple(csr_array(np.array(w, float)) for w in weights), **given)


PATH = [[0.7, 0.3, 0], [0.3, 0.4, 0.3], [0, 0.3, 0.7]]
CYCLE = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]
CYCLE_AND_BACK = [[0.5, 0.25, 0.25], [0, 0.5, 0.5], [0.5, 0, 0.5]]
CYCLE_AND_ONE = [[1 / 3, 1 / 3, 1 / 3, 0]] * 3 + [[0, 0, 0, 1]]
STAR = [[0.4, 0.3, 0.3], [0.5, 0.5, 0], [0.5, 0, 0.5]]


@pytest.mark.parametrize(
    ("assumption", "met", "unmet"),
    [
        (of.STATIC, conditions(PATH), conditions(PATH, PATH)),
        (of.TREES, conditions(PATH, STAR), conditions(PATH, STAR, endless=True)),
        (of.TREES, conditions([[1]]), conditions(CYCLE)),
        (of.TREES, conditions(STAR), conditions(PATH, np.full((3, 3), 1 / 3))),
        (of.TREES, conditions(STAR), conditions(CYCLE_AND_BACK)),
        (of.TREES, conditions(STAR), conditions(CYCLE_AND_ONE)),
        (of.CLUSTERS, conditions(PATH, clustered=True), conditions(PATH)),
        (of.UNDIRECTED, conditions(PATH, STAR), conditions(PATH, CYCLE)),
        (of.SYMMETRIC, conditions(PATH), conditions(PATH, CYCLE)),
        (of.SYMMETRIC, conditions(*[PATH] * 100), conditions(*[PATH] * 99, CYCLE)),
        (of.DOUBLY_STOCHASTIC, conditions(PATH, CYCLE), conditions(PATH, STAR)),
        (of.ABOVE_MINUS_THIRD, conditions(smallest=-0.3), conditions(smallest=-1 / 3)),
        (of.ABOVE_MINUS_THIRD, conditions(smallest=float("nan")), conditions(smallest=-0.44)),
        (of.NORMAL_RATE, conditions(), conditions(rate=lambda t: 2.0 - t)),
        (of.MESSAGES_ARRIVE, conditions(), conditions(faults=(FAULTS["burst"](),))),
        (of.PEERS_STAY, conditions(), conditions(faults=(FAULTS["outage"](),))),
        (of.SYMMETRIC_OUTAGES, conditions(CYCLE), conditions(CYCLE, faults=(FAULTS["outage"](),))),
        (
            of.SYMMETRIC_OUTAGES,
            conditions(PATH, faults=(FAULTS["outage"](),)),
            conditions(PATH, CYCLE, faults=(FAULTS["leave"](),)),
        ),
        (of.HONEST_MESSAGES, conditions(), conditions(falsified=True)),
        (of.FULL_WORK, conditions(), conditions(faults=(FAULTS["stragglers"](),))),
    ],
)
def test_an_assumption_is_checked(
    assumption: Assumption, met: Conditions, unmet: Conditions
) -> None:
    assert assumption.holds(met)
    assert not assumption.holds(unmet)


def test_some_rates_of_very_many_rounds_are_checked() -> None:
    most = 2**31 - 1
    assert of.NORMAL_RATE.holds(conditions(rounds=most))
    for end in (1, most - 1):
        late = conditions(rounds=most, rate=lambda t, end=end: float(t < end))
        assert not of.NORMAL_RATE.holds(late)


@pytest.mark.parametrize("rates", [{"lr": 1e-46}, {"lr_schedule": "exponential:decay=0.5"}])
def test_a_rate_by_which_float32_cannot_divide_is_refused(rates: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"--lr-schedule .* a learning rate of at least 1.18e-38"):
        digits(algorithm="d2", rounds=160, **rates)


def test_the_least_rate_has_a_finite_inverse() -> None:
    least = np.float32(of.LEAST_RATE)
    assert np.isfinite(1 / least)
    assert of.NORMAL_RATE.holds(conditions(rate=lambda t: float(least)))
    assert not of.NORMAL_RATE.holds(conditions(rate=lambda t: float(least) / 2))


def test_a_run_without_what_its_method_requires_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        quadratic(algorithm=Careful(), faults="link_loss:p=0.2")
    assert all(each in str(refused.value) for each in ("--faults", "p=0.2", "it would break"))


def test_a_run_without_what_its_method_expects_is_warned_of() -> None:
    notes = info(quadratic(algorithm=Careful(), topology="one_peer_exponential")).notes
    (note,) = (each for each in notes if "it is slow" in each)
    assert "--topology" in note
    assert not any("it is slow" in each for each in info(quadratic(algorithm=Careful())).notes)


def test_a_run_states_what_its_method_needs() -> None:
    method = info(quadratic(algorithm=Careful())).method
    assert (method.rows, method.messages) == (0, 3)
    assert len(method.assumes) == 2
    assert info(digits(algorithm="qdfedavgm", bits=4)).method.rows == 2
    per_edge = info(digits(algorithm="qdfedavgm", bits=4, faults="link_loss")).method
    assert per_edge.rows == 4  # two neighbours, a row at either end of each edge


def test_messages_are_counted_for_each_neighbour() -> None:
    once, thrice = (
        info(quadratic(algorithm=each)).payload_shared for each in ("dfedavgm", Careful())
    )
    assert thrice == 3 * once
