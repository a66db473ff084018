"""Can the attack and the aggregator of a run do what they will be asked? Shown before it, on words of zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dfl.aggregators import Words
from dfl.attacks import Seen
from dfl.config import Run
from dfl.errors import InputError
from dfl.faults import Today

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

    from dfl.datasets.data import Data
    from dfl.setup import Parts


def rehearse(run: Run, parts: Parts, data: Data, weights: Sequence[csr_array]) -> None:
    """Show the attack and the aggregator what they will see, so that what they cannot do is refused now.

    Args:
        run, parts: the settled run, and its components.
        data: what attackers spoil.
        weights: the mixing matrices; none where peers speak to a server.

    Raises:
        InputError: something that they cannot do.
    """
    assert run.peers is not None
    algorithm, attack, hindered = parts["algorithm"], parts["attack"], _hindered(run, parts)
    parts["augment"].check(data.train_inputs.shape[1:])
    for goal in (f"--until {run.until}", f"--pretrain {run.pretrain}"):
        if "accuracy" in goal and not data.classes:
            raise InputError(f"{goal}: labels that are no classes have no accuracy, choose train_loss")
    liars, trusted = attack.chosen(run.peers, run.seed), np.zeros(1)
    n, _ = algorithm.traffic(run.peers, 0)
    heard = min(int((np.diff(matrix.indptr)).min()) for matrix in weights) if weights else int(n)
    said = run.peers if weights else int(n)
    if "aggregator" in algorithm.takes:
        _rule(run, parts, (heard, 1) if hindered else (heard,), trusted if weights or algorithm.root_rule else None)
    if len(liars):
        attack.poison(data.train_inputs[:1], data.train_labels[:1], data.classes)
    if attack.per_edge and not (weights and "aggregator" in algorithm.takes):
        raise InputError(f"--attack {run.attack} tells neighbours different things: choose --algorithm dfedavgm")
    if attack.speaks and not said:
        raise InputError(f"--attack {run.attack} lies in messages, and --algorithm {run.algorithm} sends none")
    if attack.speaks and not attack.per_edge and len(liars):
        bad = np.arange(min(len(liars), said))
        attack.say(Seen(_blank(said, trusted if algorithm.root_rule else None), bad, bad, slice(0, 1), (0, 0, "")))


def _hindered(run: Run, parts: Parts) -> bool:
    """Whether faults may leave a listener with a single word.

    Raises:
        InputError: faults that have no part in the algorithm, or that befall peers that there are not.
    """
    assert run.peers is not None
    faults, algorithm, today = parts["faults"], parts["algorithm"], Today(run.peers, run.seed, 0)
    alone = algorithm.traffic(run.peers, 1) == (0, 0)
    if alone and ((algorithm.serves and faults) or any(each.touches == "links" for each in faults)):
        raise InputError(f"--faults {run.faults} has no part in --algorithm {run.algorithm}: leave it out")
    for each in faults:
        each.down(today)
        each.pace(today)
    return any(each.touches in ("links", "peers") for each in faults)


def _rule(run: Run, parts: Parts, words: Sequence[int], trusted: NDArray[np.float64] | None) -> None:
    """Show the aggregator some numbers of words; those after the first are what faults may leave of them."""
    for n in words:
        after = "" if n == words[0] else f" where --faults {run.faults} leaves no more"
        try:
            parts["aggregator"](_blank(n, trusted))
        except InputError as error:
            raise InputError(f"{error}{after}") from None


def _blank(n: int, trusted: NDArray[np.float64] | None) -> Words:
    return Words(np.zeros((n, 1)), np.full(n, 1 / n), trusted)
