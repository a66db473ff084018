"""Spectra: known values, algorithms compared with each other, and warnings."""

from collections.abc import Callable
from functools import partial
from math import inf, log, log2
from typing import Any

import networkx as nx
import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.linalg import block_diag
from scipy.sparse import csr_array, diags_array

from topologies import MIXINGS, TOPOLOGIES, WeightedGraph, build, pattern, spectra, spectrum

Floats = NDArray[np.float64]

RULES = [rule for rule in MIXINGS if rule != "fastest"]
SYMMETRIC = ("metropolis", "max_degree", "lazy")


def network(name: str, peers: int, mixing: str = "metropolis", **options: Any) -> WeightedGraph:
    return build(
        partial(TOPOLOGIES[name], **options), MIXINGS[mixing], peers, np.random.default_rng(0)
    )


def by_definition(w: Floats) -> tuple[float, float]:
    """Return the second largest modulus and the smallest real part of all eigenvalues."""
    eigenvalues = np.linalg.eigvals(w)
    return np.sort(np.abs(eigenvalues))[-2], eigenvalues.real.min()


@pytest.mark.parametrize(("peers", "gap"), [(16, 0.0507), (20, 0.0326), (32, 0.0128)])
def test_ring_has_its_known_spectrum(peers: int, gap: float) -> None:
    mixed = network("ring", peers).spectrum
    assert mixed.gap == pytest.approx(gap, abs=5e-5)
    assert mixed.gap == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / peers)))
    assert mixed.second == 1 - mixed.gap
    assert mixed.smallest == pytest.approx(-1 / 3)
    assert mixed.half_rounds == pytest.approx(log(0.5) / log(mixed.second))


def test_ring_of_sixteen_has_the_published_second_eigenvalue() -> None:
    assert network("ring", 16).spectrum.second == pytest.approx(0.9493, abs=5e-5)


@pytest.mark.parametrize("peers", [16, 400, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "gap", "smallest"),
    [
        ("ring", lambda n: 2 / 3 * (1 - np.cos(2 * np.pi / n)), lambda n: -1 / 3),
        (
            "chain",
            lambda n: 2 / 3 * (1 - np.cos(np.pi / n)),
            lambda n: 1 / 3 - 2 / 3 * np.cos(np.pi / n),
        ),
        ("star", lambda n: 1 / n, lambda n: 0),
        ("torus", lambda n: 2 / 5 * (1 - np.cos(2 * np.pi / n**0.5)), lambda n: -3 / 5),
        ("exponential", lambda n: 2 / (1 + np.ceil(log2(n))), None),
    ],
)
def test_gaps_equal_their_formulas(
    name: str, peers: int, gap: Callable[[int], float], smallest: Callable[[int], float] | None
) -> None:
    mixed = network(name, peers).spectrum
    assert mixed.gap == pytest.approx(gap(peers), rel=1e-6)
    assert smallest is None or mixed.smallest == pytest.approx(smallest(peers), abs=1e-6)


@pytest.mark.parametrize("bits", [1, 4, 10])
def test_hypercube_has_its_known_spectrum(bits: int) -> None:
    mixed = network("hypercube", 2**bits).spectrum
    assert mixed.second == pytest.approx((bits - 1) / (bits + 1))
    assert mixed.smallest == pytest.approx(-(bits - 1) / (bits + 1))


@pytest.mark.parametrize("peers", [2, 3, 16, 1000])
@pytest.mark.parametrize("mixing", ["metropolis", "max_degree", "uniform"])
def test_complete_averages_exactly_in_one_round(peers: int, mixing: str) -> None:
    mixed = network("complete", peers, mixing).spectrum
    assert (mixed.second, mixed.gap, mixed.half_rounds, mixed.smallest) == (0, 1, 0, 0)


def test_one_peer_has_a_gap_of_one_and_no_warning() -> None:
    for mixing in RULES:
        net = network("ring", 1, mixing)
        assert (net.spectrum.second, net.spectrum.smallest, net.notes) == (0, 1, ())


@pytest.mark.parametrize("mixing", RULES)
@pytest.mark.parametrize(
    ("name", "peers", "options"),
    [
        ("ring", 17, {}),
        ("chain", 20, {}),
        ("star", 12, {}),
        ("complete", 9, {}),
        ("grid", 24, {}),
        ("regular", 40, {}),
        ("erdos_renyi", 30, {"p": 0.3}),
        ("small_world", 30, {}),
        ("barabasi_albert", 30, {}),
        ("exponential", 12, {}),
    ],
)
def test_spectra_of_small_graphs_equal_the_definition(
    name: str, peers: int, options: dict[str, Any], mixing: str
) -> None:
    net = network(name, peers, mixing, **options)
    second, smallest = by_definition(net.weights[0].toarray())
    assert net.spectrum.second == pytest.approx(second, abs=1e-12)
    assert net.spectrum.smallest == pytest.approx(smallest, abs=1e-12)


@pytest.mark.parametrize("restarts", [spectra.RESTARTS, 1])
@pytest.mark.parametrize("mixing", [*SYMMETRIC, "uniform", "neighbors"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chain", {}),
        ("star", {}),
        ("grid", {}),
        ("regular", {"k": 3}),
        ("small_world", {}),
        ("barabasi_albert", {}),
    ],
)
def test_sparse_agrees_with_dense(
    name: str, options: dict[str, Any], mixing: str, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one restart Lanczos does not converge, and the matrix is factored."""
    monkeypatch.setattr(spectra, "RESTARTS", restarts)
    net = network(name, 300, mixing, **options)
    dense = net.spectrum
    monkeypatch.setattr(spectra, "DENSE_REVERSIBLE", 0)
    sparse, again = spectrum(net.weights), spectrum(net.weights)
    assert sparse == again
    assert sparse.gap == pytest.approx(dense.gap, rel=1e-6, abs=1e-12)
    assert sparse.smallest == pytest.approx(dense.smallest, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "factored"),
    [("regular", False), ("hypercube", False), ("chain", True), ("grid", True)],
)
def test_only_graphs_with_small_cuts_are_factored(
    name: str, factored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factors of a large random graph would fill the memory, so Lanczos continues there."""
    net = network(name, 1024)
    expected = net.spectrum
    inverse = spectra._inverse
    calls: list[csr_array] = []

    def recorded(matrix: csr_array, top: Floats) -> Any:
        calls.append(matrix)
        return inverse(matrix, top)

    monkeypatch.setattr(spectra, "RESTARTS", 1)
    monkeypatch.setattr(spectra, "_inverse", recorded)
    found = spectrum(net.weights)
    assert bool(calls) is factored
    assert found.gap == pytest.approx(expected.gap, rel=1e-6)
    assert found.smallest == pytest.approx(expected.smallest, rel=1e-6)


@pytest.mark.parametrize("peers", [5, 10, 16])
@pytest.mark.parametrize("mixing", RULES)
def test_the_spectrum_of_a_sequence_is_that_of_its_product(
    peers: int, mixing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network("one_peer_exponential", peers, mixing)
    product = np.linalg.multi_dot([*[w.toarray() for w in reversed(net.weights)], np.eye(peers)])
    sigma = np.linalg.svd(product, compute_uv=False)[1]
    expected = 0 if sigma < 1e-12 else sigma ** (1 / len(net.weights))
    assert net.spectrum.second == pytest.approx(expected)
    monkeypatch.setattr(spectra, "_circulant", lambda weights: None)
    general = spectrum(net.weights)
    assert general.second == pytest.approx(expected)
    assert general.smallest == pytest.approx(net.spectrum.smallest, abs=1e-12)


@pytest.mark.parametrize("peers", [4096, 10_000])
def test_a_long_sequence_has_a_spectrum(peers: int) -> None:
    mixed = network("one_peer_exponential", peers).spectrum
    assert mixed.second == 0 if peers == 4096 else 0 < mixed.second < 0.9


def directed(peers: int, rng: Generator) -> csr_array:
    """Return a mean of permutations: doubly stochastic, not circulant, normal or reversible."""
    ones = np.eye(peers)
    return csr_array(
        (ones[rng.permutation(peers)] + ones[rng.permutation(peers)] + np.roll(ones, 1, axis=0)) / 3
    )


@pytest.mark.parametrize("count", [1, 30, 300])
@pytest.mark.parametrize("name", ["ring", "star"])
def test_a_sequence_of_one_matrix_has_its_gap_however_long(name: str, count: int) -> None:
    """Of 300 rings the product is below the smallest number that is no rounding error."""
    (w,) = network(name, 8).weights
    assert spectrum([w] * count).gap == pytest.approx(network(name, 8).spectrum.gap, rel=1e-9)


@pytest.mark.parametrize(
    ("topology", "options"), [("spanning_tree", {"count": 2}), ("double_tree", {})]
)
def test_a_sequence_that_is_not_doubly_stochastic_has_the_gap_of_its_product(
    topology: str, options: dict[str, Any]
) -> None:
    graph = network(topology, 8, "neighbors", **options)
    one, two = (w.toarray() for w in graph.weights)
    assert abs(one.sum(axis=0) - 1).max() > 0.1
    second, _ = by_definition(two @ one)
    assert graph.spectrum.second == pytest.approx(second ** (1 / 2), rel=1e-9)
    assert not any("never settles" in note for note in graph.notes)


def test_a_directed_matrix_has_the_spectrum_of_the_definition() -> None:
    net = build(directed, MIXINGS["metropolis"], 50, np.random.default_rng(1))
    second, smallest = by_definition(net.weights[0].toarray())
    assert net.directed
    assert net.spectrum.second == pytest.approx(second)
    assert net.spectrum.smallest <= smallest
    assert [note for note in net.notes if "those of the file" not in note] == []


@pytest.mark.parametrize("graph", [directed, TOPOLOGIES["regular"]])
def test_a_large_matrix_that_is_not_circulant_has_no_spectrum_and_a_warning(
    graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectra, "DENSE_GENERAL", 40)
    monkeypatch.setattr(spectra, "ITERATED", 40)
    net = build(graph, MIXINGS["metropolis"], 50, np.random.default_rng(1))
    assert np.isnan([net.spectrum.second, net.spectrum.gap, net.spectrum.half_rounds]).all()
    assert "spectrum of such weights is not computed for 50 peers" in net.notes[-1]


def test_disconnected_weights_have_no_gap() -> None:
    pair = np.full((2, 2), 0.5)
    mixed = spectrum([csr_array(block_diag(pair, pair))])
    assert (mixed.gap, mixed.half_rounds) == (0, inf)


@pytest.mark.parametrize("name", ["ring", "chain", "star", "hypercube", "torus", "grid"])
def test_a_bipartite_graph_without_self_weights_has_a_warning(name: str) -> None:
    net = network(name, 16, "neighbors")
    assert net.spectrum.smallest == pytest.approx(-1)
    assert (net.spectrum.second, net.spectrum.half_rounds) == (1, inf)
    assert "lambda_min is -1" in net.notes[-1]
    assert "never settles" in net.notes[-1]


def test_nearly_bipartite_weights_have_a_warning() -> None:
    net = network("ring", 101, "neighbors")
    assert net.spectrum.smallest == pytest.approx(-np.cos(np.pi / 101))
    assert "lambda_min is -0.999516, very close to -1" in net.notes[0]


@pytest.mark.parametrize("mixing", ["metropolis", "max_degree", "lazy", "uniform"])
def test_other_weights_on_a_ring_have_no_warning(mixing: str) -> None:
    assert network("ring", 16, mixing).notes == ()


def test_tiny_gaps_keep_their_digits() -> None:
    """The gap of two cliques with one weak edge is below the rounding error of 1 - 0.999…"""
    weak = 1e-9
    n = 300
    w = block_diag(np.full((n, n), 1 / n), np.full((n, n), 1 / n))
    w[0, n] = w[n, 0] = weak
    w[0, 0] -= weak
    w[n, n] -= weak
    assert spectrum([csr_array(w)]).gap == pytest.approx(2 * weak / n, rel=1e-4)


def test_a_chain_with_drift_has_the_spectrum_of_the_definition() -> None:
    """A random walk that drifts to one end is reversible; pi spans many orders of magnitude."""
    w = diags_array([[0.2] * 14, [0.8, *[0.0] * 13, 0.2], [0.8] * 14], offsets=[1, 0, -1]).toarray()
    w[0, 0], w[14, 14] = 0.8, 0.2
    second, smallest = by_definition(w)
    mixed = spectrum([csr_array(w)])
    assert mixed.second == pytest.approx(second)
    assert mixed.smallest == pytest.approx(smallest)


def test_pattern_drops_self_loops_and_keeps_the_order_of_nodes() -> None:
    graph = nx.Graph([("a", "b"), ("b", "c"), ("c", "c")])
    np.testing.assert_array_equal(pattern(graph).toarray(), [[0, 1, 0], [1, 0, 1], [0, 1, 0]])
