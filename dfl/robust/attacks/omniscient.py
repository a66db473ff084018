"""Attacks that are computed from the messages that honest peers are about to send."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from dfl.core.errors import InputError
from dfl.core.layout import blocks
from dfl.core.options import NotNegative, Positive
from dfl.robust.aggregators import Rows
from dfl.robust.attacks.base import ATTACKS, Attack, AttackView, Ints, Pointwise


@ATTACKS.register("ipm")
@dataclass(frozen=True, kw_only=True)
class InnerProduct(Pointwise):
    """Send -eps times the mean of the honest messages, a short step back.

    Source: Xie, Koyejo, Gupta, "Fall of empires" (UAI 2019), inner product manipulation.

    Raises:
        InputError: an eps that is not positive.
    """

    eps: Positive = 0.1

    def falsify_block(self, view: AttackView) -> Rows:
        """Return one message for all attackers, (c,)."""
        view = view.by_sender
        return np.asarray(-self.eps * view.updates.rows[view.imitated].mean(0))


@ATTACKS.register("alie")
@dataclass(frozen=True, kw_only=True)
class LittleIsEnough(Pointwise):
    """Send μ - zσ, in every coordinate the mean and standard deviation of the honest messages.

    Such a message hides among the honest ones. With n senders, m of them attackers, and s =
    floor(n/2 + 1) - m supporters to be won, z = Φ⁻¹((n-m-s)/(n-m)). Where that share is not above 0
    or not below 1, it is set 1/(n-m+1) away from there, so that z is finite. σ² divides by n - m.

    Source: Baruch, Baruch, Goldberg, "A little is enough" (NeurIPS 2019), algorithm 3.

    Attributes:
        z: standard deviations, in place of the formula.

    Raises:
        InputError: a negative z.
    """

    z: NotNegative | None = None

    def falsify_block(self, view: AttackView) -> Rows:
        """Return one message for all attackers, (c,)."""
        view = view.by_sender
        honest = view.updates.rows[view.imitated]
        z = self.z
        if z is None:
            z = _supported(len(view.updates.rows), len(view.attackers), len(honest))
        return np.asarray(honest.mean(0) - z * honest.std(0))


def _supported(n: int, m: int, honest: int) -> float:
    """Return z of `LittleIsEnough` for n senders, m attackers, and some honest senders."""
    from scipy.special import ndtri  # 35 ms at every start, for this attack only

    won = honest - (n // 2 + 1 - m)
    return float(ndtri(np.clip(won / honest, 1 / (honest + 1), honest / (honest + 1))))


@ATTACKS.register("trim")
@dataclass(frozen=True, kw_only=True)
class Trim(Pointwise):
    """Send a value beyond the extreme one, against the common direction, in every coordinate.

    It is made for coordinate-wise rules. s is the sign of the sum of all messages if all were
    honest, and D the smallest of them where s > 0 and the largest where s < 0. An attacker sends
    D / r where s D > 0, D r where s D < 0, with its own r ~ U[1, 2], and 0 where s is 0.

    Source: Fang et al., "Local model poisoning attacks to Byzantine-robust federated learning"
        (USENIX Security 2020), section 4.3, full knowledge, as released: b = 2, and all senders
        where the text has the honest ones.
    """

    def falsify_block(self, view: AttackView) -> Rows:
        """Return numbers drawn by address, (f, c)."""
        rows = view.by_sender.updates.rows
        r = 1 + view.uniform("trim").astype(np.float64)
        s = np.sign(rows.sum(0))
        extreme = np.where(s > 0, rows.min(0), rows.max(0)) * (s != 0)
        return np.asarray(np.where(s * extreme > 0, extreme / r, extreme * r))


@ATTACKS.register("dissensus")
@dataclass(frozen=True, kw_only=True)
class Dissensus(Attack):
    """Send every neighbour a message that drives it away from its honest neighbours.

    The message to v, with j the honest and b the attacking neighbours of v, is

        x_v - eps Σ_j W_vj (x_j - x_v) / Σ_b W_vb

    With eps = 1 the average of v is x_v, as if it had no neighbours; with a larger eps it moves the
    other way.

    Source: He, Karimireddy, Jaggi, "Byzantine-robust decentralized learning via ClippedGossip"
        (arXiv 2202.01545), section 3; eps = 1.5 in the commands of its released code.

    Raises:
        InputError: an eps that is not positive.
    """

    eps: Positive = 1.5

    def falsify(self, view: AttackView) -> Rows:
        """Refuse to make one message for all receivers.

        Raises:
            InputError: always.
        """
        raise InputError(
            "--attack dissensus sends each neighbour another message, and a server has no "
            "neighbours: choose another attack"
        )

    def falsify_edges(self, view: AttackView, matrix: csr_array, edges: Ints) -> Rows:
        """Return the messages over edges, (k, c).

        All attackers send the same to a neighbour.
        """
        rows = view.updates.rows
        victims, which = np.unique(edges[:, 1], return_inverse=True)
        coefficients = self._coefficients(matrix, view.attackers, victims)
        sent = np.empty((len(victims), rows.shape[1]), rows.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
            for block in blocks(rows.shape[1]):
                sent[:, block] = coefficients @ rows[:, block].astype(np.float64, order="C")
        return sent[which]

    def _coefficients(self, matrix: csr_array, attackers: Ints, victims: Ints) -> csr_array:
        """Return the coefficients of all peers' rows in the messages to victims, (victims, P)."""
        near = matrix[victims].tocoo()
        at, of = near.coords
        neighbour = of != victims[at]
        attacks = np.isin(of, attackers)
        honest = near.data * (neighbour & ~attacks)
        honest_weight = np.bincount(at, honest, len(victims))
        weight = np.bincount(at, near.data * (neighbour & attacks), len(victims))
        factor = self.eps * np.divide(1.0, weight, out=np.zeros(len(victims)), where=weight > 0)
        others = csr_array((-factor[at] * honest, (at, of)), near.shape)
        places = (np.arange(len(victims)), victims)
        return others + csr_array((1 + factor * honest_weight, places), near.shape)
