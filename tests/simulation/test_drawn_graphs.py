"""Runs on a graph that every round draws anew: any number of ranks, resumed, per edge, refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from scipy.sparse import csr_array

import dfl
import topologies
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.schedule import MixingMatrices, Schedule
from dfl.comm.threat_model import ThreatModel
from dfl.compression import Exact
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.layout import Layout
from dfl.core.options import MOST
from dfl.simulation.prepare import prepare
from tests.support.mpirun import CLOCKS
from topologies.sequences import ENDLESS, Drawn, EveryRound, drawn

pytestmark = pytest.mark.usefixtures("no_figures")

RUN = dfl.Run(peers=7, topology="random_matching", rounds=6, eval_every=1, model="softmax")


def last(run: dfl.Run) -> dict[str, Any]:
    *_, row = dfl.simulate(run)
    return {name: value for name, value in row.items() if name not in CLOCKS}


def pairs(t: int) -> csr_array:
    order = np.random.default_rng(t).permutation(6)
    matrix = np.eye(6) / 2
    matrix[order[::2], order[1::2]] = matrix[order[1::2], order[::2]] = 0.5
    return csr_array(matrix)


def test_the_length_of_a_sequence_without_a_period_is_known_on_both_sides_of_the_wall() -> None:
    assert ENDLESS == MOST
    assert MixingMatrices(EveryRound(pairs)).endless
    assert not MixingMatrices([pairs(0)]).endless
    assert len(MixingMatrices(EveryRound(pairs)).sample) == 64


def test_a_round_averages_by_the_matrix_that_it_draws() -> None:
    network = prepare(RUN, World()).network
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 3)))
    for t in (0, 4, 1):
        averaged = Net(network, t).exchange(x).average()
        np.testing.assert_allclose(averaged, network.schedule.matrix(t) @ x.numpy(), atol=1e-12)


def test_plans_are_kept_for_one_round() -> None:
    schedule = Schedule(MixingMatrices(EveryRound(pairs)), Layout(6, 1), 0)
    first = schedule.peer_plan(0)
    assert schedule.peer_plan(0) is first
    schedule.peer_plan(1)
    assert schedule.peer_plan(0) is not first
    np.testing.assert_array_equal(schedule.peer_plan(0).near.toarray(), pairs(0).toarray())


def test_memory_per_edge_is_for_every_edge_that_may_be_drawn() -> None:
    ring = csr_array(np.roll(np.eye(6, dtype=bool), 1, 0) | np.roll(np.eye(6, dtype=bool), -1, 0))
    free = Schedule(MixingMatrices(EveryRound(pairs)), Layout(6, 1), 0)
    assert len(free.edge_plan(0).out) == 6
    assert free.edge_plan(0).pull.shape == (6, 6)  # edges of this round alone
    free = Schedule(MixingMatrices(EveryRound(pairs)), Layout(6, 1), 0)
    assert len(free.union.out) == 30
    assert free.edge_plan(0).pull.shape == (6, 30)
    assert (
        len(Schedule(MixingMatrices(EveryRound(pairs), possible=ring), Layout(6, 1), 0).union.out)
        == 12
    )


def test_memory_for_too_many_pairs_is_refused() -> None:
    with pytest.raises(InputError, match=r"--topology .* 24,995,000 directed edges"):
        _ = Schedule(MixingMatrices(EveryRound(pairs)), Layout(5000, 1), 0).union


def test_the_same_seed_draws_the_same_graphs() -> None:
    assert last(RUN) == last(RUN)
    assert last(RUN) != last(replace(RUN, seed=1))


def test_a_sequence_of_ones_own(tmp_path: Path) -> None:
    def own(peers: int, rng: Generator) -> Any:
        return drawn(lambda rng: csr_array(np.roll(np.eye(peers, dtype=bool), 1, 0)), rng)

    circle = csr_array(np.roll(np.eye(7, dtype=bool), 1, axis=0))
    assert last(replace(RUN, topology=own)) == last(replace(RUN, topology=circle))


def test_a_sequence_that_is_another_at_its_second_call_is_refused() -> None:
    unlike = iter(range(9))

    def own(peers: int, rng: Generator) -> Any:
        k = next(unlike)
        return drawn(lambda _: csr_array(np.roll(np.eye(peers, dtype=bool), k + 1, 0)), rng)

    with pytest.raises(InputError, match="--topology draws other graphs"):
        last(replace(RUN, topology=own))


@pytest.mark.filterwarnings("ignore:the weights are not doubly stochastic")
def test_a_rule_needs_no_more_messages_than_any_graph_may_bring() -> None:
    """The first graphs bring 2 or more to each peer, a later one only a peer's own."""
    run = replace(RUN, peers=16, aggregator="trimmed_mean:f=1", rounds=65)
    line = "needs more than 2 messages, there is 1 where --topology random_out:s=8 draws no more"
    with pytest.raises(InputError, match=line):
        last(replace(run, topology="random_out:s=8", algorithm="dfedavgm"))
    last(replace(run, topology="random_regular:s=4"))
    last(replace(run, topology="random_out:s=8", rounds=2))

    def own(peers: int, rng: Generator) -> Any:
        return drawn(lambda rng: csr_array(rng.random((peers, peers)) < 0.9), rng)

    with pytest.warns(UserWarning, match="draws no more: such a round ends the run"):
        last(replace(run, topology=own))


def test_several_matrices_are_no_rule_for_endless_graphs() -> None:
    with pytest.raises(InputError, match=r"--mixing|--topology"):
        last(replace(RUN, mixing=[np.eye(7)] * 3))


def test_d_cliques_are_made_of_the_labels_of_the_peers() -> None:
    run = replace(RUN, topology="d_cliques:size=3", partition="shards:per_peer=2", peers=9)
    info = prepare(run, World()).info
    assert info is not None
    assert info.graph is not None
    graph = topologies.build(
        partial(topologies.TOPOLOGIES["d_cliques"], size=3),
        topologies.MIXINGS["metropolis"],
        9,
        randomness.generator(0, "topology"),
        info.label_counts,
    )
    assert (info.graph.weights[0] != graph.weights[0]).nnz == 0


def test_a_graph_with_its_own_weights_takes_no_mixing_rule() -> None:
    run = replace(RUN, topology="base_graph", rounds=0)
    info = prepare(replace(run, mixing="lazy"), World()).info
    assert info is not None
    assert any("--mixing lazy" in note for note in info.notes)
    assert info.graph is not None
    assert info.graph.own_weights
    plain = prepare(run, World()).info
    assert plain is not None
    assert not any("--mixing" in note for note in plain.notes)


@pytest.mark.parametrize(
    "topology", ["random_matching", pytest.param("base_graph", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"bits": 4}, marks=pytest.mark.slow),
        {"bits": 4, "faults": "link_loss:p=0.3"},
        pytest.param({"faults": "link_loss:p=0.3"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_after_a_checkpoint_with_the_same_bits(
    tmp_path: Path, change: dict[str, Any], topology: str
) -> None:
    run = replace(RUN, topology=topology, **change)
    whole = last(run)
    list(dfl.simulate(replace(run, rounds=3, out=tmp_path / "r", checkpoint_every=3)))
    first, *_, end = dfl.simulate(replace(run, resume=tmp_path / "r"))
    assert first.round == 3
    assert {name: value for name, value in end.items() if name not in CLOCKS} == whole


LATE = replace(RUN, topology="random_out:s=4", seed=2, rounds=76, examples_per_peer=5, lr=1e-4)


def late_one_way(peers: int, rng: Generator) -> Any:
    """Return a ring in every round but 70, in which peer 0 receives from none; it does not state
    that.
    """

    def make(t: int) -> csr_array:
        ahead = np.roll(np.eye(peers, dtype=bool), 1, axis=0)
        edges = ahead | ahead.T
        edges[0] &= t != 70
        return csr_array(edges)

    return Drawn(EveryRound(make))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"mixing": "sinkhorn"}, "--mixing sinkhorn refuses it"),
        ({"mixing": "uniform", "bits": 8}, "--algorithm qdfedavgm need"),
        ({"mixing": "uniform", "algorithm": "choco"}, "--algorithm choco need"),
    ],
)
def test_a_late_round_without_a_way_back_is_refused_before_round_0(
    change: dict[str, Any], line: str
) -> None:
    run = replace(LATE, **change)
    with pytest.raises(InputError, match=rf"^--topology random_out:s=4: .* no way .*{line}"):
        next(iter(dfl.simulate(run)))


@pytest.mark.filterwarnings("ignore:the weights are not doubly stochastic")
def test_rounds_in_which_a_way_leads_back_are_accepted() -> None:
    for change in (
        {"mixing": "sinkhorn", "rounds": 64},
        {"mixing": "uniform", "bits": 8, "rounds": 64},
        {"mixing": "uniform", "algorithm": "dfedavgm"},
        {"mixing": "sinkhorn", "topology": "random_out:s=6", "bits": 8},
        {"mixing": "uniform", "topology": "directed_random:redraw=true", "bits": 8},
    ):
        next(iter(dfl.simulate(replace(LATE, **change))))


def test_a_late_round_of_ones_own_graph_without_a_way_back_ends_the_run_in_a_line() -> None:
    run = replace(LATE, topology=late_one_way, eval_every=1000, rounds=71)
    with pytest.raises(InputError, match=r"--topology .*, round 70: sinkhorn: no way"):
        last(replace(run, mixing="sinkhorn"))
    with pytest.raises(InputError, match="--topology, round 70: over some edge no way leads back"):
        last(replace(run, mixing="uniform", bits=8))
    last(replace(run, mixing="uniform", algorithm="dfedavgm"))
    last(replace(run, mixing="uniform", algorithm="dfedavgm", faults="link_loss:p=0.3"))


def test_weights_without_an_average_that_they_keep_have_no_reversed_averaging() -> None:
    one_way = csr_array([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]])
    schedule = Schedule(MixingMatrices([one_way], [None]), Layout(3, 1), 0)
    assert schedule.edge_plan(0).push is None
    network = Network(Layout(3, 1), schedule.matrices, World(), ThreatModel(Exact()), 0)
    with pytest.raises(InputError, match="round 5: over some edge no way leads back"):
        Net(network, 5).push(torch.zeros(3, 1))
