"""Maxima of likelihoods: found where there is one, and refused where there is none."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from dfl.core.errors import InputError
from dfl.inference import Density, fit
from dfl.inference.estimators import ESTIMATORS, GradientTracking, Pooled
from dfl.inference.likelihood import ascent, is_maximum, maximize
from dfl.inference.models import MODELS, Logistic, Site
from tests.support.hospitals import frame
from tests.support.studies import centre, graph, several, tensor

Floats = NDArray[np.float64]
ARGUMENTS: dict[str, Any] = {"outcome": "y", "covariates": ["age", "dose"], "site": "hospital"}
NEED_EVERY_SITE = [
    name for name, each in ESTIMATORS.items() if each.fitted_parts and not each.needs_graph
]


def treated(kind: str, outcome: int, seed: int, n: int = 80) -> Site:
    """Return a site whose treated examples have one outcome, no event, or the first events."""
    rng = np.random.default_rng(seed)
    drug = np.arange(n) % 2 * 1.0
    x = np.stack([rng.normal(size=n), drug], 1)
    y = (rng.uniform(size=n) < 0.5) * 1.0
    event = None
    if kind == "logistic":
        y[drug == 1] = outcome
    elif kind == "poisson":
        y = np.where(drug == 1, 0.0, rng.poisson(2, n))
    else:
        y = rng.exponential(size=n) + np.where(drug == outcome, 0, 10)
        event = torch.ones(n).double()
    z = np.ones((n, 0 if kind == "cox" else 1))
    return Site(tensor(y), tensor(x), tensor(z), torch.zeros(n).double(), event)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [20, 80, 500])
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [("logistic", 0), ("logistic", 1), ("poisson", 0), ("cox", 0), ("cox", 1)],
)
def test_there_is_no_maximum_where_a_covariate_separates_some_outcomes(
    kind: str, outcome: int, n: int, seed: int
) -> None:
    model, one = MODELS[kind](), treated(kind, outcome, seed, n)
    assert maximize(model, one, model.start(one)).isnan().all()


def separating(outcome: int) -> pd.DataFrame:
    """Return patients; all treated ones of hospital H1 have one outcome."""
    table = frame()
    table["dose"] = (table["dose"] > 0) * 1.0
    chosen = (table["hospital"] == "H1") & (table["dose"] == 1)
    return table.assign(y=table["y"].mask(chosen, outcome))


@pytest.mark.parametrize("outcome", [0, 1])
@pytest.mark.parametrize("estimator", NEED_EVERY_SITE)
def test_a_site_whose_treated_have_one_outcome_is_named(estimator: str, outcome: int) -> None:
    with pytest.raises(InputError, match=r"site H1.*: dose separates the outcomes"):
        fit(separating(outcome), **ARGUMENTS, estimator=estimator)
    found = fit(separating(outcome), **ARGUMENTS, estimator="pooled")
    assert found.bse.max() < 0.4
    assert found.sites.set_index("site").loc["H1", "dose":].isna().all()


def test_the_column_that_separates_is_named_whichever_part_it_has() -> None:
    table = frame()
    table = table.assign(w=np.where(table["y"] == 1, 1.0, -1.0) * (1 + table["age"] ** 2))
    with pytest.raises(InputError, match="site H0: w separates the outcomes"):
        fit(table, **ARGUMENTS, own_covariates=["w"], estimator="meta")
    counts = frame().assign(dose=(frame()["dose"] > 0) * 1.0)
    counts["y"] = np.where(counts["dose"] == 1, 0, 1 + counts["y"])
    for estimator, where in (("meta", "site H0"), ("pooled", "all sites")):
        with pytest.raises(InputError, match=f"{where}: dose separates the outcomes"):
            fit(counts, **ARGUMENTS, model="poisson", estimator=estimator)


def test_columns_that_separate_together_are_named_by_their_parts() -> None:
    """Of factors coded -1 and 1, the first takes no part."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.choice([-1.0, 1.0], (160, 3)), columns=["a", "b", "c"])
    table["y"] = (table["b"] + table["c"] > 0) * 1.0
    table["hospital"] = np.arange(160) % 2
    with pytest.raises(InputError, match=r"site 0: [bc] separates the outcomes"):
        fit(table, outcome="y", covariates=["a", "b", "c"], site="hospital", estimator="meta")


def test_times_without_an_event_are_refused_in_one_line() -> None:
    table = frame().assign(event=0, t=1.0 + np.arange(len(frame())))
    with pytest.raises(InputError):
        fit(
            table, outcome="t", event="event", covariates=["age", "dose"], site="hospital",
            model="cox", estimator="pooled",
        )  # fmt: skip


@pytest.mark.parametrize("estimator", ["meta", "pooled"])
def test_a_column_that_orders_the_times_of_each_site_is_named(estimator: str) -> None:
    """Times of different sites are in no order."""
    table = frame().assign(dose=(frame()["dose"] > 0) * 1.0, event=1)
    start = table["hospital"].str[1:].astype(int) * 100
    table["t"] = 1 + start + np.abs(table["age"]) + np.where(table["dose"] == 1, 0, 10)
    where = {"meta": "site H0", "pooled": "all sites"}[estimator]
    with pytest.raises(InputError, match=f"{where}: dose separates the outcomes"):
        fit(
            table, outcome="t", event="event", covariates=["age", "dose"], site="hospital",
            model="cox", estimator=estimator,
        )  # fmt: skip


def counts(draw: Callable[[np.random.Generator], Floats], seed: int) -> pd.DataFrame:
    """Return counts whose means are within a factor of thousands of each other."""
    rng = np.random.default_rng(seed)
    x, w = draw(rng), rng.normal(size=800)
    y = rng.poisson(np.exp(x - 0.5 * w))
    return pd.DataFrame({"hospital": np.arange(800) % 4, "y": y, "age": x, "dose": w})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "draw",
    [lambda rng: rng.exponential(size=800), lambda rng: rng.lognormal(size=800).clip(max=12)],
    ids=["exponential", "lognormal"],
)
def test_pooled_finds_the_maximum_from_far_away(
    draw: Callable[[np.random.Generator], Floats], seed: int
) -> None:
    table = counts(draw, seed)
    found = fit(table, **ARGUMENTS, model="poisson", estimator="pooled")
    own = np.eye(4)[table["hospital"]]
    design = np.concatenate([table[["age", "dose"]].to_numpy(), own], 1)
    y = table["y"].to_numpy()
    beta: Floats = np.array(found.params)
    mean = np.exp(design @ np.r_[beta, _intercepts(table, beta)])
    np.testing.assert_allclose(design.T @ (y - mean) / y.sum(), 0, atol=1e-10)
    information = design.T @ (design * mean[:, None])
    np.testing.assert_allclose(found.cov, np.linalg.inv(information)[:2, :2], rtol=1e-8)


def _intercepts(table: pd.DataFrame, beta: Floats) -> Floats:
    """Return each site's intercept of maximum likelihood given β, in closed form."""
    mean = np.exp(table[["age", "dose"]].to_numpy() @ beta)
    by = table.assign(mean=mean).groupby("hospital")[["y", "mean"]].sum()
    intercepts: Floats = np.log((by["y"] / by["mean"]).to_numpy(float))
    return intercepts


@pytest.mark.parametrize("distance", [0.2, 0.5, 1.0])
def test_pooled_is_a_maximum_where_sites_disagree(distance: float) -> None:
    """Between two maxima of the profile likelihood is a saddle, near the mean of the sites."""
    rng, parts = np.random.default_rng(0), []
    for k in range(4):
        x = rng.normal(size=(100, 2)) @ [[0.2, 0.2], [3, -3]]
        y = x @ np.array([1, -1]) * distance * (-1) ** k + rng.normal(size=100)
        parts.append(pd.DataFrame({"hospital": k, "age": x[:, 0], "dose": x[:, 1], "y": y}))
    table = pd.concat(parts, ignore_index=True)

    def minus(beta: Floats) -> float:
        total = 0.0
        for _, own in table.groupby("hospital"):
            r = own["y"] - own[["age", "dose"]].to_numpy() @ beta
            total += len(own) / 2 * np.log(np.square(r - r.mean()).mean())
        return total

    found = fit(table, **ARGUMENTS, model="linear", estimator="pooled")
    near = minimize(minus, found.params.to_numpy(), method="Nelder-Mead", tol=1e-10)
    np.testing.assert_allclose(found.params, near.x, atol=1e-5)
    assert np.linalg.eigvalsh(found.cov)[0] > 0


def test_a_saddle_is_refused() -> None:
    """The tilted score of sites that disagree has roots that are no maximum."""
    rng, parts = np.random.default_rng(0), []
    for k in range(4):
        u, v = rng.normal(size=100) * 0.2, rng.normal(size=100) * 3
        x = np.stack([u + v, u - v], 1)
        y = x @ np.array([0.5, -0.5]) * (1 if k % 2 else -1) + rng.normal(size=100)
        parts.append(pd.DataFrame({"hospital": k, "age": x[:, 0], "dose": x[:, 1], "y": y}))
    with pytest.raises(InputError, match="no solution: choose another estimator or another lead"):
        fit(pd.concat(parts), **ARGUMENTS, model="linear", estimator="tilted_score")


def test_a_step_leads_up_where_the_likelihood_is_not_concave() -> None:
    information = torch.tensor([[1.0, 0.0], [0.0, -2.0]]).double()
    gradient = torch.tensor([1.0, 4.0]).double()
    step = ascent(information, gradient)
    torch.testing.assert_close(step, torch.tensor([1.0, 2.0]).double())
    assert not is_maximum(information)
    assert is_maximum(information.abs())
    assert not is_maximum(torch.ones(2, 2).double())
    units = torch.tensor([1e-6, 1e5]).double()
    scaled = ascent(information * units[:, None] * units, gradient * units)
    torch.testing.assert_close(scaled * units, step)


@pytest.mark.parametrize("mean", [0.0, 5.0, 20.0])
@pytest.mark.parametrize("estimator", ["meta", "pooled"])
def test_a_density_that_is_not_concave_where_it_starts_has_its_maximum(
    mean: float, estimator: str
) -> None:
    """The normal density with own mean and log variance is the linear model."""

    def normal(y: Tensor, x: Tensor, beta: Tensor, own: Tensor) -> Tensor:
        return -((y - x @ beta - own[0]).square() * (-own[1]).exp() + own[1]) / 2

    table = frame().assign(y=lambda t: mean + t["age"] - t["dose"] + 0.1 * t["y"])
    ours = fit(table, **ARGUMENTS, model=Density(log_density_of=normal, own=2), estimator=estimator)
    linear = fit(table, **ARGUMENTS, model="linear", estimator=estimator)
    np.testing.assert_allclose(ours.params, linear.params, atol=1e-8)
    np.testing.assert_allclose(ours.cov, linear.cov, rtol=1e-6)


@pytest.mark.parametrize("kind", ["logistic", "linear", "cox"])
@pytest.mark.parametrize("origin", [2000.0, 1e5])
def test_the_origin_of_a_covariate_does_not_matter(kind: str, origin: float) -> None:
    """As calendar years, which are far from 0 in units of their spread."""
    table = frame(n=400).assign(event=1)
    if kind == "cox":
        table["y"] = 0.1 + np.random.default_rng(1).exponential(np.exp(-table["age"]))
    event: dict[str, Any] = {"event": "event"} if kind == "cox" else {}
    for estimator in ("meta", "pooled"):
        near, far = (
            fit(
                table.assign(age=table["age"] + shift), **ARGUMENTS, **event, model=kind,
                estimator=estimator,
            )
            for shift in (0.0, origin)
        )  # fmt: skip
        np.testing.assert_allclose(far.params, near.params, rtol=1e-5)
        np.testing.assert_allclose(far.bse, near.bse, rtol=1e-4)


def test_outcomes_far_from_0_have_least_squares() -> None:
    table = frame().assign(y=lambda t: 1e6 + t["age"] - t["dose"] + t["y"])
    near = fit(table.assign(y=table["y"] - 1e6), **ARGUMENTS, model="linear", estimator="meta")
    far = fit(table, **ARGUMENTS, model="linear", estimator="meta")
    np.testing.assert_allclose(far.params, near.params, atol=1e-7)


def test_a_site_where_a_covariate_is_constant_has_no_estimate_of_its_own() -> None:
    for value in (0.1, 3.7):
        table = frame()
        table["dose"] = table["dose"].mask(table["hospital"] == "H1", value)
        for model in ("linear", "logistic"):
            own = fit(table, **ARGUMENTS, model=model, estimator="pooled").sites.set_index("site")
            assert own.loc["H1", "age":].isna().all()
            assert own.drop("H1").notna().all(axis=None)


def test_gradient_tracking_has_the_covariance_of_pooled_and_states_what_is_left() -> None:
    sites, model = several(Logistic(), 4), MODELS["linear"]()
    few = several(model, 4, "linear")
    for each in (sites, few):
        pooled = Pooled().estimate(each, centre(4))
        done = GradientTracking().estimate(each, graph("complete", 4))
        torch.testing.assert_close(done.covariance[:1], pooled.covariance, rtol=1e-6, atol=0)
        assert done.step is not None
        assert done.step.max() < 1e-6
        early = GradientTracking(rounds=3).estimate(each, graph("complete", 4))
        away = (early.beta - pooled.beta).abs() / pooled.covariance.diagonal(
            dim1=-2, dim2=-1
        ).sqrt()
        assert early.step is not None
        torch.testing.assert_close(early.step, away.amax(-1), rtol=0.3, atol=0)


def test_a_result_that_has_not_converged_has_a_note() -> None:
    spec = "gradient_tracking:rounds=2"
    found = fit(frame(), **ARGUMENTS, estimator=spec, topology="complete")
    assert any("has not converged" in note for note in found.notes())
    over_a_ring = fit(
        frame(), **ARGUMENTS, estimator="gradient_tracking:rounds=500", topology="ring",
        gossip_rounds=2,
    )  # fmt: skip
    assert over_a_ring.gap > 1e-4  # of the means at the start, not of the last rounds
    assert not fit(frame(), **ARGUMENTS, estimator="pooled").notes()


def test_examples_that_stand_for_few_of_another_site_have_a_note() -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(300, 2)), columns=["age", "dose"])
    table["hospital"] = np.arange(300) % 3
    for rates, few in (([0.0, 0.1, 0.2], False), ([0.0, 2.0, 4.0], True)):
        eta = (table["age"] - table["dose"]) / 2 + np.array(rates)[table["hospital"]]
        found = fit(table.assign(y=rng.poisson(np.exp(eta))), **ARGUMENTS, model="poisson")
        assert (found.effective < 0.05) == few
        assert any("examples for another site" in note for note in found.notes()) == few
    assert fit(frame(), **ARGUMENTS, estimator="pooled").effective == 1


@pytest.mark.parametrize(
    ("n", "distance", "few"), [(15, 0.0, False), (100, 35.0, True)], ids=["small", "far"]
)
def test_the_note_does_not_depend_on_the_size_of_a_site(n: int, distance: float, few: bool) -> None:
    """All weights of a site that is far away round to 0."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(2 * n, 2)), columns=["age", "dose"])
    table["hospital"] = np.arange(2 * n) % 2
    noise = rng.normal(size=2 * n)
    table["y"] = (table["age"] - table["dose"]) / 2 + distance * table["hospital"] + noise
    found = fit(table, **ARGUMENTS, model="linear")
    assert 0 < found.effective <= 1
    assert any("examples for another site" in note for note in found.notes()) == few
