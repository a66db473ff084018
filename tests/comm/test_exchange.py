"""The exchange copies, waits and measures no more than is needed."""

import inspect
import time
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import dfl
from dfl.algorithms import protocols
from dfl.comm import heartbeat
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.comm.plan import peer_plan
from dfl.core.layout import Layout
from dfl.evaluation import metrics
from dfl.simulation import distribute_data
from dfl.simulation.prepare import prepare
from tests.support.quadratic import digits
from topologies import MIXINGS, TOPOLOGIES, build


def test_methods_may_rely_on_all_that_the_network_takes() -> None:
    """What the protocol has of a verb are all of its parameters, with the same defaults."""
    for name, of_protocol in vars(protocols.Net).items():
        if inspect.isfunction(of_protocol) and not name.startswith("_"):
            documented, real = (
                [(each.name, each.default) for each in inspect.signature(verb).parameters.values()]
                for verb in (of_protocol, getattr(Net, name))
            )
            assert documented == real, name


def plans(topology: str, ranks: int, peers: int = 16) -> list[Any]:
    weights = build(
        TOPOLOGIES[topology], MIXINGS["uniform"], peers, np.random.default_rng(0)
    ).weights[0]
    return [peer_plan(weights, Layout(peers, ranks), rank) for rank in range(ranks)]


def test_consecutive_messages_are_sent_without_a_copy() -> None:
    # The first message goes to the rank before, the last to the rank after.
    for plan in plans("ring", 4):
        assert plan.send.tolist() == [run[0] for runs in plan.runs for run in runs]
        assert [range(1)] in plan.runs
        assert [range(3, 4)] in plan.runs
    for plan in plans("complete", 4):  # everything goes everywhere
        assert plan.runs == [[range(4)]] * 3
    for plan in plans("ring", 2):  # both ends go to the other rank
        assert plan.runs == [[range(1), range(7, 8)]]
        assert plan.most_runs == 2
    assert plans("ring", 1)[0].runs == []
    assert plans("ring", 1)[0].most_runs == 0


def test_messages_with_gaps_are_in_several_runs() -> None:
    for plan in plans("regular", 3, 60):
        assert all(len(runs) > 1 for runs in plan.runs)
        assert [*map(len, map(list, map(chain.from_iterable, plan.runs)))] == [*plan.sends.values()]
        assert [row for runs in plan.runs for run in runs for row in run] == plan.send.tolist()
        assert plan.most_runs == max(map(len, plan.runs))


def test_messages_of_the_exact_format_are_not_copied() -> None:
    setting = digits()
    messages = torch.randn(6, 50)
    received = Net(setting.network, 0, measured=False).exchange(messages)
    assert received.own.data_ptr() == messages.data_ptr()
    assert received.far.shape == (0, 50)


def test_the_error_of_a_message_is_computed_only_in_measured_rounds() -> None:
    setting = digits(bits=4)
    messages = torch.randn(6, 50)
    seen, unseen = (
        Net(setting.network, 0, measured=flag).exchange(messages) for flag in (True, False)
    )
    assert torch.equal(seen.own, unseen.own)
    assert (seen.error > 0).all()
    assert unseen.error.isnan().all()
    rows = list(dfl.simulate(dfl.Run(peers=4, bits=4, rounds=5, eval_every=2, model="softmax")))
    assert [row["round"] for row in rows] == [0, 2, 4, 5]
    assert all(0 < row["relative_squared_error"] < 2 for row in rows[1:])


class Late:
    """A request that is done after some tests."""

    def __init__(self, tests: int) -> None:
        self.left = tests

    def Test(self) -> bool:  # noqa: N802  as MPI calls it
        self.left -= 1
        return self.left < 0


def test_a_waiting_rank_yields_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(heartbeat, "AWAKE", 60.0)  # the machine may be busy
    World()._wait(Late(3))  # type: ignore[arg-type]
    assert not slept
    monkeypatch.setattr(heartbeat, "AWAKE", -1.0)
    World()._wait(Late(12))  # type: ignore[arg-type]
    assert slept[0] == 1e-5
    assert slept[-1] == heartbeat.NAP  # never longer: messages progress only while a rank polls
    assert slept == sorted(slept)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_found(value: float) -> None:
    x = torch.full((5, 7), 3e38)
    x[1] = -3e38
    assert metrics.not_finite_rows(x).tolist() == []
    x[1, 3] = x[4, 6] = value
    assert metrics.not_finite_rows(x).tolist() == [1, 4]
    assert metrics.not_finite_rows(x[:0]).tolist() == []


def test_a_lone_rank_receives_its_examples_without_a_copy() -> None:
    given = {"train inputs": np.arange(3)}
    assert (
        distribute_data.scatter(
            World(), Layout(5, 1), lambda peers: given if peers.tolist() == [*range(5)] else {}
        )
        is given
    )


def test_the_data_set_is_freed_after_it_was_distributed() -> None:
    """Rank 0 keeps the examples of its peers only."""
    import gc
    import weakref

    from dfl.datasets import DATASETS
    from dfl.datasets.data import Data

    loaded: list[Any] = []

    def load(directory: Any) -> Data:
        data = DATASETS["digits"](directory)
        loaded.append(weakref.ref(data))
        return data

    with DATASETS.replaced(mnist=load):
        setting = prepare(dfl.Run(peers=3, dataset="mnist"), World())
    gc.collect()
    assert loaded[0]() is None
    assert setting.info is not None
    assert setting.info.label_counts.sum() == 1438
