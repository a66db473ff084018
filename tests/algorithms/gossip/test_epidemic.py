"""Epidemic learning is DFedAvgM on a graph that it draws anew in every round."""

from typing import Any

import numpy as np
import pytest
import torch

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.simulation.defaults import settle
from dfl.simulation.initialization import start
from tests.algorithms.test_oracle import sgd
from tests.support.quadratic import centres, final, quadratic, states


@pytest.mark.parametrize(
    ("form", "topology"), [("local", "random_out:s=3"), ("oracle", "random_regular:s=3")]
)
def test_it_is_dfedavgm_on_its_graph_bit_for_bit(form: str, topology: str) -> None:
    epidemic = quadratic(algorithm=f"epidemic:s=3,form={form}", momentum=0.9)
    plain = quadratic(topology=topology, mixing="uniform", momentum=0.9)
    assert torch.equal(final(epidemic, 6), final(plain, 6))


def test_it_is_the_recursion_of_the_paper() -> None:
    setting = quadratic(algorithm="epidemic:s=2")
    X = start(setting.run, setting.task, True)
    for t, state in enumerate(list(states(setting, 12))[1:]):
        Z = sgd(X, centres(setting), 0.1, 0.0, 3)
        W = setting.network.schedule.matrix(t).toarray()
        senders = [[j for j in range(8) if W[i, j] and j != i] for i in range(8)]
        assert np.bincount(np.concatenate(senders).astype(int), minlength=8).tolist() == [2] * 8
        X = torch.stack(
            [(Z[i] + Z[near].sum(0)) / (1 + len(near)) for i, near in enumerate(senders)]
        )
        assert torch.allclose(state.x, X, rtol=0, atol=1e-12)


def test_only_the_graph_of_the_oracle_keeps_the_mean() -> None:
    """With equal curvatures the mean follows gradient descent where it is kept."""
    for form, kept in (("oracle", True), ("local", False)):
        setting = quadratic(algorithm=f"epidemic:s=3,form={form}")
        mean = start(setting.run, setting.task, True).mean(0)
        for _ in range(10):
            mean = sgd(mean, centres(setting).mean(0), 0.1, 0.0, 3)
        assert torch.allclose(final(setting, 10).mean(0), mean, rtol=0, atol=1e-12) == kept


def test_it_takes_no_other_graph_and_keeps_its_own_when_settled_again() -> None:
    with pytest.raises(InputError, match="--topology ring"):
        quadratic(algorithm="epidemic", topology="ring")
    once = settle(Run(algorithm="epidemic:s=2"), 8)
    assert (once.topology, once.mixing) == ("random_out:s=2", "uniform")
    assert settle(once, 8) == once


@pytest.mark.parametrize(
    "settings",
    [{"algorithm": "epidemic:s=8"}, {"algorithm": "epidemic:s=3,form=oracle", "peers": 7}],
)
def test_a_number_of_neighbours_that_no_graph_has_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"s=[38]"):
        quadratic(**settings)
