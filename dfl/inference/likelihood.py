"""Maximum likelihood of a site, and the efficient score and information of β.

All functions take leading axes, as repetitions and sites, and treat each entry by itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.inference.models import Model, Site
else:
    from dfl.core.lazy import torch

STEPS = 40
"""The most steps of Newton's method. They do not suffice where covariates separate outcomes."""
HALVINGS = 40
"""The most times that a step is halved because the likelihood would fall."""
TOLERANCE = 1e-10
"""The step at which Newton's method is done, in standard errors: the next is about its square."""
ROUNDED = 1e-6
"""The step, in standard errors, at which it is done as well where rounding keeps steps from
becoming smaller.
"""
SINGULAR = 1e-14
"""The smallest eigenvalue of an information in units of its diagonal, below which it is singular
but for rounding.
"""


class Efficient(NamedTuple):
    """The efficient score of β, at some examples.

    s_i = ∇_β log f_i - A ∇_γ log f_i with A = I_βγ I_γγ^-1, where I = -sum_i w_i Hessian_i.

    Attributes:
        scores: (..., n, p), s_i, without weights.
        information: (..., p, p), I_ββ - A I_γβ.
        slope: (..., p, q), A.
    """

    scores: Tensor
    information: Tensor
    slope: Tensor


def maximize(model: Model, site: Site, theta: Tensor, first: int = 0) -> Tensor:
    """Return θ (..., d) that maximizes the likelihood, by Newton's method with halved steps.

    Args:
        model, site: the model and the examples.
        theta: (..., d), the starting point.
        first: the first coordinate that moves: p maximizes over γ alone.

    Returns:
        (..., d); NaN where there is no maximum or it was not found.
    """
    if first == theta.shape[-1]:
        return theta
    done = torch.zeros(theta.shape[:-1], dtype=torch.bool)
    value = model.log_density(site, theta).sum(-1)
    gain = torch.full_like(value, math.inf)
    for _ in range(STEPS):
        gradient = model.score(site, theta).sum(-2)[..., first:]
        information = -model.hessian(site, theta)[..., first:, first:]
        step = ascent(information, gradient)
        full = torch.nn.functional.pad(step, (first, 0))
        scale = (~done).to(theta)
        best = theta + scale[..., None] * full
        new = model.log_density(site, best).sum(-1)
        for _ in range(HALVINGS):
            worse = ~done & ~(new >= value - 1e-9 * value.abs()) & step.isfinite().all(-1)
            if not worse.any():
                break
            scale = torch.where(worse, scale / 2, scale)
            best = theta + scale[..., None] * torch.where(done[..., None], 0.0, full)
            new = model.log_density(site, best).sum(-1)
        theta = torch.where(done[..., None], theta, best)
        value = torch.where(done, value, new)
        last, gain = gain, (step * gradient).sum(-1).abs()
        done = done | settled(gain, last) | step.isnan().any(-1)
        if done.all():
            break
    found = done & is_maximum(-model.hessian(site, theta)[..., first:, first:])
    return torch.where(found[..., None], theta, math.nan)


def ascent(information: Tensor, gradient: Tensor) -> Tensor:
    """Return the step of Newton's method up a log likelihood, (..., d).

    Where the information is not positive definite, far from a maximum, its eigenvalues are taken
    by their absolute values, in units of its diagonal, so that the step leads up.

    Args:
        information: (..., d, d), minus the Hessian.
        gradient: (..., d).

    Returns:
        (..., d); NaN where the information is singular, or not finite.
    """
    step, failed = torch.linalg.solve_ex(information, gradient)
    step = torch.where((failed > 0)[..., None], math.nan, step)
    indefinite = torch.linalg.cholesky_ex(information)[1] > 0
    usable = indefinite & information.isfinite().all(-1).all(-1) & step.isfinite().all(-1)
    if not usable.any():
        return step
    scaled, size = _by_diagonal(information[usable])
    values, vectors = torch.linalg.eigh(scaled)
    rotated = vectors.mT @ (gradient.expand_as(step)[usable] / size)[..., None]
    step[usable] = (vectors @ (rotated / values.abs()[..., None]))[..., 0] / size
    return step


def is_maximum(information: Tensor) -> Tensor:
    """Return whether minus a Hessian (..., d, d) is positive definite beyond rounding, (...)."""
    finite = information.isfinite().all(-1).all(-1)
    scaled, _ = _by_diagonal(torch.where(finite[..., None, None], information, 0.0))
    positive = (information.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
    found: Tensor = finite & positive & (torch.linalg.eigvalsh(scaled)[..., 0] > SINGULAR)
    return found


def _by_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix (..., d, d) in units of the roots of its diagonal, and these, (..., d)."""
    size = matrix.diagonal(dim1=-2, dim2=-1).abs().sqrt()
    size = torch.where(size > 0, size, 1.0)
    return matrix / size[..., :, None] / size[..., None, :], size


def settled(gain: Tensor, last: Tensor) -> Tensor:
    """Return whether steps of Newton's method up a log likelihood are the last, (...).

    Args:
        gain: (...), |step'gradient|, the square of the length of a step in standard errors,
            whatever the units are.
        last: (...), that of the step before. Where rounding keeps steps from becoming smaller, a
            short one is the last.
    """
    return (gain <= TOLERANCE**2) | (gain <= ROUNDED**2) & (gain >= last)


def efficient(
    model: Model, site: Site, theta: Tensor, p: int, weights: Tensor | None = None
) -> Efficient:
    """Return the efficient score and information of β.

    Args:
        model, site: the model and the examples.
        theta: (..., p + q), θ = (β, γ).
        p: the parameters β.
        weights: (..., n), those of the Hessians.
    """
    information = -model.hessian(site, theta, weights)
    slope = torch.linalg.solve_ex(information[..., p:, p:], information[..., p:, :p])[0].mT
    scores = model.score(site, theta)
    return Efficient(
        scores[..., :p] - torch.einsum("...ng,...bg->...nb", scores[..., p:], slope),
        information[..., :p, :p] - slope @ information[..., p:, :p],
        slope,
    )


def bias(model: Model, site: Site, theta: Tensor) -> Tensor:
    """Return the bias of order 1/n of the maximum likelihood estimate θ, (..., d).

        (1/n) Q ( mean_i V_i d_i + 1/2 mean_i ∇³ log f_i [mean_k d_k d_k'] )

    Q = (-mean Hessian)^-1, d_i = Q s_i and V_i = Hessian_i - mean Hessian, as for other M-estimates
    (Rilstone, Srivastava, Ullah 1996). Third derivatives are by automatic differentiation.
    """
    n = site.n
    score = model.score(site, theta)
    inverse = inverted(-model.hessian(site, theta) / n)
    influence = torch.einsum("...de,...ne->...nd", inverse, score)
    spread = torch.einsum("...nd,...ne->...de", influence, influence) / n
    with torch.enable_grad():
        point = theta.detach().clone().requires_grad_()
        total = (model.score(site, point) * influence).sum()
        total = total + (model.hessian(site, point) * spread).sum() / 2
        (gradient,) = torch.autograd.grad(total, point)
    # The mean Hessian of V_i drops out, since the scores add up to 0 at θ.
    return torch.einsum("...de,...e->...d", inverse, gradient) / n**2


def inverted(matrix: Tensor) -> Tensor:
    """Return matrix^-1 over leading axes; NaN where it is singular."""
    found, failed = torch.linalg.inv_ex(matrix)
    return torch.where((failed > 0)[..., None, None], math.nan, found)


def meat(scores: Tensor) -> Tensor:
    """Return sum_i s_i s_i' of scores (..., n, d), (..., d, d)."""
    return torch.einsum("...nd,...ne->...de", scores, scores)
