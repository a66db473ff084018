"""Which lies are made from what the honest are about to say?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import ndtri

from dfl.core.errors import InputError
from dfl.core.layout import blocks
from dfl.core.options import NotNegative, Positive
from dfl.robust.attacks.base import ATTACKS, Attack, AttackView, Ints, Pointwise


@ATTACKS.register("ipm")
@dataclass(frozen=True, kw_only=True)
class InnerProduct(Pointwise):
    """Say -eps times the mean of the honest, a short step back.

    Source: Xie, Koyejo, Gupta, "Fall of empires" (UAI 2019), inner product manipulation.

    Raises:
        InputError: an eps that is not positive.
    """

    eps: Positive = 0.1

    def lie(self, seen: AttackView) -> NDArray[Any]:
        """One word for all, (c,)."""
        return np.asarray(-self.eps * seen.words.rows[seen.models].mean(0))


@ATTACKS.register("alie")
@dataclass(frozen=True, kw_only=True)
class LittleIsEnough(Pointwise):
    """Say μ - zσ, in every coordinate the mean and the standard deviation of the honest: a lie that
    hides among them.

    With n who speak, m of them attackers, and s = floor(n/2 + 1) - m supporters to be won, z =
    Φ⁻¹((n-m-s)/(n-m)). Where that share is not above 0 or not below 1, it is taken 1/(n-m+1) away
    from there, so that z is finite. σ² divides by n - m.

    Source: Baruch, Baruch, Goldberg, "A little is enough" (NeurIPS 2019), algorithm 3.

    Attributes:
        z: standard deviations, in place of the formula.

    Raises:
        InputError: a negative z.
    """

    z: NotNegative | None = None

    def lie(self, seen: AttackView) -> NDArray[Any]:
        """One word for all, (c,)."""
        honest = seen.words.rows[seen.models]
        z = (
            _supported(len(seen.words.rows), len(seen.bad), len(honest))
            if self.z is None
            else self.z
        )
        return np.asarray(honest.mean(0) - z * honest.std(0))


def _supported(n: int, m: int, honest: int) -> float:
    """z of `LittleIsEnough`."""
    won = honest - (n // 2 + 1 - m)
    return float(ndtri(np.clip(won / honest, 1 / (honest + 1), honest / (honest + 1))))


@ATTACKS.register("trim")
@dataclass(frozen=True, kw_only=True)
class Trim(Pointwise):
    """Go as far as others do, and farther, against where all would go: for rules that work
    coordinate by coordinate.

    With s the sign of the sum of what all would have said, honestly, D the smallest of it where s >
    0 and the largest where s < 0, an attacker says D / r where s D > 0, and D r where s D < 0, with
    its own r ~ U[1, 2]; 0 where s is 0.

    Source: Fang et al., "Local model poisoning attacks to Byzantine-robust federated learning"
        (USENIX Security 2020),
    section 4.3, full knowledge, as released: b = 2, and all speakers where the text has the honest.
    """

    def lie(self, seen: AttackView) -> NDArray[Any]:
        """Numbers drawn by address, (f, c)."""
        rows, r = seen.words.rows, 1 + seen.uniform("trim").astype(np.float64)
        s = np.sign(rows.sum(0))
        far = np.where(s > 0, rows.min(0), rows.max(0)) * (s != 0)
        return np.asarray(np.where(s * far > 0, far / r, far * r))


@ATTACKS.register("dissensus")
@dataclass(frozen=True, kw_only=True)
class Dissensus(Attack):
    """Tell every neighbour what drives it away from its honest neighbours: a word for each edge.

    To v, over all j that are honest and all b that attack, neighbours of v,

        x_v - eps Σ_j W_vj (x_j - x_v) / Σ_b W_vb

    so that with eps = 1 what v averages is x_v, as if it were alone, and with more it moves the
    other way.

    Source: He, Karimireddy, Jaggi, "Byzantine-robust decentralized learning via ClippedGossip"
        (arXiv 2202.01545),
    section 3; eps = 1.5 in the commands of its released code.

    Raises:
        InputError: an eps that is not positive.
    """

    eps: Positive = 1.5

    speaks: ClassVar[bool] = True
    per_edge: ClassVar[bool] = True

    def say(self, seen: AttackView) -> NDArray[Any]:
        """Nothing: there is no such word.

        Raises:
            InputError: always.
        """
        raise InputError(
            "--attack dissensus tells every neighbour something else: a server has none, choose another"
        )

    def tell(self, seen: AttackView, matrix: csr_array, pairs: Ints) -> NDArray[Any]:
        """What is said over every edge, (k, c); the same to a neighbour whichever attacker says
        it.
        """
        rows = seen.words.rows
        victims, which = np.unique(pairs[:, 1], return_inverse=True)
        pushed = self._pushed(matrix, seen.bad, victims)
        said = np.empty((len(victims), rows.shape[1]), rows.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
            for block in blocks(rows.shape[1]):
                said[:, block] = pushed @ rows[:, block].astype(np.float64, order="C")
        return said[which]

    def _pushed(self, matrix: csr_array, bad: Ints, victims: Ints) -> csr_array:
        """The weight of every peer's row in what the victims are told, (victims, P)."""
        near = matrix[victims].tocoo()
        at, of = near.coords
        other, lying = of != victims[at], np.isin(of, bad)
        honest = np.bincount(at, near.data * (other & ~lying), len(victims))
        attackers = np.bincount(at, near.data * (other & lying), len(victims))
        far = self.eps * np.divide(1.0, attackers, out=np.zeros(len(victims)), where=attackers > 0)
        pull = csr_array((-far[at] * near.data * (other & ~lying), (at, of)), near.shape)
        return pull + csr_array((1 + far * honest, (np.arange(len(victims)), victims)), near.shape)
