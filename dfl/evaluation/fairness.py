"""Gaps between groups in the decisions of a model, demographic parity and equalized odds; and how
well an adversary predicts the group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PARITY, ODDS, ADVERSARY = "parity_gap", "odds_gap", "adversary_auc"
"""Names of the figures."""


def cells(labels: NDArray[np.int64], protected: NDArray[np.int64]) -> Floats:
    """Return in which cell each example is, (n, k * 2 * 2) of 0 and 1: value of the attribute, then
    label, for every attribute.

    Args:
        labels: (n,) of 0 and 1.
        protected: (n, k) of 0 and 1.
    """
    of_value = protected[:, :, None] == np.arange(2)
    of_label = labels[:, None] == np.arange(2)
    both = of_value[:, :, :, None] & of_label[:, None, None, :]
    return np.asarray(both.reshape(len(labels), -1), np.float64)


def gaps(positive: Floats, counts: Floats) -> dict[str, Floats]:
    """Return the gaps of models, (a,) each from 0 to 1, means over the attributes.

    With P_z(y) the share of the examples of group z and label y that a model decides 1 for, the gap
    in demographic parity is |P_0 - P_1| over all labels, that in equalized odds the larger of
    |P_0(y) - P_1(y)| over y. The first is NaN where a group has no examples, the second where it
    lacks one of the labels.

    Args:
        positive: (a, k * 2 * 2), how often each model decides 1 in a cell.
        counts: (k * 2 * 2,), examples of the cell.

    Source:
        C. Dwork et al., "Fairness through awareness", ITCS 2012 (statistical parity); M. Hardt,
        E. Price, N. Srebro, "Equality of opportunity in supervised learning", NIPS 2016,
        definition 2.1.
    """
    of_models, of_examples = (
        each.reshape(*each.shape[:-1], each.shape[-1] // 4, 2, 2) for each in (positive, counts)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = of_models / of_examples
        shares = of_models.sum(-1) / of_examples.sum(-1)
    odds = np.abs(rates[..., 0, :] - rates[..., 1, :]).max(-1)
    parity = np.abs(shares[..., 0] - shares[..., 1])
    return {PARITY: parity.mean(-1), ODDS: odds.mean(-1)}


def auc(scores: Floats, truth: NDArray[np.int64]) -> Floats:
    """Return the areas under the ROC curves of scores, (..., k): the share of pairs of a 1 and a 0
    in which the 1 has the higher score, half where they are equal. NaN where all are 1 or all 0.

    Args:
        scores: (..., n, k).
        truth: (n, k) of 0 and 1.
    """
    from scipy.stats import rankdata  # 35 ms at every start, for data with an adversary only

    ones = truth.sum(0)
    pairs = ones * (len(truth) - ones)
    ranks = (rankdata(scores, axis=-2) * truth).sum(-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(pairs > 0, (ranks - ones * (ones + 1) / 2) / pairs, np.nan))
