"""Simulated studies: sites whose parameters are known, repeated, all estimated together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.schedule import MixingMatrices
from dfl.comm.threat_model import ThreatModel
from dfl.compression.exact import Exact
from dfl.core import randomness
from dfl.core.isolation import isolated
from dfl.core.layout import Layout
from dfl.inference.estimators import Estimator
from dfl.inference.exchange import Centre, Exchange
from dfl.inference.models import Logistic, Site
from dfl.inference.sites import Stacked

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch

NUMBERS = 2**18
"""Covariates that are computed at a time, in whole repetitions: more do not fit into the cache."""

Floats = NDArray[np.float64]


class Outcomes(NamedTuple):
    """What an estimator made of every repetition; NaN where some site has no estimate.

    Attributes:
        beta: (repetitions, p).
        errors: (repetitions, p), the standard errors.
    """

    beta: Floats
    errors: Floats


@dataclass(frozen=True, kw_only=True)
class Study:
    """Logistic regressions with covariates of N(mean_j, 1) and an intercept γ_j of every site.

    Attributes:
        sites: K.
        n: the examples of each.
        beta: the common coefficients.
        lowest, highest: γ_j is uniform between these.
        shift: mean_j is uniform between -shift and shift in every covariate.
        repetitions: how often the study is drawn.
        seed: of all random numbers, with the number of the repetition.
    """

    sites: int
    n: int
    beta: tuple[float, ...] = (1.0, -1.0, 0.5, 0.0)
    lowest: float = -2.0
    highest: float = 2.0
    shift: float = 0.0
    repetitions: int = 100
    seed: int = 0

    def draw(self, first: int, last: int) -> Site:
        """Return the examples of some repetitions, with axes (repetitions, K)."""
        K, n, p = self.sites, self.n, len(self.beta)
        x, y = np.empty((last - first, K, n, p)), np.empty((last - first, K, n))
        for k, repetition in enumerate(range(first, last)):
            generator = randomness.generator(self.seed, "study", repetition)
            gamma = generator.uniform(self.lowest, self.highest, (K, 1))
            means = generator.uniform(-self.shift, self.shift, (K, 1, p))
            x[k] = generator.normal(size=(K, n, p)) + means
            chance = 1 / (1 + np.exp(-(x[k] @ np.array(self.beta) + gamma)))
            y[k] = generator.uniform(size=(K, n)) < chance
        ones = torch.ones(*y.shape, 1, dtype=torch.float64)
        outcomes = torch.from_numpy(y)
        return Site(outcomes, torch.from_numpy(x), ones, torch.zeros_like(outcomes))

    def estimate(
        self,
        estimator: Estimator,
        net: Callable[[int], Exchange] | None = None,
        one_intercept: bool = False,
        at_once: int | None = None,
    ) -> Outcomes:
        """Return an estimator's estimates and standard errors in every repetition.

        Args:
            estimator: the estimator.
            net: (K) -> what connects the sites; a centre where not given. Called for every part.
            one_intercept: whether the intercept is taken for common to all sites.
            at_once: repetitions of a part; None for as many as fit into the cache.
        """
        p, found = len(self.beta), []
        many = at_once or max(1, NUMBERS // (self.sites * self.n * len(self.beta)))
        with isolated(1):
            for first in range(0, self.repetitions, many):
                site = self.draw(first, min(first + many, self.repetitions))
                if one_intercept:
                    site = site.with_one_intercept()
                sites = Stacked(Logistic(), site.p, site)
                estimate = estimator.estimate(sites, (net or at_centre)(self.sites))
                errors = estimate.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
                found.append((estimate.beta[:, 0, :p].numpy(), errors[:, 0, :p].numpy()))
        return Outcomes(*(np.concatenate(part) for part in zip(*found, strict=True)))


def at_centre(sites: int) -> Exchange:
    """Return a centre in this process that no message is lost on the way to."""
    network = Network(Layout(sites, 1), MixingMatrices(), World(), ThreatModel(Exact()), 0)
    return Centre(network)
