"""Models, `MODELS`: the log density of an example, its score and its Hessian, at every site.

A site has θ = (β, γ): β (p,) is common to all sites, and γ (q,) is the site's own. Every function
takes a `Site` and θ with any leading axes that broadcast, as repetitions and sites, and computes in
float64. To add a model, write a frozen dataclass and decorate it with `@MODELS.register("name")`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, ClassVar

from dfl.core.errors import InputError
from dfl.core.options import require
from dfl.core.parse import shown
from dfl.core.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
else:
    from dfl.core.lazy import torch

MODELS: Registry[type[Model]] = Registry("model", "dfl.inference.models")
"""Name -> frozen dataclass whose fields are the model's options."""

ROUNDING = 1e-13
"""The rounding of a variance that is a difference of two numbers, relative to the first."""

LogDensity = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""log_density(y, x, beta, gamma) of one example: y (), x (p,), beta (p,) and gamma (q,) give ()."""


@dataclass(frozen=True)
class Site:
    """The examples of a site, float64.

    Attributes:
        y: (..., n) the outcomes; times, where there are events.
        x: (..., n, p) the covariates whose coefficients are common to all sites.
        z: (..., n, q') those whose coefficients are the site's own; the intercept is a column of 1.
        offset: (..., n) a known part of the linear predictor.
        event: (..., n) 1 where the time is that of an event, 0 where it is censored; None where
            outcomes are no times.
    """

    y: Tensor
    x: Tensor
    z: Tensor
    offset: Tensor
    event: Tensor | None = None

    @property
    def n(self) -> int:
        """The examples of a site."""
        return self.y.shape[-1]

    @property
    def p(self) -> int:
        """The common coefficients."""
        return self.x.shape[-1]

    @cached_property
    def design(self) -> Tensor:
        """All covariates, (..., n, p + q')."""
        return torch.cat([self.x, self.z], -1)

    def map(self, change: Callable[[Tensor], Tensor]) -> Site:
        """Return a site whose tensors are changed, each by itself."""
        event = None if self.event is None else change(self.event)
        return Site(change(self.y), change(self.x), change(self.z), change(self.offset), event)

    def with_one_intercept(self) -> Site:
        """Return the site with all coefficients common to all sites."""
        return replace(self, x=self.design, z=self.z[..., :0])

    def every_other(self, start: int) -> Site:
        """Return a site with every other example, from number `start` on."""
        event = None if self.event is None else self.event[..., start::2]
        return Site(
            self.y[..., start::2],
            self.x[..., start::2, :],
            self.z[..., start::2, :],
            self.offset[..., start::2],
            event,
        )

    def alone(self) -> Site:
        """Return the site with an axis of 1 before its examples, for a θ of every other site."""
        event = None if self.event is None else self.event[..., None, :]
        return Site(
            self.y[..., None, :],
            self.x[..., None, :, :],
            self.z[..., None, :, :],
            self.offset[..., None, :],
            event,
        )


class Model(ABC):
    """Base class of models.

    Attributes:
        has_density: whether there is a density of an example, which tilting needs.
        has_predictor: whether a linear predictor takes coefficients of a site's own and an offset.
        timed: whether outcomes are times of events.
        starts_at_zero: whether `start` is 0 for β, so that no site needs to send its own.
        outcomes: a phrase for the outcomes that it takes, for messages.
    """

    has_density: ClassVar[bool] = True
    has_predictor: ClassVar[bool] = True
    timed: ClassVar[bool] = False
    starts_at_zero: ClassVar[bool] = True
    outcomes: ClassVar[str] = "a number"

    def takes(self, y: Tensor) -> Tensor:
        """Return which outcomes (n,) the model can have, (n,) bool."""
        return y.isfinite()

    def undetermined(self, y: NDArray[np.float64]) -> bool:
        """Return whether there is no estimate for outcomes (n,), whatever the covariates."""
        return False

    def nuisances(self, site: Site) -> int:
        """Return q, the parameters of a site's own."""
        return site.z.shape[-1]

    def start(self, site: Site) -> Tensor:
        """Return θ (..., p + q) from which its maximum likelihood estimate is searched."""
        return site.x.new_zeros(*site.y.shape[:-1], site.p + self.nuisances(site))

    @abstractmethod
    def log_density(self, site: Site, theta: Tensor) -> Tensor:
        """Return log f(y_i; θ), (..., n)."""

    @abstractmethod
    def score(self, site: Site, theta: Tensor) -> Tensor:
        """Return the gradients of log f(y_i; θ) by θ, (..., n, p + q)."""

    @abstractmethod
    def hessian(self, site: Site, theta: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return sum_i w_i Hessian of log f(y_i; θ), (..., p + q, p + q).

        Args:
            site, theta: the examples, and θ.
            weights: (..., n); 1 where not given.
        """


class Linear(Model):
    """Base class of models of a linear predictor η_i = x_i'β + z_i'γ + offset_i alone."""

    @abstractmethod
    def value(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return l(y, η) = log f."""

    @abstractmethod
    def slope(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return the derivative of l by η."""

    @abstractmethod
    def curvature(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return the second derivative of l by η."""

    def log_density(self, site: Site, theta: Tensor) -> Tensor:
        """See `Model`."""
        return self.value(site.y, _predictor(site, theta))

    def score(self, site: Site, theta: Tensor) -> Tensor:
        """See `Model`: l' D_i, where D_i = (x_i, z_i)."""
        return self.slope(site.y, _predictor(site, theta))[..., None] * site.design

    def hessian(self, site: Site, theta: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `Model`: sum_i w_i l'' D_i D_i'."""
        return _squares(site, self.curvature(site.y, _predictor(site, theta)), weights)


@MODELS.register("logistic")
@dataclass(frozen=True, kw_only=True)
class Logistic(Linear):
    """Logistic regression: y is 1 with probability 1 / (1 + exp(-η))."""

    outcomes: ClassVar[str] = "0 or 1"

    def takes(self, y: Tensor) -> Tensor:
        """Accept 0 and 1."""
        return (y == 0) | (y == 1)

    def undetermined(self, y: NDArray[np.float64]) -> bool:
        """See `Model`: one outcome only."""
        return bool(y.min() == y.max())

    def value(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return y η - log(1 + exp η)."""
        return y * eta - torch.nn.functional.softplus(eta)

    def slope(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return y - π, as y (1 - π) - (1 - y) π, which does not round to 0 where π is near 1."""
        return y * torch.sigmoid(-eta) - (1 - y) * torch.sigmoid(eta)

    def curvature(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return -π (1 - π)."""
        return -torch.sigmoid(eta) * torch.sigmoid(-eta)


@MODELS.register("poisson")
@dataclass(frozen=True, kw_only=True)
class Poisson(Linear):
    """Poisson regression: y is a count with mean exp(η); an offset is the logarithm of exposure."""

    outcomes: ClassVar[str] = "a whole number, 0 or more"

    def takes(self, y: Tensor) -> Tensor:
        """Accept counts."""
        return (y >= 0) & (y == y.floor()) & y.isfinite()

    def undetermined(self, y: NDArray[np.float64]) -> bool:
        """See `Model`: no event."""
        return bool(y.max() == 0)

    def value(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return y η - exp η - log y!."""
        return y * eta - eta.exp() - torch.lgamma(y + 1)

    def slope(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return y - exp η."""
        return y - eta.exp()

    def curvature(self, y: Tensor, eta: Tensor) -> Tensor:
        """Return -exp η."""
        return -eta.exp()


@MODELS.register("linear")
@dataclass(frozen=True, kw_only=True)
class Gaussian(Model):
    """Linear regression: y is normal with mean η and the site's own variance.

    γ = (site coefficients, τ) with τ = log σ².
    """

    starts_at_zero: ClassVar[bool] = False

    def undetermined(self, y: NDArray[np.float64]) -> bool:
        """See `Model`: no variance."""
        return bool(y.min() == y.max())

    def nuisances(self, site: Site) -> int:
        """Count τ as well."""
        return site.z.shape[-1] + 1

    def start(self, site: Site) -> Tensor:
        """Start at least squares, which is the maximum likelihood estimate of the coefficients.

        Where several coefficients are as good, as of a covariate that is 0 at the site, they are
        the smallest ones in units of each covariate.
        """
        design = site.design
        target = (site.y - site.offset)[..., None]
        gram = torch.einsum("...nd,...ne->...de", design, design)
        coefficients = torch.linalg.solve_ex(gram, design.mT @ target)[0]
        size = design.abs().amax(-2, keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        scaled = design / size
        gram = torch.einsum("...nd,...ne->...de", scaled, scaled)
        smallest = torch.linalg.pinv(gram, hermitian=True) @ (scaled.mT @ target) / size.mT
        full = torch.linalg.matrix_rank(gram, hermitian=True) == gram.shape[-1]
        coefficients = torch.where(full[..., None, None], coefficients, smallest)
        square = (target - design @ coefficients).square().mean(-2)
        return torch.cat([coefficients[..., 0], square.clamp_min(1e-300).log()], -1)

    def log_density(self, site: Site, theta: Tensor) -> Tensor:
        """See `Model`: -(log 2π + τ + r² exp(-τ)) / 2, where r = y - η."""
        residual, tau = self._parts(site, theta)
        return -(math.log(2 * math.pi) + tau + residual.square() * (-tau).exp()) / 2

    def score(self, site: Site, theta: Tensor) -> Tensor:
        """See `Model`."""
        residual, tau = self._parts(site, theta)
        precision = (-tau).exp()
        own = (residual.square() * precision - 1) / 2
        return torch.cat([(residual * precision)[..., None] * site.design, own[..., None]], -1)

    def hessian(self, site: Site, theta: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `Model`."""
        residual, tau = self._parts(site, theta)
        precision = (-tau).exp().expand_as(residual)
        w = torch.ones_like(residual) if weights is None else weights
        corner = _squares(site, -precision, w)
        side = -torch.einsum("...n,...nd->...d", w * residual * precision, site.design)[..., None]
        last = -(w * residual.square() * precision).sum(-1)[..., None, None] / 2
        corner, side = _broadcast(corner, side)
        return torch.cat(
            [
                torch.cat([corner, side], -1),
                torch.cat([side.mT, last.expand_as(side[..., :1, :])], -1),
            ],
            -2,
        )

    def _parts(self, site: Site, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residuals (..., n) and τ (..., 1)."""
        return site.y - _predictor(site, theta[..., :-1]), theta[..., -1:]


@MODELS.register("cox")
@dataclass(frozen=True, kw_only=True)
class Cox(Model):
    """Proportional hazards with a baseline of every site's own (Cox 1972; ties: Breslow 1974).

    In place of the density stands the partial likelihood of each site, stratified by site: an event
    at time t adds η_i - log sum_{k at risk at t} exp(η_k), and a censored time adds nothing. The
    baseline is eliminated, so γ are only site coefficients, if any.
    """

    has_density: ClassVar[bool] = False
    timed: ClassVar[bool] = True
    outcomes: ClassVar[str] = "a time above 0"

    def takes(self, y: Tensor) -> Tensor:
        """Accept times above 0."""
        return (y > 0) & y.isfinite()

    def log_density(self, site: Site, theta: Tensor) -> Tensor:
        """Return the contributions to the log partial likelihood, (..., n)."""
        assert site.event is not None
        eta = _predictor(site, theta)
        most = eta.amax(-1, keepdim=True)
        risk = self._at_risk(site, (eta - most).exp()[..., None])[..., 0]
        return site.event * (eta - most - risk.log())

    def score(self, site: Site, theta: Tensor) -> Tensor:
        """Return the score residuals, (..., n, p), which add up to the score.

        With the mean D̄(t) of D = (x, z) over those at risk at t, and the steps dΛ of the baseline:

            event_i (D_i - D̄(t_i)) - exp(η_i) sum_{t_k <= t_i} (D_i - D̄(t_k)) dΛ(t_k)

        Each is nearly independent of the others, as a sandwich needs (Lin, Wei 1989).
        """
        assert site.event is not None
        design = _centred(site)
        mean, _ = self._moments(site, theta)
        eta = _predictor(site, theta)
        hazard = (eta - eta.amax(-1, keepdim=True)).exp()[..., None]
        steps = site.event[..., None] / self._at_risk(site, hazard)
        sums = self._until(site, torch.cat([steps, steps * mean], -1))
        expected = hazard * (design * sums[..., :1] - sums[..., 1:])
        return site.event[..., None] * (design - mean) - expected

    def hessian(self, site: Site, theta: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return minus the sum over events of the covariance of D over those at risk.

        A variance within rounding of 0 is 0: where covariates order the times, all variances tend
        to 0, and the likelihood has no maximum.
        """
        assert site.event is not None
        mean, square = self._moments(site, theta)
        covariance = square - mean[..., :, None] * mean[..., None, :]
        known = covariance.diagonal(dim1=-2, dim2=-1) > ROUNDING * square.diagonal(dim1=-2, dim2=-1)
        covariance = covariance * (known[..., :, None] & known[..., None, :])
        w = site.event if weights is None else site.event * weights
        return -torch.einsum("...n,...nde->...de", w, covariance)

    def _moments(self, site: Site, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of D and of DD' over those at risk at each time; of D less its mean over
        the site, on which neither score nor Hessian depends but for rounding.
        """
        eta = _predictor(site, theta)
        hazard = (eta - eta.amax(-1, keepdim=True)).exp()[..., None]
        design, d = _centred(site), site.design.shape[-1]
        products = (design[..., :, None] * design[..., None, :]).flatten(-2)
        sums = self._at_risk(site, torch.cat([hazard, hazard * design, hazard * products], -1))
        means = sums[..., 1:] / sums[..., :1]
        return means[..., :d], means[..., d:].unflatten(-1, (d, d))

    @staticmethod
    def _at_risk(site: Site, values: Tensor) -> Tensor:
        """Return for each example the sum of values (..., n, c) over those whose time is not less.

        It is added up from the last time to the first.
        """
        times, order = site.y.sort(dim=-1, stable=True)
        index = order[..., None].expand(values.shape)
        sums = values.gather(-2, index).flip(-2).cumsum(-2).flip(-2)
        first = torch.searchsorted(times, site.y.contiguous())
        return sums.gather(-2, first[..., None].expand(values.shape))

    @staticmethod
    def _until(site: Site, values: Tensor) -> Tensor:
        """Return for each example the sum of values (..., n, c) over those whose time is not more.

        It is added up from the first time to the last.
        """
        times, order = site.y.sort(dim=-1, stable=True)
        index = order[..., None].expand(values.shape)
        sums = values.gather(-2, index).cumsum(-2)
        last = torch.searchsorted(times, site.y.contiguous(), right=True) - 1
        return sums.gather(-2, last[..., None].expand(values.shape))


@dataclass(frozen=True, kw_only=True)
class Density(Model):
    """A user's own model: the log density of one example. Derivatives are those of torch.func.

    Attributes:
        log_density_of: (y, x, beta, gamma) -> ().
        own: q, the parameters of a site's own, which start at 0.
    """

    has_predictor: ClassVar[bool] = False

    log_density_of: LogDensity
    own: int = 0

    def __post_init__(self) -> None:
        if not callable(self.log_density_of):
            raise InputError(
                "Density: log_density_of must be a function of (y, x, beta, gamma), not "
                f"{shown(self.log_density_of)}"
            )
        whole = isinstance(self.own, Integral) and not isinstance(self.own, bool)
        require(whole and self.own >= 0, "Density: own", "a whole number from 0", self.own)

    def nuisances(self, site: Site) -> int:
        """Return q."""
        return self.own

    def log_density(self, site: Site, theta: Tensor) -> Tensor:
        """See `Model`."""
        return self._each(self._of_theta, site, theta)

    def score(self, site: Site, theta: Tensor) -> Tensor:
        """See `Model`."""
        return self._each(torch.func.grad(self._of_theta, argnums=2), site, theta)

    def hessian(self, site: Site, theta: Tensor, weights: Tensor | None = None) -> Tensor:
        """See `Model`."""
        each = self._each(
            torch.func.jacrev(torch.func.grad(self._of_theta, argnums=2), argnums=2), site, theta
        )
        if weights is None:
            return each.sum(-3)
        return torch.einsum("...n,...nde->...de", weights, each)

    def _of_theta(self, y: Tensor, x: Tensor, theta: Tensor) -> Tensor:
        p = x.shape[-1]
        value = self.log_density_of(y, x, theta[:p], theta[p:])
        if not isinstance(value, torch.Tensor) or value.ndim:
            what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"
            raise InputError(
                f"Density: log_density_of must return a tensor of shape (), not {what}"
            )
        return value

    def _each(self, function: Callable[..., Tensor], site: Site, theta: Tensor) -> Tensor:
        """Return a function of one example, of all examples, (..., n, ...)."""
        shape = tuple(torch.broadcast_shapes(site.y.shape, (*theta.shape[:-1], site.n)))
        y = site.y.expand(shape).reshape(-1)
        x = site.x.expand(*shape, site.p).reshape(-1, site.p)
        each = theta[..., None, :].expand(*shape, theta.shape[-1]).reshape(-1, theta.shape[-1])
        values: Tensor = torch.func.vmap(function)(y, x, each)
        found: Tensor = values.reshape(*shape, *values.shape[1:])
        return found


def _centred(site: Site) -> Tensor:
    """Return D less its mean over the site, (..., n, d)."""
    return site.design - site.design.mean(-2, keepdim=True)


def _predictor(site: Site, theta: Tensor) -> Tensor:
    """Return η = x'β + z'γ + offset, (..., n)."""
    return torch.einsum("...nd,...d->...n", site.design, theta) + site.offset


def _squares(site: Site, values: Tensor, weights: Tensor | None) -> Tensor:
    """Return sum_i w_i v_i D_i D_i', (..., d, d)."""
    w = values if weights is None else weights * values
    return torch.einsum("...n,...nd,...ne->...de", w, site.design, site.design)


def _broadcast(*matrices: Tensor) -> list[Tensor]:
    """Return matrices whose leading axes are made equal."""
    leading = torch.broadcast_shapes(*(each.shape[:-2] for each in matrices))
    return [each.expand(*leading, *each.shape[-2:]) for each in matrices]
