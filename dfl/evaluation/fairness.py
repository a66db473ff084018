"""How unlike does a model treat two groups, and how well can what it has learned tell them apart?

Plain functions of arrays over n examples. A group is a protected attribute, 0 or 1 for every
example.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness

HELD = 0.2
"""Share of the training rows that a probe is stopped and chosen by."""
EPOCHS, PATIENCE = 60, 5
"""Epochs of a probe's network at most, and how many may bring nothing before it is stopped."""
FEWEST = 10
"""Training rows of either value that a probe needs."""

Floats = NDArray[np.float64]
Bits = NDArray[np.int64] | NDArray[np.bool_]
"""(n,) of 0 and 1, or (n, k)."""
Pair = tuple[Floats, Bits]
"""Representations (n, m) with one attribute (n,)."""


def auc(scores: NDArray[Any], truth: Bits) -> float:
    """Area under the ROC curve: how probably a random 1 scores higher than a random 0, ties counted
    as half.

    Args:
        scores: (n,), higher where a 1 is thought more probable.
        truth: (n,) of 0 and 1.

    Returns:
        From 0 to 1, 0.5 for scores that know nothing; NaN where truth is not both.

    Source:
        J. A. Hanley, B. J. McNeil, "The meaning and use of the area under a ROC curve", Radiology
        143, 1982.
    """
    from sklearn.metrics import roc_auc_score

    ones = np.count_nonzero(truth)
    return float(roc_auc_score(truth, scores)) if 0 < ones < len(truth) else float("nan")


def demographic_parity_gap(decisions: Bits, group: Bits) -> float:
    """|P(d = 1 | z = 1) - P(d = 1 | z = 0)|, how much more often one group is chosen than the
    other.

    Args:
        decisions: (n,), d.
        group: (n,), z.

    Returns:
        From 0 to 1, 0 is parity; NaN where a group is empty.

    Source:
        C. Dwork, M. Hardt, T. Pitassi, O. Reingold, R. Zemel, "Fairness through awareness", ITCS
        2012 (statistical parity).
    """
    return abs(_rate(decisions, group == 1) - _rate(decisions, group == 0))


def equalised_odds_gap(decisions: Bits, truth: Bits, group: Bits) -> float:
    """max over y of |P(d = 1 | y, z = 1) - P(d = 1 | y, z = 0)|: the larger of the gaps in true and
    false positives.

    Args:
        decisions: (n,), d.
        truth: (n,), y.
        group: (n,), z.

    Returns:
        From 0 to 1, 0 is equalised odds; NaN where a group lacks one of the labels.

    Source:
        M. Hardt, E. Price, N. Srebro, "Equality of opportunity in supervised learning", NIPS 2016,
        definition 2.1.
    """
    gaps = [demographic_parity_gap(decisions[truth == y], group[truth == y]) for y in (0, 1)]
    return float(np.max(gaps))  # NaN if one is


def probe_auc(
    train_h: NDArray[Any], train_z: Bits, test_h: NDArray[Any], test_z: Bits, seed: int
) -> Floats:
    """How well protected attributes can be read from frozen representations: the AUC of a probe
    fitted afterwards.

    An adversary that fails may only be poorly trained; a probe is trained to its end. Two are
    fitted for every
    attribute: logistic regression, which is better where what there is to see is linear (0.84
        against 0.83 on planted
    directions, 15,000 rows of 32), and a network of two layers of 64, which is better where it is
    not (0.86 against 0.50 on a planted product; 0.89 against 0.80 for the sex of Adult in a trained
    network's last layer). A fifth of the training rows, held out of both fits, decides after which
    epoch the network is taken and which of the two is. They are compared by their AUC, since by
    accuracy a probe of a rare attribute would be stopped at saying no to all. Test rows decide
    nothing.

    Args:
        train_h: (n, m) representations to learn from.
        train_z: (n, k) attributes, 0 or 1.
        test_h, test_z: those that the AUC is of.
        seed: the run's seed.

    Returns:
        (k,) from 0 to 1, about 0.5 where nothing can be read; NaN for an attribute that is the same
        in all test rows or has fewer than ten training rows of either value.

    Source:
        P. P. Liang et al., "Think locally, act globally", arXiv 2001.01523, section 3.3 ("post-fit
        classifier"); Y. Elazar, Y. Goldberg, "Adversarial removal of demographic attributes from
        text data", EMNLP 2018.
    """
    mean, deviation = train_h.mean(0, dtype=np.float64), train_h.std(0, dtype=np.float64)
    scaled, seen = ((h - mean) / np.where(deviation > 0, deviation, 1) for h in (train_h, test_h))
    return np.array(
        [_probe_auc((scaled, z), (seen, test_z[:, k]), seed, k) for k, z in enumerate(train_z.T)]
    )


def _rate(decisions: Bits, rows: NDArray[np.bool_]) -> float:
    return float(decisions[rows].mean()) if rows.any() else float("nan")


def _probe_auc(train: Pair, test: Pair, seed: int, k: int) -> float:
    ones = np.count_nonzero(train[1])
    if min(ones, len(train[1]) - ones) < FEWEST:
        return float("nan")
    state = int(randomness.generator(seed, "probe", k).integers(1 << 31))
    return auc(_scores(*train, test[0], state), test[1])


def _scores(h: Floats, z: Bits, seen: Floats, state: int) -> Floats:
    """What the probe that does best on the held-out rows of h makes of `seen`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier

    x, held, y, truth = train_test_split(
        h, z.astype(np.int64), test_size=HELD, stratify=z, random_state=state
    )
    line = LogisticRegression(max_iter=1000).fit(x, y)
    best = auc(line.decision_function(held), truth)
    scores: Floats = line.decision_function(seen)
    net = MLPClassifier(
        (64, 64), batch_size=min(500, len(x)), learning_rate_init=0.005, random_state=state
    )
    reached, waited = 0.0, 0
    for _ in range(EPOCHS):
        net.partial_fit(x, y, classes=(0, 1))
        now = auc(net.predict_proba(held)[:, 1], truth)
        reached, waited = (now, 0) if now > reached else (reached, waited + 1)
        if now > best:
            best, scores = now, net.predict_proba(seen)[:, 1]
        if waited == PATIENCE:
            break
    return scores
