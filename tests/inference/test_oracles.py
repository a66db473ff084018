"""Estimators equal their papers, written out site by site and example by example."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import root
from torch import Tensor

from dfl.inference.estimators import (
    Debiased,
    Estimator,
    Meta,
    OneShot,
    Pooled,
    Surrogate,
    TiltedScore,
)
from dfl.inference.likelihood import bias, maximize
from dfl.inference.models import Cox, Density, Logistic, Site
from tests.support.studies import centre, separate, several, site

Floats = NDArray[np.float64]
MODEL = Logistic()
SITES = several(MODEL, 4).sites
"""Their sizes are 50, 60, 70 and 80."""


def run(estimator: Estimator) -> tuple[Floats, Floats]:
    found = estimator.estimate(separate(MODEL, SITES), centre(len(SITES)))
    return found.beta[0].numpy(), found.covariance[0].numpy()


def design(of: Site) -> Floats:
    return np.concatenate([of.x.numpy(), np.ones((of.n, 1))], 1)


def mle(of: Site) -> Floats:
    found: Floats = maximize(MODEL, of, MODEL.start(of)).numpy()
    return found


def expit(eta: Floats) -> Floats:
    chance: Floats = 1 / (1 + np.exp(-eta))
    return chance


def covariance(of: Site, kind: str) -> Floats:
    """Return the covariance of θ̂ of a site: the inverse information, or the sandwich."""
    D, chance = design(of), expit(design(of) @ mle(of))
    inverse = np.linalg.inv(D.T @ (D * (chance * (1 - chance))[:, None]))
    scores = (of.y.numpy() - chance)[:, None] * D
    if kind == "sandwich":
        inverse = inverse @ scores.T @ scores @ inverse
    return np.asarray(inverse[:2, :2], np.float64)


def test_meta_weighs_by_the_inverse_covariance_of_each_fit() -> None:
    sm = pytest.importorskip("statsmodels.api")
    fits = [sm.Logit(s.y.numpy(), design(s)).fit(disp=0, tol=1e-12) for s in SITES]
    weights = [np.linalg.inv(fit.cov_params()[:2, :2]) for fit in fits]
    total = np.linalg.inv(sum(weights))
    pulls = [w @ fit.params[:2] for w, fit in zip(weights, fits, strict=True)]
    beta, cov = run(Meta())
    np.testing.assert_allclose(beta, total @ sum(pulls), atol=1e-8)
    np.testing.assert_allclose(cov, total, rtol=1e-6)


@pytest.mark.parametrize("kind", ["efficient", "sandwich"])
def test_one_shot_is_the_average_of_corrected_estimates(kind: str) -> None:
    share = np.array([s.n for s in SITES]) / sum(s.n for s in SITES)
    each = [mle(s) - bias(MODEL, s, torch.from_numpy(mle(s))).numpy() for s in SITES]
    beta, cov = run(OneShot(covariance=kind))  # type: ignore[arg-type]
    np.testing.assert_allclose(beta, (share @ np.stack(each))[:2], atol=1e-12)
    parts = [w**2 * covariance(s, kind) for w, s in zip(share, SITES, strict=True)]
    np.testing.assert_allclose(cov, sum(parts), rtol=1e-9)


def test_the_bias_of_logistic_regression_is_away_from_0() -> None:
    """With many draws the corrected estimates of sites are nearer to β than the others."""
    draws = [site(k, n=100) for k in range(200)]
    off = np.mean([mle(s)[0] for s in draws]) - 1
    removed = np.mean([bias(MODEL, s, torch.from_numpy(mle(s)))[0].item() for s in draws])
    assert off > 0.03
    assert abs(off - removed) < off / 2


@pytest.mark.parametrize("kind", ["efficient", "sandwich"])
def test_debiased_weighs_each_half_by_the_other(kind: str) -> None:
    total, pull = np.zeros((2, 2)), np.zeros(2)
    for whole in SITES:
        halves = [whole.every_other(0), whole.every_other(1)]
        for half, other in (halves, halves[::-1]):
            weight = np.linalg.inv(covariance(other, kind))
            corrected = mle(half) - bias(MODEL, half, torch.from_numpy(mle(half))).numpy()
            total, pull = total + weight, pull + weight @ corrected[:2]
    beta, cov = run(Debiased(covariance=kind))  # type: ignore[arg-type]
    np.testing.assert_allclose(beta, np.linalg.solve(total, pull), atol=1e-10)
    np.testing.assert_allclose(cov, np.linalg.inv(total), rtol=1e-9)


def profile(of: Site, beta: Floats) -> float:
    found = root(lambda g: np.sum(of.y.numpy() - expit(of.x.numpy() @ beta + g)), 0.0, tol=1e-13)
    return float(found.x[0])


@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("profiled", [True, False])
def test_the_tilted_score_is_that_of_the_paper(lead: int, profiled: bool) -> None:
    beta = run(Meta())[0]
    n = np.array([s.n for s in SITES])
    for _ in range(2):
        gammas = [profile(s, beta) if profiled else mle(s)[2] for s in SITES]
        beta, derivative = by_the_paper(beta, gammas, n / n.sum(), lead)
    found, cov = run(TiltedScore(leads=(lead,), profile=profiled))
    np.testing.assert_allclose(found, beta, atol=1e-9)
    np.testing.assert_allclose(cov, np.linalg.inv(-n.sum() * derivative), rtol=1e-4)


def by_the_paper(
    start: Floats, gammas: list[float], share: Floats, lead: int
) -> tuple[Floats, Floats]:
    """Return the solution of U(β) - U(β̄) + S_N = 0, and the derivative of U there."""
    x, y = SITES[lead].x.numpy(), SITES[lead].y.numpy()

    def density(gamma: float) -> Floats:
        chance = expit(x @ start + gamma)
        whole: Floats = np.where(y == 1, chance, 1 - chance)
        return whole

    def slope(x: Floats, gamma: float, w: Floats) -> Floats:
        spread = w * expit(x @ start + gamma) * (1 - expit(x @ start + gamma))
        ratio: Floats = (x * spread[:, None]).mean(0) / spread.mean()
        return ratio

    def tilted(beta: Floats) -> Floats:
        total = np.zeros(2)
        for gamma, part in zip(gammas, share, strict=True):
            w = density(gamma) / density(gammas[lead])
            rest = w * (y - expit(x @ beta + gamma))
            total += part * (rest[:, None] * (x - slope(x, gamma, w))).mean(0)
        return total

    score = np.zeros(2)
    for each, gamma, part in zip(SITES, gammas, share, strict=True):
        own = each.x.numpy()
        rest = each.y.numpy() - expit(own @ start + gamma)
        score += part * (rest[:, None] * (own - slope(own, gamma, np.ones(each.n)))).mean(0)
    before = tilted(start)
    solution: Floats = root(lambda beta: tilted(beta) - before + score, start, tol=1e-13).x
    h = 1e-5 * np.eye(2)
    derivative = np.stack([(tilted(solution + e) - tilted(solution - e)) / 2e-5 for e in h], 1)
    return solution, (derivative + derivative.T) / 2


def test_synthesis_is_the_mean_over_leads() -> None:
    each = [run(TiltedScore(iterations=1, leads=(k,)))[0] for k in range(4)]
    np.testing.assert_allclose(
        run(TiltedScore(iterations=1, leads=None))[0], np.mean(each, 0), atol=1e-12
    )


def test_the_surrogate_of_second_order_is_exact_for_a_quadratic_likelihood() -> None:
    alike = [site(k, 40 + 10 * k, kind="linear") for k in range(4)]
    sites = separate(Density(log_density_of=square), alike)
    pooled = Pooled().estimate(sites, centre(4))
    x, y = (torch.cat([getattr(s, name) for s in alike]).numpy() for name in ("x", "y"))
    np.testing.assert_allclose(pooled.beta[0], np.linalg.lstsq(x, y)[0], atol=1e-10)
    away = Surrogate(second_order=True, iterations=1).estimate(sites, centre(4))
    torch.testing.assert_close(away.beta, pooled.beta, rtol=0, atol=1e-10)
    torch.testing.assert_close(away.covariance, pooled.covariance, rtol=1e-9, atol=0)


def test_the_second_order_is_nearer_to_the_estimate_of_all_examples() -> None:
    alike = [site(k, 60 + 10 * k) for k in range(6)]
    sites = separate(MODEL, [s.with_one_intercept() for s in alike])
    pooled = Pooled().estimate(sites, centre(6)).beta
    estimators = (Surrogate(second_order=second) for second in (False, True))
    first, second = (
        (each.estimate(sites, centre(6)).beta - pooled).abs().max() for each in estimators
    )
    assert second < first / 3


def square(y: Tensor, x: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    return -((y - x @ beta) ** 2) / 2


@pytest.mark.parametrize("robust", [False, True])
def test_errors_of_cox_are_those_of_other_packages(robust: bool) -> None:
    model, here = Cox(), site(2, n=120, kind="cox")
    one = separate(model, [here])
    found = (
        Meta(covariance="sandwich" if robust else "efficient")
        .estimate(one, centre(1))
        .covariance[0]
        .numpy()
    )
    phreg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    assert here.event is not None
    fitted = phreg(here.y.numpy(), here.x.numpy(), here.event.numpy(), ties="breslow").fit(
        tol=1e-12
    )
    wanted = fitted.cov_params()
    if robust:  # Lin, Wei 1989, with the sums over risk sets written out
        wanted = wanted @ residuals(here, fitted.params).T @ residuals(here, fitted.params) @ wanted
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def residuals(of: Site, beta: Floats) -> Floats:
    y, x = of.y.numpy(), of.x.numpy()
    assert of.event is not None
    event, hazard = of.event.numpy(), np.exp(x @ beta)
    rows = np.zeros_like(x)
    for k in np.flatnonzero(event):
        at_risk = y >= y[k]
        mean = hazard[at_risk] @ x[at_risk] / hazard[at_risk].sum()
        rows[k] += x[k] - mean
        rows[at_risk] -= hazard[at_risk, None] * (x[at_risk] - mean) / hazard[at_risk].sum()
    return rows
