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
    for _ in range(STEPS):
        gradient = model.score(site, theta).sum(-2)[..., first:]
        information = -model.hessian(site, theta)[..., first:, first:]
        step, failed = torch.linalg.solve_ex(information, gradient)
        step = torch.where((failed > 0)[..., None], math.nan, step)
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
        done = done | settled(step, gradient) | step.isnan().any(-1)
        if done.all():
            break
    return torch.where(done[..., None], theta, math.nan)


def settled(step: Tensor, gradient: Tensor) -> Tensor:
    """Return whether a step (..., d) of Newton's method up a log likelihood is its last, (...).

    Its length in standard errors is the square root of step'gradient, whatever the units are.
    """
    return (step * gradient).sum(-1).abs() <= TOLERANCE**2


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
