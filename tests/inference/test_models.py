"""Scores and Hessians are those of automatic differentiation, and fits those of other packages."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from dfl.inference.likelihood import bias, efficient, maximize
from dfl.inference.models import MODELS, Density, Logistic, Model, Site
from dfl.inference.separation import separated
from tests.support.studies import site

KINDS = list(MODELS)


def random_theta(model: Model, of: Site) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(of.p + model.nuisances(of), dtype=torch.float64, generator=generator) / 3


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_autograd(kind: str) -> None:
    model, here = MODELS[kind](), site(0, kind=kind)
    theta = random_theta(model, here)
    weights = torch.linspace(0.5, 2, here.n, dtype=torch.float64)
    score = torch.func.jacrev(partial(model.log_density, here))(theta)

    def total(theta: Tensor) -> Tensor:
        return (weights * model.log_density(here, theta)).sum()

    hessian = torch.func.jacrev(torch.func.grad(total))(theta)
    if kind != "cox":  # its contributions depend on other examples; their sum is what counts
        torch.testing.assert_close(model.score(here, theta), score, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.score(here, theta).sum(0), score.sum(0), rtol=0, atol=1e-10)
    torch.testing.assert_close(model.hessian(here, theta, weights), hessian, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_sites_and_repetitions_are_computed_each_by_itself(kind: str) -> None:
    model = MODELS[kind]()
    sites = [site(k, kind=kind) for k in range(3)]
    theta = torch.stack([random_theta(model, each) + k / 10 for k, each in enumerate(sites)])
    stacked = Site(
        *(torch.stack([getattr(s, name) for s in sites]) for name in ("y", "x", "z", "offset")),
        event=torch.stack([s.event for s in sites]) if sites[0].event is not None else None,  # type: ignore[misc]
    )
    for name in ("log_density", "score", "hessian"):
        together = getattr(model, name)(stacked, theta)
        alone = [getattr(model, name)(s, t) for s, t in zip(sites, theta, strict=True)]
        torch.testing.assert_close(together, torch.stack(alone), rtol=1e-12, atol=1e-12)
        one_for_all = getattr(model, name)(sites[0].alone(), theta)
        each = [getattr(model, name)(sites[0], t) for t in theta]
        torch.testing.assert_close(one_for_all, torch.stack(each), rtol=1e-12, atol=1e-12)


def test_an_own_log_density_gives_the_built_in_model() -> None:
    def log_density(y: Tensor, x: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
        eta = x @ beta + gamma[0]
        return y * eta - torch.nn.functional.softplus(eta)

    own, here = Density(log_density_of=log_density, own=1), site(0)
    theta = random_theta(Logistic(), here)
    weights = torch.linspace(0.5, 2, here.n, dtype=torch.float64)
    for name, extra in (("score", ()), ("hessian", (weights,))):
        one, other = (getattr(each, name)(here, theta, *extra) for each in (own, Logistic()))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    fits = [maximize(each, here, each.start(here)) for each in (own, Logistic())]
    torch.testing.assert_close(*fits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["logistic", "poisson", "linear"])
def test_a_site_has_the_fit_of_statsmodels(kind: str) -> None:
    sm = pytest.importorskip("statsmodels.api")
    model, here = MODELS[kind](), site(1, kind=kind)
    found = maximize(model, here, model.start(here))[:3].numpy()
    design = here.design.numpy()
    fitted = {
        "logistic": lambda: sm.Logit(here.y.numpy(), design).fit(disp=0, tol=1e-12),
        "poisson": lambda: sm.Poisson(here.y.numpy(), design).fit(disp=0, tol=1e-12),
        "linear": lambda: sm.OLS(here.y.numpy(), design).fit(),
    }[kind]()
    np.testing.assert_allclose(found, fitted.params, atol=1e-8)
    information = efficient(model, here, maximize(model, here, model.start(here)), 3).information
    errors = torch.linalg.inv(information).diagonal().sqrt().numpy()
    scale = 1.0 if kind != "linear" else np.sqrt((here.n - 3) / here.n)  # maximum likelihood's σ
    np.testing.assert_allclose(errors, fitted.bse * scale, rtol=1e-6)


def test_cox_has_the_fit_of_phreg_with_breslows_ties() -> None:
    phreg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    model, here = MODELS["cox"](), site(2, kind="cox")
    assert len(here.y.unique()) < here.n
    assert here.event is not None
    fitted = phreg(here.y.numpy(), here.x.numpy(), here.event.numpy(), ties="breslow").fit(
        tol=1e-12
    )
    found = maximize(model, here, model.start(here))
    np.testing.assert_allclose(found.numpy(), fitted.params, atol=1e-6)
    errors = torch.linalg.inv(-model.hessian(here, found)).diagonal().sqrt().numpy()
    np.testing.assert_allclose(errors, fitted.bse, atol=1e-6)


def test_a_site_without_an_estimate_is_nan_and_spoils_no_other() -> None:
    good, other = site(0), site(3)
    separable = replace(other, y=(other.x[:, 0] > 0).double())
    both = Site(
        *(
            torch.stack([getattr(s, n) for s in (good, separable)])
            for n in ("y", "x", "z", "offset")
        )
    )
    model = Logistic()
    found = maximize(model, both, model.start(both))
    assert found[1].isnan().all()
    torch.testing.assert_close(found[0], maximize(model, good, model.start(good)))


def test_the_bias_is_nan_where_the_information_is_singular() -> None:
    one = torch.ones(2, dtype=torch.float64)
    alike = Site(one, one[:, None], one[:, None], one)
    assert bias(Logistic(), alike, torch.zeros(2, dtype=torch.float64)).isnan().all()


def test_a_column_of_0_separates_nothing() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "x": np.stack([np.zeros(40), rng.normal(size=40)], 1),
        "z": np.ones((40, 1)),
        "y": rng.integers(0, 2, 40).astype(float),
    }
    names = ["nothing", "age", "intercept"]
    assert separated(Logistic(), arrays, names) is None
    arrays["y"] = (arrays["x"][:, 1] > 0).astype(float)
    assert separated(Logistic(), arrays, names) == "age"


def test_the_bias_is_that_of_a_known_case() -> None:
    """The maximum likelihood estimate of τ = log σ² has bias -(p + 1) / n, for p coefficients."""
    model = MODELS["linear"]()
    sites = [site(k, n=400, kind="linear") for k in range(20)]
    found = [bias(model, s, maximize(model, s, model.start(s)))[-1].item() for s in sites]
    np.testing.assert_allclose(np.mean(found), -(3 + 1) / 400, rtol=0.1)
