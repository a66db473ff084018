"""Simulated studies: what is drawn, and that it does not depend on how many are drawn at a time."""

import numpy as np
import torch

from dfl.inference.estimators import Meta, TiltedScore, TiltedScoreGraph
from dfl.inference.study import Study
from tests.support.studies import graph

SMALL = Study(sites=4, n=100, repetitions=5)


def test_repetitions_do_not_depend_on_how_they_are_drawn() -> None:
    whole, part = SMALL.draw(0, 5), SMALL.draw(3, 5)
    assert torch.equal(whole.y[3:], part.y)
    assert torch.equal(whole.x[3:], part.x)
    together, alone = (SMALL.estimate(TiltedScore(), at_once=many) for many in (5, 2))
    np.testing.assert_allclose(together.beta, alone.beta, rtol=1e-9)
    assert together.beta.shape == together.errors.shape == (5, 4)


def test_the_draws_follow_the_settings() -> None:
    study = Study(sites=50, n=400, lowest=-3.5, highest=-2.0, shift=1.0, repetitions=2)
    site = study.draw(0, 2)
    means = site.x.mean(2).numpy()
    assert -1.2 < means.min() < -0.8
    assert 0.8 < means.max() < 1.2
    np.testing.assert_allclose(site.x.var(2).mean(), 1, rtol=0.02)
    assert 0.05 < site.y.mean().item() < 0.25


def test_a_study_runs_over_a_graph() -> None:
    beta, errors = SMALL.estimate(TiltedScoreGraph(), lambda count: graph("hypercube", count))
    server, _ = SMALL.estimate(TiltedScore(leads=None))
    np.testing.assert_allclose(beta, server, atol=1e-10)
    assert (errors > 0).all()


def test_one_intercept_is_wrong_where_intercepts_differ() -> None:
    study = Study(sites=10, n=400, lowest=-3, highest=3, repetitions=4)
    right, wrong = (study.estimate(Meta(), one_intercept=one).beta for one in (False, True))
    assert abs(right[:, 0].mean() - 1) < 0.05
    assert wrong[:, 0].mean() < 0.85
