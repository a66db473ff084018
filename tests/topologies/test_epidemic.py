"""Every round draws s neighbours for each peer, each set of them equally likely."""

import numpy as np
import pytest

from topologies import MIXINGS, TOPOLOGIES, GraphError, build
from topologies.sequences import Drawn


def drawn(name: str, peers: int, seed: int, **options: int) -> Drawn:
    """Return a graph that every round draws anew."""
    made = TOPOLOGIES[name](peers, np.random.default_rng(seed), **options)
    assert isinstance(made, Drawn)
    return made


def patterns(name: str, peers: int, rounds: int, **options: int) -> np.ndarray:
    """Return the graphs of some rounds, (rounds, P, P): entry (i, j) where i receives from j."""
    made = drawn(name, peers, 1, **options)
    return np.stack([made.rounds[t].toarray() for t in range(rounds)])


@pytest.mark.parametrize(("peers", "s"), [(2, 1), (6, 1), (6, 3), (7, 6), (40, 5)])
def test_every_peer_sends_to_s_others(peers: int, s: int) -> None:
    found = patterns("random_out", peers, 8, s=s)
    assert (found.sum(1) == s).all()
    assert not np.diagonal(found, axis1=1, axis2=2).any()


@pytest.mark.parametrize(("peers", "s"), [(2, 1), (6, 1), (6, 4), (7, 6), (40, 5)])
def test_every_peer_of_a_regular_graph_has_s_neighbours(peers: int, s: int) -> None:
    found = patterns("random_regular", peers, 8, s=s)
    assert (found.sum(1) == s).all()
    assert (found == found.transpose(0, 2, 1)).all()


@pytest.mark.parametrize("name", ["random_out", "random_regular"])
def test_every_set_of_neighbours_is_equally_likely(name: str) -> None:
    found = patterns(name, 6, 1500, s=2)[:, :, 0]
    sets, counts = np.unique(found, axis=0, return_counts=True)
    assert len(sets) == 10
    assert abs(counts / 1500 - 0.1).max() < 4 * (0.1 * 0.9 / 1500) ** 0.5


def test_a_round_is_the_same_whenever_it_is_drawn() -> None:
    for name in ("random_out", "random_regular"):
        once, again = (drawn(name, 16, 3) for _ in range(2))
        again.rounds[0]
        assert (once.rounds[5] != again.rounds[5]).nnz == 0
        assert (once.rounds[5] != once.rounds[6]).nnz > 0
        assert once.rounds[0].sum() == 16 * 4  # ceil(log2 P) by default


@pytest.mark.parametrize(("peers", "s"), [(3, 2), (5, 4), (7, 4), (8, 3), (17, 6)])
def test_the_default_number_of_neighbours_is_possible(peers: int, s: int) -> None:
    assert (patterns("random_regular", peers, 2).sum(1) == s).all()


def test_one_peer_has_no_neighbours() -> None:
    graph = build(TOPOLOGIES["random_out"], MIXINGS["uniform"], 1, np.random.default_rng(0))
    assert graph.weights[3].toarray().tolist() == [[1.0]]


@pytest.mark.parametrize("options", [{"s": 0}, {"s": 5}])
@pytest.mark.parametrize("name", ["random_out", "random_regular"])
def test_a_number_of_neighbours_out_of_range_is_refused(name: str, options: dict[str, int]) -> None:
    with pytest.raises(GraphError, match=f"s={options['s']}"):
        TOPOLOGIES[name](5, np.random.default_rng(0), **options)
