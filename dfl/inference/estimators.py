"""Estimators, `ESTIMATORS`: what sites compute and send, and the estimate of β that comes of it.

Each is a frozen dataclass with `estimate`, a few lines that read like its paper. A site computes
with `sites.each`; only what is handed to `net` crosses between sites. I_j is the efficient
information of site j, its s_ij its efficient scores (`likelihood.efficient`), and sums over j are K
times a mean over the sites.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from dfl.core.options import Count, Positive, require
from dfl.core.registry import Registry
from dfl.inference.exchange import Exchange, Graph
from dfl.inference.likelihood import (
    ROUNDED,
    STEPS,
    ascent,
    bias,
    efficient,
    inverted,
    is_maximum,
    maximize,
    meat,
    settled,
)
from dfl.inference.models import Model, Site
from dfl.inference.sites import Sites, Work

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

ESTIMATORS: Registry[type[Estimator]] = Registry("estimator", "dfl.inference.estimators")
"""Name -> frozen dataclass whose fields are the estimator's options."""


class Estimate(NamedTuple):
    """An estimate, as every site knows it.

    Attributes:
        beta: (..., k, p); k is 1 where all sites have the same, else the sites of this rank.
        covariance: (..., k, p, p).
        step: (..., k), the last step of Newton's method over the network, or a further one, the
            largest of all coefficients, in standard errors; None where there is no such method.
        effective: (..., p), of each site of this rank, the least share of its examples that its
            weights for another site amount to, 1 where it does not lead; None without tilting.
    """

    beta: Tensor
    covariance: Tensor
    step: Tensor | None = None
    effective: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Estimator(ABC):
    """Base class of estimators.

    Attributes:
        covariance: efficient, (sum_j I_j)^-1; or sandwich, with sum_ij s_ij s_ij' between two of
            these, which holds where the model does not, and is sent as well.
    """

    covariance: Literal["efficient", "sandwich"] = "efficient"

    name: ClassVar[str]
    """Its name on the command line."""
    needs_density: ClassVar[bool] = False
    """Whether it tilts, which takes the density of an example."""
    needs_graph: ClassVar[bool] = False
    """Whether its sites have no centre."""
    fitted_parts: ClassVar[int] = 1
    """The parts of a site's examples that need a maximum likelihood estimate each; 0 for none.

    Of k parts, part h has every k-th example from number h on.
    """

    @abstractmethod
    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """Return the estimate of β."""

    def _meat(self, scores: Tensor) -> Tensor:
        """Return what a site adds to the middle of the sandwich, packed; nothing without one."""
        return pack(meat(scores)) if self.covariance == "sandwich" else scores[..., 0, :0]

    def _covariance(self, bread: Tensor, middle: Tensor, count: int | Tensor) -> Tensor:
        """Return the covariance of β.

        Args:
            bread: (..., p, p), the mean of I_j over the sites.
            middle: the mean of `_meat`.
            count: K.
        """
        inverse: Tensor = inverted(bread)
        if self.covariance == "sandwich":
            inverse = inverse @ unpack(middle) @ inverse
        return inverse / count

    def _sums(self, sites: Sites, net: Exchange, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the means over sites of the efficient scores, of I_j, and of `_meat`, packed."""

        def own(site: Site, theta: Tensor) -> Tensor:
            scores, information, _ = efficient(sites.model, site, theta, sites.width)
            return torch.cat([scores.sum(-2), pack(information), self._meat(scores)], -1)

        p = sites.width
        rows = net.mean(sites.each(own, theta), "profile scores and information")
        score, packed, middle = rows.tensor_split((p, p + p * (p + 1) // 2), -1)
        return score, unpack(packed), middle


@ESTIMATORS.register("pooled")
@dataclass(frozen=True, kw_only=True)
class Pooled(Estimator):
    """Maximum likelihood with all examples, by Newton's method on the profile likelihood.

        γ_j = argmax L_j(β, γ),   β <- β + (sum_j I_j)^-1 sum_ij s_ij   until β stays

    It needs no example of another site, but a round per step: it is what the others are measured
    by. A step is halved where the likelihood falls more steeply after it than it rose before it.
    Messages of few bits, and few gossip rounds, keep its steps from converging to 0, and none is
    halved; else there is no estimate where they do not.
    """

    fitted_parts: ClassVar[int] = 0

    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """See `Estimator`."""
        theta = sites.each(lambda site: sites.model.start(site))
        beta = theta.new_zeros(*theta.shape[:-2], 1, sites.width)
        if not sites.model.starts_at_zero:
            beta = net.mean(theta[..., : sites.width], "starting points")
        step, done = torch.zeros_like(beta), torch.zeros(beta.shape[:-1], dtype=torch.bool)
        gain = beta.new_full(done.shape, math.inf)
        for _ in range(STEPS):  # more would end where covariates separate outcomes
            near = profiled(sites, beta, theta)
            score, bread, middle = self._sums(sites, net, near)
            slope = net.count * (score * step).sum(-1)
            far = net.exact & ~done & step.any(-1) & (gain > ROUNDED**2) & ~(slope >= -gain)
            theta = torch.where(far[..., None], theta, near)
            step = torch.where(far[..., None], step / 2, ascent(bread, score))
            beta = torch.where(far[..., None], beta - step, beta + step)
            last, gain = gain, net.count * (score * step).sum(-1).abs()
            gain = torch.where(far, last / 2, gain)
            done = done | (settled(gain, last) & ~far)
            if net.everywhere(bool((done | step.isnan().any(-1)).all())):
                break
        covariance = self._covariance(bread, middle, net.count)
        known = done | (not net.exact)
        beta = torch.where(known[..., None], beta, math.nan)
        return Estimate(beta, covariance, in_errors(step, covariance))


@ESTIMATORS.register("meta")
@dataclass(frozen=True, kw_only=True)
class Meta(Estimator):
    """Meta-analysis with fixed effects: the mean of the sites' estimates by inverse variance.

    β̄ = (sum_j I_j)^-1 sum_j I_j β̂_j
    """

    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """See `Estimator`."""
        return self.average(sites, net, fits(sites))[0]

    def average(self, sites: Sites, net: Exchange, theta: Tensor) -> tuple[Estimate, Tensor]:
        """Return the mean of the sites' own estimates, and that of I_j, (..., p, p)."""

        def own(site: Site, theta: Tensor) -> Tensor:
            scores, information, _ = efficient(sites.model, site, theta, sites.width)
            pull = product(information, theta[..., : sites.width])
            return torch.cat([pull, pack(information), self._meat(scores)], -1)

        p = sites.width
        rows = net.mean(sites.each(own, theta), "estimates and information")
        pull, packed, middle = rows.tensor_split((p, p + p * (p + 1) // 2), -1)
        bread = unpack(packed)
        return Estimate(solve(bread, pull), self._covariance(bread, middle, net.count)), bread


@ESTIMATORS.register("one_shot")
@dataclass(frozen=True, kw_only=True)
class OneShot(Estimator):
    """The average of the sites' estimates, weighted by n_j, each less its bias of order 1/n_j.

    β̄ = sum_j (n_j / N) (β̂_j - b_j) with covariance sum_j (n_j / N)² V_j; b_j is `likelihood.bias`
    and V_j the covariance of β̂_j (the average of Zhang, Duchi, Wainwright 2013, who estimate b_j
    from a subsample).
    """

    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """See `Estimator`."""

        def own(site: Site, theta: Tensor) -> Tensor:
            beta, scores, information = corrected(sites, site, theta)
            covariance = self._covariance(information, self._meat(scores), 1)
            return torch.cat([site.n * beta, pack(covariance * site.n**2)], -1)

        n = sizes(sites, net).mean(-1, keepdim=True)
        rows = net.mean(sites.each(own, fits(sites)), "estimates and covariances")
        total, packed = rows.tensor_split((sites.width,), -1)
        return Estimate(total / n, unpack(packed) / n[..., None] ** 2 / net.count)


@ESTIMATORS.register("debiased")
@dataclass(frozen=True, kw_only=True)
class Debiased(Estimator):
    """The weighted and debiased average (Gu, Chen 2023), which allows K of order N^(2/3).

        β̄ = (sum_jh W_jh)^-1 sum_jh W_jh (β̂_jh - b_jh)   with covariance   (sum_jh W_jh)^-1

    The examples of site j are in two halves h, every other one. β̂_jh and its bias b_jh of order 1/n
    (`likelihood.bias`) come of one half, and W_jh of the other: the inverse of the sandwich
    covariance, or I_jh with covariance=efficient. Weights of the same examples would depend on the
    estimates, which is a bias of the same order.
    """

    covariance: Literal["efficient", "sandwich"] = "sandwich"

    fitted_parts: ClassVar[int] = 2

    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """See `Estimator`."""
        model = sites.model

        def own(site: Site) -> Tensor:
            parts = [site.every_other(start) for start in (0, 1)]
            found = [
                self._half(sites, part, maximize(model, part, model.start(part))) for part in parts
            ]
            (one, weight_one), (other, weight_other) = found
            pull = product(weight_other, one) + product(weight_one, other)
            return torch.cat([pull, pack(weight_one + weight_other)], -1)

        rows = net.mean(sites.each(own), "debiased estimates and weights")
        pull, packed = rows.tensor_split((sites.width,), -1)
        bread = unpack(packed)
        return Estimate(solve(bread, pull), inverted(bread) / net.count)

    def _half(self, sites: Sites, site: Site, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the debiased estimate of some examples, and the inverse of its covariance."""
        beta, scores, information = corrected(sites, site, theta)
        return beta, inverted(self._covariance(information, self._meat(scores), 1))


@dataclass(frozen=True, kw_only=True)
class Led(Estimator):
    """Base class of estimators in which some sites, the leads, solve an equation with their data.

    Attributes:
        iterations: T; the next one starts at the solution of the last.
        leads: the numbers of the leads, from 0 in the order of the sites, whose solutions are
            averaged; every site where it is None, as only an object can have it.
    """

    iterations: Count = 1
    leads: tuple[int, ...] | None = (0,)

    def leading(self, net: Exchange) -> list[int]:
        """Return the leads.

        Raises:
            InputError: there is no such site.
        """
        known = range(net.count)
        chosen = sorted(set(known if self.leads is None else self.leads))
        good = all(k in known for k in chosen) and bool(chosen)
        require(good, f"--estimator {self.name}: leads", f"from 0 to {net.count - 1}", self.leads)
        return chosen

    def _synthesis(
        self, sites: Sites, net: Exchange, work: Work, *tables: Tensor
    ) -> Sequence[Tensor]:
        """Return the mean over leads of their solution, and of their information, packed.

        Args:
            sites, net: all sites.
            work: what a lead computes: its solution (..., p) and its information, in one row.
            tables: what it knows, as for `Sites.each`.
        """
        rows = self._of_leads(sites, net, work, *tables)
        mean = net.mean(rows, "solutions of the leads", self.leading(net))
        return mean.tensor_split((sites.width,), -1)

    def _of_leads(
        self, sites: Sites, net: Exchange, work: Work, *tables: Tensor, otherwise: float = 0.0
    ) -> Tensor:
        """Return what the leads compute, as `Sites.each`, and a number for the other sites."""
        places = [k for k, site in enumerate(net.here) if site in self.leading(net)]
        chosen = torch.tensor(places, dtype=torch.int64)
        rows = sites.some(places).each(work, *(at_sites(table, chosen) for table in tables))
        everyone = rows.new_full((*rows.shape[:-2], len(net.here), rows.shape[-1]), otherwise)
        everyone[..., chosen, :] = rows
        return everyone


@ESTIMATORS.register("surrogate")
@dataclass(frozen=True, kw_only=True)
class Surrogate(Led):
    """The surrogate likelihood of sites that share all parameters (Jordan, Lee, Yang 2019; Wang et
    al. 2017).

        θ = argmax L_1(θ) + (∇L_N(θ̄) - ∇L_1(θ̄))'θ  [ + (θ - θ̄)'(∇²L_N(θ̄) - ∇²L_1(θ̄))(θ - θ̄) / 2 ]

    L are means of log f, of the lead and of all; θ = (β, γ) is taken for common to all sites, as is
    wrong where γ_j differ. The start θ̄ is the meta-analysis of θ.

    Attributes:
        second_order: whether the term in brackets is there, for which sites send Hessians.
    """

    second_order: bool = False

    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """See `Estimator`."""
        theta = fits(sites)
        everything = sites.with_common(theta.shape[-1])
        n = sizes(sites, net).mean(-1, keepdim=True)
        found, _ = Meta().average(everything, net, theta)
        for _ in range(self.iterations):
            found = self._iterate(everything, net, n, found.beta)
        p = sites.width
        return Estimate(found.beta[..., :p], found.covariance[..., :p, :p])

    def _iterate(self, sites: Sites, net: Exchange, n: Tensor, start: Tensor) -> Estimate:
        """Return the estimate of θ from θ̄; n is N / K."""
        model, d = sites.model, sites.width
        packs = d * (d + 1) // 2 * self.second_order

        def own(site: Site, theta: Tensor) -> Tensor:
            score = model.score(site, theta)
            hessian = pack(model.hessian(site, theta))[..., :packs]
            return torch.cat([score.sum(-2), hessian, self._meat(score)], -1)

        what = "scores and Hessians" if self.second_order else "scores"
        rows = net.mean(sites.each(own, start), what)
        score, hessian, middle = rows.tensor_split((d, d + packs), -1)

        def solve_own(site: Site, start: Tensor, score: Tensor, hessian: Tensor) -> Tensor:
            before = model.score(site, start).mean(-2)
            extra = start.new_zeros(*start.shape, d)
            if self.second_order:
                extra = model.hessian(site, start) / site.n - unpack(hessian)

            def equation(theta: Tensor) -> tuple[Tensor, Tensor]:
                value = model.score(site, theta).mean(-2) - before + score
                value = value - product(extra, theta - start)
                return value, extra - model.hessian(site, theta) / site.n

            return maxima(packed_root(equation, start), d)

        found = self._synthesis(sites, net, solve_own, start, score / n, hessian / n)
        bread = unpack(found[1]) * n[..., None]
        return Estimate(found[0], self._covariance(bread, middle, net.count))


@ESTIMATORS.register("tilted_score")
@dataclass(frozen=True, kw_only=True)
class TiltedScore(Led):
    """The surrogate efficient score with density-ratio tilting (Duan, Ning, Chen 2022).

        S_N = (1/N) sum_ij s_ij(β̄, γ_j)
        w_ij = f(x_i; β̄, γ_j) / f(x_i; β̄, γ_1)   over the examples i of the lead, site 1
        U(β) = sum_j (n_j / N) (1/n_1) sum_i w_ij (∇_β - A_j ∇_γ) log f(x_i; β, γ_j)
        U(β̃) - U(β̄) + S_N = 0

    A_j is that of `likelihood.efficient` at β̄ with weights w_ij: the lead's examples, tilted, stand
    for those of site j. The start β̄ is the meta-analysis; then β̄ <- β̃, T times. As γ_j stay while
    β moves, it depends on the origin of the covariates: it should be among their values.

    Attributes:
        iterations: T.
        profile: whether γ_j maximizes the likelihood of site j at β̄; else it is its own estimate.
    """

    iterations: Count = 2
    profile: bool = True

    needs_density: ClassVar[bool] = True

    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """See `Estimator`."""
        theta, n = fits(sites), sizes(sites, net)
        found, _ = Meta().average(sites, net, theta)
        for _ in range(self.iterations):
            theta = (profiled if self.profile else at)(sites, found.beta, theta)
            found = self._iterate(sites, net, n, found.beta, theta)
        return found

    def _iterate(
        self, sites: Sites, net: Exchange, n: Tensor, start: Tensor, theta: Tensor
    ) -> Estimate:
        """Return the estimate from n_j, β̄ and θ̄_j = (β̄, γ_j)."""
        p = sites.width

        def own(site: Site, theta: Tensor) -> Tensor:
            scores = efficient(sites.model, site, theta, p).scores
            return torch.cat([scores.sum(-2), self._meat(scores)], -1)

        score, middle = net.mean(sites.each(own, theta), "efficient scores").tensor_split((p,), -1)
        table = net.table(theta[..., p:], "nuisance parameters", self.leading(net))
        mean = n.mean(-1, keepdim=True)

        def work(site: Site, start: Tensor, score: Tensor, own: Tensor, *every: Tensor) -> Tensor:
            return packed_root(tilted(sites, site, start, own, every, score), start)

        def effective(site: Site, start: Tensor, own: Tensor, table: Tensor) -> Tensor:
            gamma = table.unflatten(-1, (net.count, own.shape[-1]))
            here = beside(start, own[..., None, :])
            logs = log_ratios(sites.model, site.alone(), beside(start, gamma), here)
            w = (logs - logs.amax(-1, keepdim=True)).exp()
            share = w.sum(-1).square() / w.square().sum(-1) / site.n
            return share.amin(-1, keepdim=True)

        found = self._synthesis(sites, net, work, start, score / mean, theta[..., p:], table, n)
        bread = unpack(found[1]) * mean[..., None]
        few = self._of_leads(sites, net, effective, start, theta[..., p:], table, otherwise=1.0)
        return Estimate(found[0], self._covariance(bread, middle, net.count), None, few[..., 0])


@ESTIMATORS.register("tilted_score_graph")
@dataclass(frozen=True, kw_only=True)
class TiltedScoreGraph(TiltedScore):
    """`tilted_score` without a centre or a lead: every site leads, over a graph.

    The means over sites are consensus, the table of (γ_j, n_j) is flooded, and every site solves
    with its own examples as the lead's; the mean of their solutions is consensus as well.
    """

    leads: tuple[int, ...] | None = None

    needs_graph: ClassVar[bool] = True


@ESTIMATORS.register("gradient_tracking")
@dataclass(frozen=True, kw_only=True)
class GradientTracking(Estimator):
    """Gradient tracking on the profile likelihood: it reaches the pooled estimate, over a graph.

        u_j <- u_j + g_j(β_j) - g_j(previous β_j),   β_j <- β_j + η M_j u_j,   average both

    g_j is the sum of the efficient scores of site j at its profiled γ_j, u_j follows the mean of
    all g_j, and M_j is the inverse of the mean information at the start, the meta-analysis (Di
    Lorenzo, Scutari 2016; here with both averaged after the step). The covariance is that of
    `pooled` at the last β_j, by one mean more, which shows as well how far the estimate is from
    convergence.

    Attributes:
        step: η.
        rounds: gossip rounds.
    """

    step: Positive = 0.2
    rounds: Count = 500

    needs_graph: ClassVar[bool] = True

    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """See `Estimator`."""
        assert isinstance(net, Graph)
        p, theta = sites.width, fits(sites)
        start, information = Meta().average(sites, net, theta)
        inverse = inverted(information)
        beta = start.beta.expand_as(theta[..., :p])
        last = torch.zeros_like(beta)

        def gradient(beta: Tensor) -> Tensor:
            nonlocal theta
            theta = profiled(sites, beta, theta)
            return sites.each(
                lambda site, own: efficient(sites.model, site, own, p).scores.sum(-2), theta
            )

        def local(rows: Tensor) -> Tensor:
            nonlocal last
            beta, tracked = rows.split(p, -1)
            new = gradient(beta)
            tracked, last = tracked + new - last, new
            return torch.cat([beta + self.step * product(inverse, tracked), tracked], -1)

        begin = torch.cat([beta, last], -1)
        rows = net.gossip(begin, local, self.rounds, "estimates and tracked scores")
        beta = rows[..., :p]
        score, bread, middle = self._sums(sites, net, profiled(sites, beta, theta))
        covariance = self._covariance(bread, middle, net.count)
        return Estimate(beta, covariance, in_errors(solve(bread, score), covariance))


def in_errors(step: Tensor, covariance: Tensor) -> Tensor:
    """Return the largest coordinate of a step (..., p) in standard errors, (...)."""
    return (step.abs() / covariance.diagonal(dim1=-2, dim2=-1).sqrt()).amax(-1)


def fits(sites: Sites) -> Tensor:
    """Return the maximum likelihood estimate θ̂_j of every site, (..., p, d)."""
    model = sites.model
    return sites.each(lambda site: maximize(model, site, model.start(site)))


def sizes(sites: Sites, net: Exchange) -> Tensor:
    """Return n_j of every site, as each knows it, (..., 1 or p, K)."""
    n = sites.each(lambda site: site.x.new_full((*site.y.shape[:-1], 1), site.n))
    return net.table(n, "sizes", range(net.count))


def profiled(sites: Sites, beta: Tensor, theta: Tensor) -> Tensor:
    """Return (β, γ_j), γ_j maximizing the likelihood of site j at β, (..., p, d).

    The search begins where the tangent of γ_j at another β leads, so that covariates far from 0, as
    calendar years, do not take it far from the maximum.

    Args:
        sites: the sites.
        beta: (..., 1 or p, p).
        theta: (..., p, d), the other β and its γ_j.
    """
    model, p = sites.model, sites.width

    def own(site: Site, theta: Tensor, beta: Tensor) -> Tensor:
        slope = efficient(model, site, theta, p).slope
        gamma = theta[..., p:] - product(slope.mT, beta - theta[..., :p])
        return maximize(model, site, torch.cat([beta.expand_as(theta[..., :p]), gamma], -1), p)

    return sites.each(own, theta, beta)


def at(sites: Sites, beta: Tensor, theta: Tensor) -> Tensor:
    """Return θ (..., p, d) with another β."""
    p = sites.width
    return torch.cat([beta.expand(*theta.shape[:-1], p), theta[..., p:]], -1)


def corrected(sites: Sites, site: Site, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return β̂_j less its bias, and efficient scores and information at θ̂_j."""
    scores, information, _ = efficient(sites.model, site, theta, sites.width)
    beta = (theta - bias(sites.model, site, theta))[..., : sites.width]
    return beta, scores, information


Equation = Callable[["Tensor"], tuple["Tensor", "Tensor"]]
"""equation(point) returns the value (..., p), and minus its derivative (..., p, p)."""


def tilted(
    sites: Sites, site: Site, start: Tensor, own: Tensor, every: Sequence[Tensor], score: Tensor
) -> Equation:
    """Return the equation U(β) - U(β̄) + S_N = 0 of a lead; see `TiltedScore`.

    Args:
        sites: for the model and p.
        site: the lead's examples.
        start: (..., p), β̄.
        own: (..., q), the lead's γ.
        every: (..., K q) and (..., K), γ_j and n_j of every site.
        score: (..., p), S_N.
    """
    model, p = sites.model, sites.width
    lead = site.alone()
    table, n = every
    gamma = table.unflatten(-1, (n.shape[-1], own.shape[-1]))
    share = n / n.sum(-1, keepdim=True)  # n_j / N

    there = beside(start, gamma)
    weights = ratios(model, lead, there, beside(start, own[..., None, :]))
    slope = efficient(model, lead, there, p, weights).slope

    def total(beta: Tensor) -> tuple[Tensor, Tensor]:
        theta = beside(beta, gamma)
        each = torch.einsum("...n,...nd->...d", weights, model.score(lead, theta)) / site.n
        hessian = model.hessian(lead, theta, weights)[..., :p] / site.n
        value = each[..., :p] - product(slope, each[..., p:])
        steep = slope @ hessian[..., p:, :] - hessian[..., :p, :]
        return (
            torch.einsum("...k,...kp->...p", share, value),
            torch.einsum("...k,...kpr->...pr", share, steep),
        )

    before = total(start)[0]

    def equation(beta: Tensor) -> tuple[Tensor, Tensor]:
        value, steep = total(beta)
        return value - before + score, steep

    return equation


def beside(beta: Tensor, gamma: Tensor) -> Tensor:
    """Return θ (..., K, p + q) of one β (..., p) and the γ_j of K sites, (..., K, q)."""
    shape = torch.broadcast_shapes((*beta.shape[:-1], 1), gamma.shape[:-1])
    at_each = beta[..., None, :].expand(*shape, beta.shape[-1])
    return torch.cat([at_each, gamma.expand(*shape, -1)], -1)


def ratios(model: Model, site: Site, theta: Tensor, own: Tensor) -> Tensor:
    """Return the density ratios w_ij = f(x_i; θ_j) / f(x_i; own θ), (..., K, n)."""
    return log_ratios(model, site, theta, own).exp()


def log_ratios(model: Model, site: Site, theta: Tensor, own: Tensor) -> Tensor:
    """Return the logarithms of `ratios`."""
    return model.log_density(site, theta) - model.log_density(site, own)


def packed_root(equation: Equation, point: Tensor) -> Tensor:
    """Return the root (..., p) that Newton's method finds, and the packed derivative there.

    They are NaN where it does not converge.
    """
    point = point.expand_as(equation(point)[0])
    done = torch.zeros(point.shape[:-1], dtype=torch.bool)
    gain = point.new_full(done.shape, math.inf)
    for _ in range(STEPS):
        value, steep = equation(point)
        step = solve(steep, value)
        point = torch.where(done[..., None], point, point + step)
        last, gain = gain, (step * value).sum(-1).abs()
        done = done | settled(gain, last)
        if (done | step.isnan().any(-1)).all():
            break
    point = torch.where(done[..., None], point, math.nan)
    return torch.cat([point, pack(equation(point)[1])], -1)


def maxima(roots: Tensor, p: int) -> Tensor:
    """Return what `packed_root` returns of a likelihood's score in p parameters; NaN where the root
    is no maximum, so that the negative Hessian is not positive definite.
    """
    return torch.where(is_maximum(unpack(roots[..., p:]))[..., None], roots, math.nan)


def solve(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix^-1 vector over leading axes; infinite or NaN where it is singular."""
    found: Tensor = torch.linalg.solve_ex(matrix, vector)[0]
    return found


def product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix vector over leading axes."""
    return (matrix @ vector[..., None])[..., 0]


def pack(matrix: Tensor) -> Tensor:
    """Return the upper triangle of symmetric matrices (..., p, p), (..., p (p + 1) / 2)."""
    row, column = torch.triu_indices(*matrix.shape[-2:]).unbind()
    return (matrix[..., row, column] + matrix[..., column, row]) / 2


def unpack(packed: Tensor) -> Tensor:
    """Return the inverse of `pack`."""
    p = int((8 * packed.shape[-1] + 1) ** 0.5 - 1) // 2
    row, column = torch.triu_indices(p, p).unbind()
    matrix = packed.new_zeros(*packed.shape[:-1], p, p)
    matrix[..., row, column] = packed
    matrix[..., column, row] = packed
    return matrix


def at_sites(table: Tensor, places: Tensor) -> Tensor:
    """Return the rows of some sites; a table of one row is that of all sites."""
    return table if table.shape[-2] == 1 else table.index_select(-2, places)
