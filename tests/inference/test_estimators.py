"""Identities of the estimators, with a centre and over graphs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from dfl.compression.quantize import Quantize
from dfl.environment.faults import LinkLoss
from dfl.inference.estimators import (
    ESTIMATORS,
    Estimator,
    GradientTracking,
    Meta,
    Pooled,
    Surrogate,
    TiltedScore,
    TiltedScoreGraph,
    fits,
    profiled,
    ratios,
    sizes,
)
from dfl.inference.exchange import Revealed
from dfl.inference.likelihood import maximize
from dfl.inference.models import MODELS, Logistic, Site
from dfl.inference.sites import Stacked
from tests.support.studies import centre, graph, separate, several, site

WITH_CENTRE = [name for name, each in ESTIMATORS.items() if not each.needs_graph]


@pytest.mark.parametrize("name", WITH_CENTRE)
def test_one_site_has_its_own_maximum_likelihood_estimate(name: str) -> None:
    one = separate(Logistic(), [site(0, n=2000)])
    mle = maximize(one.model, one.sites[0], one.model.start(one.sites[0]))[:2]
    found = ESTIMATORS[name]().estimate(one, centre(1)).beta[0]
    order_1_n = 0.02 if name in ("one_shot", "debiased") else 1e-9  # these two correct its bias
    torch.testing.assert_close(found, mle, rtol=0, atol=order_1_n)


@pytest.mark.parametrize("kind", ["logistic", "linear", "cox"])
def test_pooled_is_the_fit_of_all_examples(kind: str) -> None:
    model = MODELS[kind]()
    sites = several(model, 4, kind)
    found = Pooled().estimate(sites, centre(4))
    if kind == "logistic":
        fitted = (
            pytest.importorskip("statsmodels.api")
            .Logit(*stacked(sites.sites))
            .fit(disp=0, tol=1e-12)
        )
        beta, errors = fitted.params[:2], fitted.bse[:2]
    elif kind == "cox":
        beta, errors = stratified_cox(sites.sites)
    else:  # at the maximum, the efficient scores of all sites add up to 0
        theta = profiled(sites, found.beta, fits(sites))
        total = sites.each(lambda s, t: model.score(s, t).sum(-2), theta).sum(0)[:2]
        torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-8)
        return
    np.testing.assert_allclose(
        found.beta[0].numpy(), beta, atol=1e-8 if kind == "logistic" else 1e-6
    )
    np.testing.assert_allclose(errors_of(found.covariance), errors, rtol=1e-6)


def stacked(sites: Sequence[Site]) -> tuple[np.ndarray, np.ndarray]:
    """Return outcomes, and covariates with a column per site."""
    own = np.repeat(np.eye(len(sites)), [s.n for s in sites], axis=0)
    x = torch.cat([s.x for s in sites]).numpy()
    return torch.cat([s.y for s in sites]).numpy(), np.concatenate([x, own], 1)


def stratified_cox(sites: Sequence[Site]) -> tuple[np.ndarray, np.ndarray]:
    phreg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    y, x = stacked(sites)
    event = torch.cat([s.event for s in sites if s.event is not None]).numpy()
    strata = np.repeat(np.arange(len(sites)), [s.n for s in sites])
    fitted = phreg(y, x[:, :2], event, strata=strata, ties="breslow").fit(tol=1e-12)
    return fitted.params, fitted.bse


def errors_of(covariance: torch.Tensor) -> np.ndarray:
    return covariance[0].diagonal().sqrt().numpy()


def test_with_equal_nuisances_every_weight_is_1() -> None:
    one = site(0)
    theta = torch.tensor([[0.9, -0.8, 0.3]] * 5, dtype=torch.float64)
    weights = ratios(Logistic(), one.alone(), theta, theta[:1])
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=0, atol=1e-14)


@pytest.mark.parametrize("iterations", [1, 3])
def test_without_nuisances_it_is_the_surrogate_likelihood(iterations: int) -> None:
    alike = [
        replace(site(k, 80 + 10 * k), z=torch.zeros(80 + 10 * k, 0).double()) for k in range(5)
    ]
    sites = separate(Logistic(), alike)
    tilted, surrogate = (
        each(iterations=iterations).estimate(sites, centre(5)) for each in (TiltedScore, Surrogate)
    )
    torch.testing.assert_close(tilted.beta, surrogate.beta, rtol=0, atol=1e-10)
    torch.testing.assert_close(tilted.covariance, surrogate.covariance, rtol=1e-8, atol=0)


def test_the_tilted_mean_of_the_nuisance_score_is_0_at_the_lead() -> None:
    """Where the ratio is inverted, or left out, it is not."""
    n, model = 20_000, Logistic()
    lead, own, other = site(0, n, -1.0), -1.0, 1.5
    theta, here = (torch.tensor([[1.0, -1.0, g]], dtype=torch.float64) for g in (other, own))
    w = ratios(model, lead.alone(), theta, here)
    score = model.score(lead.alone(), theta)[..., 2]
    assert abs((w * score).mean().item()) < 5 / np.sqrt(n)
    assert abs((score / w).mean().item()) > 100 / np.sqrt(n)
    assert abs(score.mean().item()) > 20 / np.sqrt(n)
    assert abs(w.mean().item() - 1) < 10 / np.sqrt(n)


def test_iterations_and_profiled_nuisances_lead_to_the_pooled_estimate() -> None:
    sites = several(Logistic())
    pooled = Pooled().estimate(sites, centre()).beta
    away = [
        (TiltedScore(iterations=t).estimate(sites, centre()).beta - pooled).abs().max().item()
        for t in (1, 2, 4)
    ]
    meta = (Meta().estimate(sites, centre()).beta - pooled).abs().max().item()
    assert meta > 3 * away[0] > 9 * away[1] > 27 * away[2]


@pytest.mark.parametrize("name", WITH_CENTRE)
def test_repetitions_of_a_study_are_what_each_is_alone(name: str) -> None:
    sites = [[site(10 * r + k, 80) for k in range(3)] for r in range(2)]
    names = ("y", "x", "z", "offset")
    every = Site(
        *(torch.stack([torch.stack([getattr(s, n) for s in one]) for one in sites]) for n in names)
    )
    together = ESTIMATORS[name]().estimate(Stacked(Logistic(), 2, every), centre(3))
    for r, one in enumerate(sites):
        alone = ESTIMATORS[name]().estimate(separate(Logistic(), one), centre(3))
        torch.testing.assert_close(together.beta[r], alone.beta, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(together.covariance[r], alone.covariance, rtol=1e-8, atol=0)


@pytest.mark.parametrize("estimator", [Pooled(), Meta(), TiltedScore(leads=None)])
@pytest.mark.parametrize(("topology", "count"), [("base_graph", 6), ("one_peer_exponential", 8)])
def test_over_an_exact_sequence_of_graphs_all_peers_equal_the_server_form(
    estimator: Estimator, topology: str, count: int
) -> None:
    sites, net = several(Logistic(), count), graph(topology, count)
    found = estimator.estimate(sites, net)
    server = estimator.estimate(sites, centre(count))
    assert found.beta.shape == (count, 2)
    torch.testing.assert_close(found.beta, server.beta.expand(count, 2), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        found.covariance, server.covariance.expand(count, 2, 2), rtol=1e-11, atol=0
    )
    period = len(net.network.schedule.weights)
    assert all(
        each.rounds % period == 0
        for what, each in net.revealed.items()
        if what not in ("sizes", "nuisance parameters")
    )


def test_over_a_ring_the_gap_falls_at_the_rate_of_the_spectral_gap() -> None:
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gaps = []
    for rounds in (20, 40):
        net = graph("ring")
        net.rounds = rounds
        net.mean(rows, "rows")
        gaps.append(net.gap)
    rate = (1 + 2 * np.cos(2 * np.pi / 8)) / 3  # the second largest eigenvalue of W
    np.testing.assert_allclose((gaps[1] / gaps[0]) ** (1 / 20), rate, rtol=1e-3)


@pytest.mark.parametrize("topology", ["complete", "ring", "one_peer_exponential"])
def test_consensus_reaches_the_mean_where_30_percent_of_messages_are_lost(topology: str) -> None:
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net = graph(topology, faults=(LinkLoss(p=0.3),))
    found = net.mean(rows, "rows")
    torch.testing.assert_close(found, rows.mean(0, keepdim=True).expand(8, 3), rtol=0, atol=1e-10)
    assert net.network.traffic.lost > 0
    assert net.table(rows, "table", range(8)).shape == (8, 24)
    torch.testing.assert_close(net.table(rows, "table", range(8))[5], rows.flatten())


def test_a_repetition_without_estimates_keeps_no_other_from_agreeing() -> None:
    rows = torch.randn(2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[1, 2] = float("nan")
    net = graph("ring")
    found = net.mean(rows, "rows")
    torch.testing.assert_close(found[0], rows[0].mean(0).expand(8, 3), rtol=0, atol=1e-12)
    assert found[1].isnan().any()


def test_consensus_reaches_the_mean_with_8_bits() -> None:
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    net, before = graph("ring", compressor=Quantize(bits=8)), rows.clone()
    found = net.mean(rows, "rows")
    assert torch.equal(rows, before)
    torch.testing.assert_close(found, rows.mean(0, keepdim=True).expand(8, 3), rtol=0, atol=1e-10)
    rounds = net.revealed["rows"].rounds
    assert net.network.traffic.payload.tolist() == [rounds * 2 * (4 + 3)] * 8  # to two neighbours


def test_a_centre_asks_again_for_what_is_lost() -> None:
    sites = several(Logistic())
    lossy = centre(faults=(LinkLoss(p=0.3),))
    found, exact = (TiltedScore().estimate(sites, net) for net in (lossy, centre()))
    assert torch.equal(found.beta, exact.beta)
    assert lossy.network.traffic.lost > 0


def test_gradient_tracking_reaches_the_pooled_estimate_over_a_ring() -> None:
    sites = several(Logistic(), 6)
    pooled = Pooled().estimate(sites, centre(6)).beta
    net = graph("ring", 6)
    found = GradientTracking(rounds=100).estimate(sites, net).beta
    torch.testing.assert_close(found, pooled.expand(6, 2), rtol=0, atol=1e-7)
    assert net.gap < 1e-6  # of estimates; the tracked scores go to 0


def test_gradient_tracking_has_the_same_estimate_with_another_covariance() -> None:
    """The outcomes have 20 times the variance of the model, so the sandwich is some 20 times the
    inverse information, and steps that are as much larger would diverge.
    """
    sites = several(MODELS["poisson"](), 6, "poisson")
    wide = replace(sites, sites=[replace(each, y=20 * each.y) for each in sites.sites])
    one = GradientTracking(rounds=100).estimate(wide, graph("ring", 6))
    other = GradientTracking(rounds=100, covariance="sandwich").estimate(wide, graph("ring", 6))
    pooled = Pooled().estimate(wide, centre(6)).beta
    torch.testing.assert_close(other.beta, pooled.expand(6, 2), rtol=0, atol=1e-6)
    assert torch.equal(one.beta, other.beta)
    wider, narrower = (each.covariance.diagonal(dim1=1, dim2=2) for each in (other, one))
    assert (wider > 10 * narrower).all()


def test_bytes_are_those_of_the_numbers_that_are_revealed() -> None:
    sites, net = several(Logistic(), 4), centre(4)
    TiltedScore(iterations=2).estimate(sites, net)
    assert net.revealed == {
        "sizes": Revealed(1, 1, 1, 4 * 8),
        "estimates and information": Revealed(2 + 3, 1, 1, 4 * 5 * 8),
        "efficient scores": Revealed(2, 2, 2, 4 * 2 * 8 * 2),
        "nuisance parameters": Revealed(1, 2, 2, 4 * 8 * 2),
        "solutions of the leads": Revealed(2 + 3, 2, 2, 5 * 8 * 2),  # only the lead sends one
    }
    assert net.network.traffic.payload.tolist() == [8 * 22, *[8 * 12] * 3]


def test_sizes_and_nuisances_are_exact_in_messages_of_few_bits() -> None:
    sites, net = several(Logistic()), centre(compressor=Quantize(bits=4))
    assert sizes(sites, net)[0].tolist() == [s.n for s in sites.sites]
    theta = fits(sites)
    assert torch.equal(net.table(theta[:, 2:], "nuisance parameters", [0])[0], theta[:, 2])
    assert net.network.traffic.payload.tolist() == [2 * 8] * 8


@pytest.mark.parametrize("name", ["pooled", "tilted_score"])
@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_estimates_follow_the_unit_of_the_outcome(name: str, unit: float) -> None:
    sites = several(MODELS["linear"](), 4, "linear")
    scaled = replace(sites, sites=[replace(s, y=s.y * unit) for s in sites.sites])
    one, other = (ESTIMATORS[name]().estimate(each, centre(4)) for each in (sites, scaled))
    torch.testing.assert_close(other.beta, unit * one.beta, rtol=1e-6, atol=0)
    torch.testing.assert_close(other.covariance, unit**2 * one.covariance, rtol=1e-6, atol=0)


@pytest.mark.parametrize("origin", [-2000.0, 2000.0])
def test_the_pooled_estimate_does_not_depend_on_the_origin_of_the_covariates(origin: float) -> None:
    sites = several(Logistic(), 4)
    moved = replace(sites, sites=[replace(s, x=s.x + origin) for s in sites.sites])
    one, other = (Pooled().estimate(each, centre(4)) for each in (sites, moved))
    torch.testing.assert_close(other.beta, one.beta, rtol=1e-6, atol=0)
    torch.testing.assert_close(other.covariance, one.covariance, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["pooled", "tilted_score"])
@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_estimates_follow_the_unit_of_the_covariates(name: str, unit: float) -> None:
    sites = several(Logistic(), 4)
    scaled = replace(sites, sites=[replace(s, x=s.x * unit) for s in sites.sites])
    one, other = (ESTIMATORS[name]().estimate(each, centre(4)) for each in (sites, scaled))
    torch.testing.assert_close(other.beta, one.beta / unit, rtol=1e-6, atol=0)


def test_a_graph_form_needs_no_lead_and_agrees() -> None:
    sites, net = several(Logistic(), 6), graph("ring", 6)
    found = TiltedScoreGraph().estimate(sites, net).beta
    pooled = Pooled().estimate(sites, centre(6)).beta
    assert (found - found[0]).abs().max() < 1e-11
    assert (found[0] - pooled).abs().max() < 1e-3


@pytest.mark.parametrize("name", [name for name in WITH_CENTRE if name != "debiased"])
def test_the_sandwich_is_near_the_efficient_covariance_where_the_model_holds(name: str) -> None:
    sites = separate(Logistic(), [site(k, 2000) for k in range(3)])
    one, other = (
        ESTIMATORS[name](covariance=kind).estimate(sites, centre(3)).covariance
        for kind in ("efficient", "sandwich")
    )
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=0.15, atol=1e-5)
