"""The result of a fit: estimates with standard errors, as users of statsmodels know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import chdtrc, ndtr, ndtri

from dfl.core.errors import InputError
from dfl.core.parse import nearest, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEW = 0.2
"""The effective share of a lead's examples below which the result has a note."""
WIDTH = 78
"""Characters of a line of the summary."""


def _number(value: Any, decimals: int) -> str:
    """Return a number of the summary: with decimals, or three digits where these are too few."""
    plain = value == 0 or not np.isfinite(value) or 1e-4 <= abs(value) < 1e4
    return f"{value:.{decimals}f}" if plain else f"{value:.3g}"


class WaldTest(NamedTuple):
    """A Wald test that some coefficients are 0.

    Attributes:
        statistic: b' V^-1 b.
        df: the number of coefficients.
        pvalue: by the χ² distribution.
    """

    statistic: float
    df: int
    pvalue: float


@dataclass(frozen=True)
class Result:
    """What a fit found, and what it took.

    Attributes:
        params: the common coefficients β, by covariate.
        cov: their covariance.
        sites: a row per site: name, n, and its own estimate and standard error of each coefficient;
            NaN where it has none. They are for the reader of a simulation: they cross in no
            message, and are not among what is revealed.
        revealed: what every site revealed: numbers in a message, how often it sent new ones, rounds
            of messages, and bytes that all sites sent, passed on ones included.
        traffic: a row per site: bytes sent and, from a centre, received.
        model, estimator: their specs.
        outcome: the column.
        gap: the largest relative difference between sites after a mean over a graph.
        step: the last step of Newton's method of `pooled`, or a further one of
            `gradient_tracking`, in standard errors: not near 0 where few bits or few rounds keep
            them from converging.
        effective: where a lead's n examples are tilted, the least share of them that their weights
            for another site amount to, (sum_i w_i)² / (n sum_i w_i²); else 1. It crosses in no
            message.
        lost: messages that were lost.
        rounded: whether messages to a centre were rounded by a compressor.
        seconds: simulated time, NaN without link model.
    """

    params: pd.Series[float]
    cov: pd.DataFrame
    sites: pd.DataFrame
    revealed: pd.DataFrame
    traffic: pd.DataFrame
    model: str
    estimator: str
    outcome: str
    gap: float = 0.0
    step: float = 0.0
    effective: float = 1.0
    lost: int = 0
    rounded: bool = False
    seconds: float = float("nan")

    @property
    def bse(self) -> pd.Series[float]:
        """The standard errors."""
        return pd.Series(np.sqrt(np.diagonal(self.cov)), self.params.index)

    @property
    def zvalues(self) -> pd.Series[float]:
        """Estimates in standard errors."""
        return self.params / self.bse

    @property
    def pvalues(self) -> pd.Series[float]:
        """Two-sided p-values of the hypotheses that a coefficient is 0."""
        return pd.Series(2 * ndtr(-self.zvalues.abs().to_numpy()), self.params.index)

    def conf_int(self, alpha: float = 0.05) -> pd.DataFrame:
        """Return the Wald intervals of coverage 1 - alpha, a row per coefficient."""
        if not (isinstance(alpha, Real) and 0 < alpha < 1):
            raise InputError(f"alpha must be above 0 and below 1, not {shown(alpha)}")
        half = ndtri(1 - alpha / 2) * self.bse
        return pd.DataFrame({0: self.params - half, 1: self.params + half})

    def wald_test(self, covariates: Sequence[str] | None = None) -> WaldTest:
        """Test that the coefficients of some covariates, or of all, are 0."""
        names = list(self.params.index if covariates is None else covariates)
        if isinstance(covariates, str) or not names or len(set(names)) < len(names):
            raise InputError(
                f"covariates must be a list of different ones of {', '.join(self.params.index)}, "
                f"not {shown(covariates)}"
            )
        for name in names:
            if name not in self.params.index:
                raise InputError(
                    f"no coefficient {shown(name)}{nearest(str(name), list(self.params.index))}"
                )
        b: NDArray[Any] = self.params[names].to_numpy()
        statistic = float(b @ np.linalg.solve(self.cov.loc[names, names].to_numpy(), b))
        return WaldTest(statistic, len(names), float(chdtrc(len(names), statistic)))

    def table(self) -> pd.DataFrame:
        """Return a row per coefficient: estimate, standard error, z, p and 95 % interval."""
        interval = self.conf_int()
        return pd.DataFrame(
            {
                "estimator": self.estimator,
                "covariate": self.params.index,
                "estimate": self.params.to_numpy(),
                "standard_error": self.bse.to_numpy(),
                "z": self.zvalues.to_numpy(),
                "p": self.pvalues.to_numpy(),
                "low": interval[0].to_numpy(),
                "high": interval[1].to_numpy(),
            }
        )

    def summary(self) -> str:
        """Return the result as statsmodels prints it, and what every site revealed."""
        rule, line = "=" * WIDTH, "-" * WIDTH
        n = self.sites["n"].to_numpy()
        facts = [
            ("Outcome:", self.outcome), ("Sites:", f"{len(n):,}"),
            ("Model:", self.model), ("Examples:", f"{int(n.sum()):,}"),
            ("Estimator:", self.estimator), ("Examples of a site:", f"{n.min():,} to {n.max():,}"),
        ]  # fmt: skip
        head = []
        for (a, b), (c, d) in zip(facts[::2], facts[1::2], strict=True):
            right = f"{c:<20}{d:>19}"
            if len(b) > 24:
                head += [f"{a:<12}{b}", f"{'':<39}{right}"]
            else:
                head.append(f"{a:<12}{b:>24}   {right}")
        titles = (
            f"{'':<16}{'coef':>10}{'std err':>11}{'z':>11}{'P>|z|':>10}{'[0.025':>10}{'0.975]':>10}"
        )
        rows = []
        for row in self.table().itertuples():
            name = str(row.covariate)
            rows += [name] * (len(name) > 16)
            rows.append(
                f"{name if len(name) <= 16 else '':<16}{_number(row.estimate, 4):>10}"
                f"{_number(row.standard_error, 4):>11}{_number(row.z, 3):>11}{row.p:>10.3f}"
                f"{_number(row.low, 3):>10}{_number(row.high, 3):>10}"
            )
        wanted = (
            f"{'Every site revealed':<36}{'numbers':>8}{'times':>7}{'rounds':>8}{'bytes, all':>19}"
        )
        revealed = [
            f"{row.what:<36}{row.numbers:>8}{row.times:>7}{row.rounds:>8}{row.bytes:>19,}"
            for row in self.revealed.itertuples()
        ]
        title = "Common coefficients of all sites".center(WIDTH).rstrip()
        page = [title, rule, *head, rule, titles, line, *rows, rule, wanted, line, *revealed, rule]
        return "\n".join([*page, *(fill(note, WIDTH) for note in self.notes())])

    def notes(self) -> list[str]:
        """Return what else is to be known, one line each."""
        notes = []
        if self.gap > 1e-9:
            notes.append(
                f"The sites have not agreed: they differ by {self.gap:.1e} of the largest value. "
                "More gossip rounds reach agreement."
            )
        if self.step > 1e-6:
            notes.append(
                "The estimate has not converged: a step of Newton's method is "
                f"{self.step:.1e} standard errors. More bits, or more rounds, let it converge."
            )
        if self.effective < FEW:
            notes.append(
                "The weights of a lead's examples for another site amount to "
                f"{self.effective:.1%} of them: the estimate may be far from that of all examples, "
                "and its standard errors wrong. Compare meta or pooled."
            )
        if self.rounded:
            notes.append("Standard errors do not contain the rounding of messages.")
        if self.lost:
            notes.append(f"{self.lost:,} messages were lost.")
        if np.isfinite(self.seconds):
            notes.append(f"{self.seconds:.3g} s of simulated time.")
        return notes

    def __str__(self) -> str:
        return self.summary()
