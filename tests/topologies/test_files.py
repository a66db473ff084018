"""Graphs from files: formats that are read, and damaged files that are refused."""

from functools import partial
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array, save_npz

from topologies import MIXINGS, TOPOLOGIES, GraphError, WeightedGraph, build

RING = build(TOPOLOGIES["ring"], MIXINGS["metropolis"], 5, np.random.default_rng(0)).weights[0]


def load(path: Path, peers: int = 5, mixing: str = "metropolis") -> WeightedGraph:
    return build(
        partial(TOPOLOGIES["edges"], path=path), MIXINGS[mixing], peers, np.random.default_rng(0)
    )


@pytest.mark.parametrize(
    "text",
    [
        "0 1\n1 2\n2 3\n3 4\n4 0\n",
        "# a ring\n\n1 0 # back\n0 1\n 2\t1\n2 2\n2 3\r\n3 4\n4 0",
        "\n".join(nx.generate_edgelist(nx.cycle_graph(5))),
        "\ufeff0 1\n1 2\n2 3\n3 4\n4 0\n",
    ],
    ids=["plain", "comments, repeats, a loop", "written by networkx", "with a byte-order mark"],
)
def test_an_edge_list_is_an_undirected_graph(tmp_path: Path, text: str) -> None:
    path = tmp_path / "my.edges"
    path.write_text(text)
    net = load(path)
    assert (net.edges, net.directed) == (5, False)
    assert (net.weights[0] != RING).nnz == 0


@pytest.mark.parametrize(
    "text",
    [
        "0 1 0.25\n1 2 2.5e-1\n2 3 .25\n3 4 0.25\n",
        "0 1 0.25\n1 0 0.25\n1 2 0.25 # twice\n2 3 0.25\n3 4 0.25\n2 2 0.5\n",
        "\n".join(nx.generate_edgelist(nx.path_graph(5), data=True)).replace(
            "{}", "{'weight': 0.25}"
        ),
    ],
    ids=["plain", "repeats, a loop", "written by networkx"],
)
@pytest.mark.parametrize("mixing", ["metropolis", "lazy"])
def test_weights_of_edges_are_used_as_they_are(tmp_path: Path, text: str, mixing: str) -> None:
    path = tmp_path / "my.edges"
    path.write_text(text)
    net = load(path, mixing=mixing)
    (weights,) = net.weights
    expected = np.diag([0.75, 0.5, 0.5, 0.5, 0.75])
    expected[range(4), range(1, 5)] = expected[range(1, 5), range(4)] = 0.25
    np.testing.assert_array_equal(weights.toarray(), expected)
    assert (net.own_weights, net.edges) == (True, 4)


def test_weights_that_sum_to_one_but_for_rounding_leave_nothing_for_the_peer(
    tmp_path: Path,
) -> None:
    (tmp_path / "my.edges").write_text("0 1 0.50000001\n1 2 0.50000001\n2 0 0.50000001\n")
    (weights,) = load(tmp_path / "my.edges", peers=3).weights
    assert not weights.diagonal().any()


@pytest.mark.parametrize(
    "name", ["sparse.npz", "dense.npz", "single.npz", "coo.npz", "dense.csv", "DENSE.CSV"]
)
@pytest.mark.parametrize("mixing", ["metropolis", "lazy"])
def test_a_matrix_is_used_as_it_is(tmp_path: Path, name: str, mixing: str) -> None:
    path = tmp_path / name
    match name.lower():
        case "sparse.npz":
            save_npz(path, RING)
        case "coo.npz":
            save_npz(path, RING.tocoo())
        case "dense.npz":
            np.savez(path, RING.toarray())
        case "single.npz":
            np.savez_compressed(path, weights=RING.toarray().astype(np.float32))
        case _:
            np.savetxt(path, RING.toarray(), delimiter=",", header="five peers")
    (weights,) = load(path, mixing=mixing).weights
    assert (weights.dtype, weights.has_canonical_format) == (np.float64, True)
    np.testing.assert_allclose(weights.toarray(), RING.toarray(), atol=1e-7)


def test_duplicates_and_stored_zeros_of_a_matrix_are_resolved(tmp_path: Path) -> None:
    data = [0.25, 0.25, 0.5, 0.5, 0.5, 0.0]
    columns = [1, 1, 0, 1, 0, 0]
    save_npz(tmp_path / "w.npz", csr_array((data, columns, [0, 3, 6]), shape=(2, 2)))
    (weights,) = load(tmp_path / "w.npz", peers=2).weights
    np.testing.assert_array_equal(weights.toarray(), np.full((2, 2), 0.5))


def test_a_matrix_may_be_directed(tmp_path: Path) -> None:
    circle = np.eye(5) / 2 + np.roll(np.eye(5), 1, axis=0) / 2
    np.savetxt(tmp_path / "w.csv", circle, delimiter=",", encoding="utf-8-sig")
    net = load(tmp_path / "w.csv")
    assert (net.edges, net.directed, set(net.degrees)) == (5, True, {1})
    assert net.spectrum.second == pytest.approx(np.cos(np.pi / 5))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("e.txt", "", 'no edges; expected lines "i j"'),
        ("e.txt", "# nothing\n", "no edges"),
        ("e.txt", "0 1\n1 x\n", "line 2: '1 x' is not an edge"),
        ("e.txt", "0 1.5\n", "line 1: '0 1.5' is not an edge"),
        ("e.txt", "0 -1\n", "line 1: '0 -1' is not an edge"),
        ("e.txt", "0 1 -0.3\n", "line 1: '0 1 -0.3' is not an edge"),
        ("e.txt", "0 1 nan\n", "line 1: '0 1 nan' is not an edge"),
        ("e.txt", "0 1 0.3 0.4\n", "line 1: '0 1 0.3 0.4' is not an edge"),
        ("e.txt", "0 1 0.3\n1 2\n", "line 2: no weight"),
        ("e.txt", "0 1 0.3\n1 0 0.4\n", "line 2: another weight than line 1"),
        ("e.txt", "0 1 0.3\n1 0\n", "line 2: another weight than line 1"),
        ("e.txt", "0 1 1\n1 2 1\n2 3 1\n3 4 1\n", "weights of peer 1 sum to 2"),
        ("e.txt", "0 1 .5\n1 2 .5\n2 3 .5\n3 4 .5\n0 0 .2\n", "weights of peer 0 sum to 0.7"),
        ("e.txt", "0 1 1e999\n", "weight of peer 0 for peer 1 is inf"),
        ("e.txt", "0 " + "9" * 5000, "line 1: .* is not an edge"),
        ("e.txt", "0 ٣\n", "is not an edge"),
        ("e.txt", "0 1\n\n4 5\n", "line 3: peer 5 does not exist; 5 peers are 0 to 4, and --peers"),
        ("e.txt", b"\x93NUMPY\x00\xff\xfe", "not a text file of edges"),
        ("e.npy", b"\x93NUMPY\x01\x00", "not a text file of edges"),
        ("e.txt", "0 1\n2 3\n3 4\n", "not connected: 2 pieces, the largest of 3 of 5 peers"),
        ("e.txt", "2 2\n", "not connected: 5 pieces"),
        ("w.npz", b"", "w.npz: not a mixing matrix"),
        ("w.npz", b"PK\x03\x04junk", "w.npz: not a mixing matrix"),
        ("w.npz", "0 1\n", "w.npz: not a mixing matrix"),
        ("w.csv", "", "the matrix is .*; 5 peers need 5 x 5"),
        ("w.csv", "1,0\n0,1\n", "the matrix is 2 x 2; 5 peers need 5 x 5"),
        ("w.csv", "1,0\n0\n", "w.csv: not a mixing matrix .*columns changed"),
        ("w.csv", "1,a\n0,1\n", "w.csv: not a mixing matrix .*'a'"),
        ("w.csv", b"\xff\xfe\x00", "w.csv: not a mixing matrix"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(GraphError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_single_number_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", np.array(1.0))
    with pytest.raises(GraphError, match="the matrix is a single number; 5 peers need 5 x 5"):
        load(tmp_path / "w.npz")


@pytest.mark.parametrize("name", ["no.txt", "no.npz", "no.csv"])
def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(GraphError, match=f"{name}: .*No such file"):
        load(tmp_path / name)
    with pytest.raises(GraphError, match=f"~no-such-user/{name}: No such file"):
        load(Path("~no-such-user") / name)
    (tmp_path / name).mkdir()
    with pytest.raises(GraphError, match=f"{name}: Is a directory"):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ((1, 1), np.nan, "weight of peer 1 for peer 1 is nan"),
        ((4, 0), np.inf, "weight of peer 4 for peer 0 is inf"),
        (
            (3, 2),
            -0.1,
            "weight of peer 3 for peer 2 is -0.1; weights must be finite and not negative",
        ),
        ((2, 2), 0.5, "weights of peer 2 sum to 1.16666667; each row must sum to 1"),
    ],
)
def test_weights_that_do_not_average_are_refused(
    tmp_path: Path, entry: tuple[int, int], value: float, message: str
) -> None:
    weights = RING.toarray()
    weights[entry] = value
    for name, write in (("w.npz", np.savez), ("w.csv", partial(np.savetxt, delimiter=","))):
        write(tmp_path / name, weights)
        with pytest.raises(GraphError, match=message):
            load(tmp_path / name)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", np.full((5, 5), {"a": 1}, dtype=object))
    with pytest.raises(GraphError, match="allow_pickle"):
        load(tmp_path / "w.npz")


@pytest.mark.parametrize("dtype", ["complex128", "U3", "M8[s]"])
def test_other_kinds_of_numbers_are_refused(tmp_path: Path, dtype: str) -> None:
    np.savez(tmp_path / "w.npz", np.zeros((5, 5), dtype=dtype))
    with pytest.raises(GraphError, match=r"the matrix holds .*; expected real numbers"):
        load(tmp_path / "w.npz")


def test_several_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", RING.toarray(), RING.toarray())
    with pytest.raises(
        GraphError, match=r"not a mixing matrix \(it holds 'arr_0', 'arr_1', not one"
    ):
        load(tmp_path / "w.npz")


@pytest.mark.parametrize(
    ("indices", "indptr"), [([0, 7], [0, 1, 2]), ([0, -9], [0, 1, 2]), ([0, 1], [0, 2, 1])]
)
def test_a_sparse_matrix_with_indices_out_of_bounds_is_refused(
    tmp_path: Path, indices: list[int], indptr: list[int]
) -> None:
    pattern = {"indices": np.array(indices), "indptr": np.array(indptr)}
    np.savez(
        tmp_path / "w.npz",
        format=np.array(b"csr"),
        data=np.ones(2),
        shape=np.array([2, 2]),
        **pattern,  # type: ignore[arg-type]
    )
    with pytest.raises(GraphError, match="not a mixing matrix"):
        load(tmp_path / "w.npz", peers=2)


def refusal(path: Path) -> str:
    """Return the message with which `load` refuses a file; empty where it reads it."""
    try:
        load(path)
    except GraphError as error:
        return str(error)
    return ""


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_matrix_with_changed_bytes_is_read_or_refused_in_one_line(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "w.npz"
    save_npz(path, RING, compressed=data.draw(st.booleans()))
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    assert "\n" not in refusal(path)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.text(alphabet="0123 4#{}.e\n-\t", max_size=40),
    suffix=st.sampled_from([".edges", ".csv"]),
)
def test_any_text_is_read_or_refused_in_one_line(tmp_path: Path, text: str, suffix: str) -> None:
    path = tmp_path / f"any{suffix}"
    path.write_text(text)
    assert "\n" not in refusal(path)
