"""How does a server, or a peer, make one row of what it heard? `AGGREGATORS`, rules that withstand liars or do not.

A rule is a plain function of `Words`: what was said, how much each speaker counts, and what is trusted. To a server's
rule come this rank's coordinates of all speakers, so that no rank holds them all. A coordinate-wise rule needs no more;
any other needs inner products over all coordinates, `Words.dots`, and answers with a weighted sum, `Words.mix`.
A rule that is told too few words to outvote its liars says so, and it is asked before the run starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dfl.layout import blocks

Floats = NDArray[np.float64]


def _here(parts: Floats) -> Floats:
    """The sum of the blocks where one rank has them all, in block order."""
    total: Floats = np.add.reduce(parts, axis=0)
    return total


@dataclass(frozen=True)
class Words:
    """What n speakers said, in ascending id, in the c coordinates that this rank works on.

    Attributes:
        rows: (n, c) float32 or float64.
        weights: (n,) how much each counts, adding up to 1; rules that take every speaker alike ignore it.
        trusted: (c,) what the listener itself would have said; None where it would have said nothing.
        total: adds up what every block of coordinates gave, (blocks, ...) -> (...), over the ranks and in block order.
    """

    rows: NDArray[Any]
    weights: Floats
    trusted: NDArray[Any] | None = None
    total: Callable[[Floats], Floats] = _here

    def dots(self, left: NDArray[Any], right: NDArray[Any]) -> Floats:
        """Inner products over all coordinates of rows (i, c) and (j, c), (i, j); the same on every rank."""
        parts = np.zeros((len(cut := blocks(self.rows.shape[1])), len(left), len(right)))
        for part, block in zip(parts, cut, strict=True):
            np.matmul(left[:, block].astype(np.float64), right[:, block].astype(np.float64).T, out=part)
        return self.total(parts)

    @cached_property
    def gram(self) -> Floats:
        """The inner products of all rows, (n, n); with what is trusted as the last of n + 1 where there is such."""
        rows = self.rows if self.trusted is None else np.vstack([self.rows, self.trusted])
        return self.dots(rows, rows)

    def mix(self, coefficients: Floats) -> Floats:
        """sum_k coefficients_k row_k, (c,), added up in float64 in ascending id."""
        row = np.zeros(self.rows.shape[1])
        for coefficient, said in zip(coefficients.tolist(), self.rows, strict=True):
            if coefficient:
                row += coefficient * said.astype(np.float64)
        return row


class Outcome(NamedTuple):
    """What a rule made of words: the row (c,) and, where it judges speakers, a score of each, (n,)."""

    row: Floats
    scores: Floats | None = None


Rule = Callable[[Words], Outcome]
"""A rule with its options bound."""

_R = TypeVar("_R", bound=Callable[..., Outcome])

AGGREGATORS: dict[str, Callable[..., Outcome]] = {}
"""Name -> f(words, *, options) -> Outcome."""


def aggregator(name: str) -> Callable[[_R], _R]:
    """Register a rule under `name`."""

    def register(rule: _R) -> _R:
        AGGREGATORS[name] = rule
        return rule

    return register


@aggregator("mean")
def mean(words: Words) -> Outcome:
    """The weighted mean, which a single liar can move anywhere."""
    return Outcome(words.mix(words.weights))
