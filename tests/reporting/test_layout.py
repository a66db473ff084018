"""Positions of peers keep neighbours together, are always the same, and are finite."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import block_diag, csr_array

from dfl.reporting.layout import layout
from tests.reporting.test_plots import weights


def graph_of(name: str, peers: int) -> csr_array:
    (matrix,) = weights(name, peers)
    receives = csr_array(matrix)
    receives.setdiag(0)
    receives.eliminate_zeros()
    return receives


@pytest.mark.parametrize(
    ("name", "peers"), [("grid", 36), ("star", 60), ("grid", 225), ("regular", 300), ("chain", 200)]
)
def test_neighbours_are_near_each_other(name: str, peers: int) -> None:
    receives = graph_of(name, peers)
    places = layout(receives)
    ends, others = receives.tocoo().coords
    near = np.linalg.norm(places[ends] - places[others], axis=1).mean()
    assert near < 0.9 * np.linalg.norm(places[:, None] - places, axis=2).mean()
    assert np.abs(places).max() == pytest.approx(1)
    assert len(np.unique(places.round(6), axis=0)) == peers
    np.testing.assert_array_equal(layout(receives), places)


def test_parts_without_a_path_between_them_have_places() -> None:
    receives = csr_array(block_diag([graph_of("grid", 49), graph_of("grid", 36)]))
    assert np.isfinite(layout(receives)).all()
