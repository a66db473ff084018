"""Do the ways to deal that make peers unequal do what their sources say?"""

from __future__ import annotations

import numpy as np
import pytest

from dfl.datasets.skews import proportions


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-3, 1.0, 1e3, 1e300])
def test_dirichlet_proportions_of_any_alpha(alpha: float) -> None:
    shares = proportions(np.random.default_rng(0), (50, 1000), alpha)
    assert np.all(shares >= 0)
    assert np.abs(shares.sum(axis=1) - 1).max() < 1e-9
    if alpha < 1e-100:
        assert np.all(shares.max(axis=1) == 1)
    if alpha > 1e100:
        assert np.allclose(shares, 1e-3)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_dirichlet_proportions_have_their_moments(alpha: float) -> None:
    shares = proportions(np.random.default_rng(1), (20000, 4), alpha)
    assert np.abs(shares.mean(axis=0) - 1 / 4).max() < 0.02
    assert np.abs(shares.var(axis=0) - 3 / 16 / (4 * alpha + 1)).max() < 0.005
