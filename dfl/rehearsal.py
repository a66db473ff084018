"""Can the components of a run do what they will be asked? The attack and the aggregator are shown messages of zeros.

Where copies are kept per edge, averaging is rehearsed without training, under the faults and with the compressor of
the run, to see whether it still brings the peers together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dfl import keys
from dfl.aggregators import Words
from dfl.attacks import Seen
from dfl.compressors import Exact
from dfl.config import Run
from dfl.errors import InputError
from dfl.faults import Today
from dfl.isolation import isolated
from dfl.layout import Layout
from dfl.mixing import weigh
from dfl.mpi import World
from dfl.network import Network, Speech

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

    from dfl.datasets.data import Data
    from dfl.setup import Parts
else:
    from dfl.lazy import torch


ROUNDS, WORK = 200, 2**21
"""Rounds of averaging that are rehearsed at the most, and coordinates of messages in all of them."""
FEWEST, MOST = 64, 512
"""Coordinates of the messages that are rehearsed where they are compressed."""
NUMBERS = 4096
"""Coordinates of the message that is rehearsed."""


def rehearse(
    run: Run,
    parts: Parts,
    data: Data,
    weights: Sequence[csr_array],
    stationary: Sequence[NDArray[np.float64] | None] = (),
) -> tuple[str, ...]:
    """Show the attack and the aggregator what they will see, so that what they cannot do is refused now.

    Args:
        run, parts: the settled run, and its components.
        data: what attackers spoil.
        weights: the mixing matrices; none where peers speak to a server.
        stationary: (P,) pi with pi W = pi for each of them.

    Returns:
        What to warn of, one line each.

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
    return (*_old_copies(run, parts, weights, stationary, hindered), *_coarse_messages(run, parts))


def _old_copies(
    run: Run,
    parts: Parts,
    weights: Sequence[csr_array],
    stationary: Sequence[NDArray[np.float64] | None],
    hindered: bool,
) -> tuple[str, ...]:
    """What to warn of where public copies are kept per edge, and do not move in every round.

    Raises:
        InputError: the weights have no form in which copies are kept per edge.
    """
    assert run.peers is not None
    algorithm = parts["algorithm"]
    if run.peers == 1 or not weights or algorithm.step is None or not (hindered or len(weights) > 1):
        return ()
    if any(pi is None for pi in stationary):
        raise InputError(
            f"--topology {run.topology} with --algorithm {run.algorithm}: in some round peers hear others who hear "
            "nothing from them in turn, by weights that are not doubly stochastic: choose --algorithm dfedavgm"
        )
    exact = isinstance(parts["compressor"], Exact)
    if exact and not hindered:
        return ()
    messages = max(1, max(matrix.nnz for matrix in weights))
    coordinates = 1 if exact else min(max(FEWEST, WORK // (ROUNDS * messages)), MOST)
    rounds = min(run.rounds, ROUNDS, 20 + WORK // (messages * coordinates))
    network = Network(
        Layout(run.peers, 1),
        weights,
        World(),
        Speech(parts["compressor"], faults=parts["faults"]),
        run.seed,
        stationary=stationary,
    )
    with isolated(run.threads):
        grown = _growth(network, algorithm.step, rounds, coordinates) if rounds else 0.0
    if grown < 2:
        return ()
    cause = f"--faults {run.faults}" if hindered else f"--topology {run.topology}"
    coarse = "" if exact else f" and --compressor {run.compressor}"
    return (
        f"with {cause}{coarse} peers average copies so old that disagreement which training does not reduce "
        f"grows {grown:.2g}-fold in {rounds} rounds: choose a gamma below {algorithm.step:g}, "
        f"{'' if exact else 'more bits, '}or --algorithm dfedavgm",
    )


def _coarse_messages(run: Run, parts: Parts) -> tuple[str, ...]:
    """What to warn of where public copies feed back the errors of messages that do not contract."""
    if parts["algorithm"].step is None:
        return ()
    with isolated(run.threads):
        ratio = _lost(run, parts)
    if ratio < 1:
        return ()
    return (
        f"messages of --compressor {run.compressor} lose more than they hold (their squared error on normal numbers is "
        f"{ratio:.2g} of these), and the copies feed it back: disagreement may grow; choose more bits, a smaller "
        "block or rounding=auto",
    )


def _lost(run: Run, parts: Parts) -> float:
    """Return the squared error of a message of normal numbers, as a share of their squares."""
    values = keys.generator(run.seed, "rehearsed message").standard_normal((1, NUMBERS), np.float32)
    message, compressor = torch.from_numpy(values), parts["compressor"]

    def draw(rows: slice, places: slice) -> torch.Tensor:
        return keys.bits(run.seed, "rehearsed rounding", [0], n=places)

    received = compressor.decode(compressor.encode(message, draw), NUMBERS, message.dtype)
    return float((received - message).square().sum() / message.square().sum())


def _growth(network: Network, step: float, rounds: int, coordinates: int) -> float:
    """Return by what factor disagreement grows where nobody trains: its maximum over the last tenth of the rounds.

    Peers start from models of as many coordinates that differ by chance, and average copies kept per edge as
    `QDFedAvgM` does, with messages of the run's compressor. Its error is proportional to the message, so the factor
    does not depend on how large the differences are.
    """
    start = keys.generator(network.seed, "rehearsal").standard_normal((network.layout.peers, coordinates))
    x, compressor = torch.from_numpy(start), network.speech.compressor
    out = torch.zeros(len(network.union.out), coordinates, dtype=x.dtype)
    into = torch.zeros(len(network.union.into), coordinates, dtype=x.dtype)
    spread = [float(x.std(0).square().mean())]
    for t in range(rounds):
        plan = network.edge_plan(t)
        moved = x[plan.owner] - out[plan.out]
        draw = partial(_rounding, network.seed, plan.ids, t)
        moved = compressor.decode(compressor.encode(moved, draw), coordinates, moved.dtype)
        sent, came = (
            (moved, moved[plan.arrange])
            if plan.arrives is None
            else (
                moved * torch.from_numpy(plan.arrives[0])[:, None],
                moved[plan.arrange] * torch.from_numpy(plan.arrives[1])[:, None],
            )
        )
        out[plan.out] += sent
        into[plan.into] += came
        x = x + step * (weigh((plan.pull, into)) - weigh((plan.push, out)))
        spread.append(float(x.std(0).square().mean()))
    return math.sqrt(max(spread[-(1 + rounds // 10) :]) / spread[0])


def _rounding(seed: int, edges: NDArray[np.int64], t: int, rows: slice, places: slice) -> torch.Tensor:
    """Random bits of the messages of some edges in a rehearsed round."""
    return keys.bits(seed, "rehearsed edges", edges[rows], t, n=places)


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
