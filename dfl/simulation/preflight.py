"""Checks of a run's components before round 0, and warnings about its exchange.

The attack and the aggregation rule are called with messages of zeros. Errors of the compressor are
measured on normal numbers. Where public copies are kept, and faults, the graph or coarse messages
may make them old, averaging is rehearsed without training, with the compressor of the run, to see
whether consensus distance still shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.algorithms.assumptions import Assumption, Conditions
from dfl.algorithms.replicas import average_replicas, initial_replicas
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.schedule import SAMPLED, Schedule, endless, examples
from dfl.comm.threat_model import ThreatModel
from dfl.compression import Exact, fitted
from dfl.config import Run
from dfl.core import randomness
from dfl.core.errors import InputError, in_one_line, one_line
from dfl.core.forms import require_form
from dfl.core.isolation import isolated
from dfl.core.layout import Layout
from dfl.core.parse import shown
from dfl.core.parts import map_parts, shape_of
from dfl.core.registry import flag, is_own
from dfl.environment.faults import Fault, RoundKey
from dfl.robust.aggregators import Aggregate, Updates
from dfl.robust.attacks import AttackView
from dfl.simulation.defaults import compresses

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

    from dfl.datasets.data import Data
    from dfl.simulation.components import Components
else:
    from dfl.core.lazy import torch


ROUNDS = 200
"""Most rounds of averaging that are rehearsed."""
WORK = 2**21
"""Most coordinates of messages in a rehearsal, beyond its first 20 rounds."""
COORDINATES = (64, 512)
"""Fewest and most coordinates of compressed messages in a rehearsal."""
MESSAGE = 4096
"""Coordinates of the one message whose compression error is measured."""
DRAWS = 8
"""How often it is sent, with other random numbers."""
COARSE = 0.05
"""Squared error of a message, relative to it, from which averaging is rehearsed on any graph."""
BIASED = 0.25
"""Squared error of the mean of messages, relative to them, from which a run is warned of."""


def rehearse(
    run: Run,
    components: Components,
    data: Data,
    weights: Sequence[csr_array],
    stationary: Sequence[NDArray[np.float64] | None] = (),
    possible: csr_array | None = None,
) -> tuple[str, ...]:
    """Refuse what the components of a run cannot do, and return warnings, one line each.

    Args:
        run: the settled run.
        components: its components.
        data: the data set, which an attack may poison.
        weights: the mixing matrices; none where peers have no neighbours.
        stationary: (P,) pi with pi W = pi for each of them; None where there is none.
        possible: as in `Schedule`.

    Raises:
        InputError: a component cannot do what the run needs.
    """
    assert run.peers is not None
    algorithm = components.algorithm
    lossy = _lossy(run, components)
    components.augment.check_parts(shape_of(data.train_inputs))
    for goal in (f"--until {run.until}", f"--share-all-until {run.share_all_until}"):
        if "accuracy" in goal and not data.classes:
            raise InputError(
                f"{goal}: labels that are no classes have no accuracy, choose train_loss"
            )
    reference = np.zeros(1)
    uploads, _ = algorithm.traffic(run.peers, 0)
    senders = run.peers if weights else int(uploads)
    own_step = reference if weights or algorithm.server_data_rule else None
    notes: tuple[str, ...] = ()
    if "aggregator" in algorithm.applies:
        received = np.array([int(uploads)])
        if weights:
            seen = examples(weights)[: max(run.rounds, 1)]
            received = np.concatenate([np.diff(matrix.indptr) for matrix in seen])
        _check_rule(components, int(received.min()), own_step)
        if lossy:
            _check_rule(components, 1, own_step, f" where --faults {run.faults} leaves no more")
        if endless(weights) and run.rounds > SAMPLED and np.ptp(received):
            notes = _check_later(run, components, own_step)
    _check_attack(run, components, data, senders, examples(weights)[:1])
    schedule = Schedule(weights, Layout(run.peers, 1), 0, stationary, possible)
    if not compresses(run) or not senders:
        return (*notes, *_check_copies(run, components, schedule, lossy, 0.0))
    with isolated(run.threads):
        error, bias = _compression_error(run, components)
    return (
        *notes,
        *_check_copies(run, components, schedule, lossy, error),
        *_check_compressor(run, components, error, bias),
    )


def _check_attack(
    run: Run, components: Components, data: Data, senders: int, graph: Sequence[csr_array]
) -> None:
    """Refuse an attack that has no part in the run, and call it with messages of zeros.

    Args:
        run: the settled run.
        components: its components.
        data: the data set, which an attack may poison.
        senders: how many peers send a message.
        graph: the mixing matrix of round 0; none where peers have no neighbours.

    Raises:
        InputError: it has no part, or returns something else than an array with a row for each
            message that attackers send.
    """
    assert run.peers is not None
    algorithm, attack = components.algorithm, components.attack
    reference = np.zeros(1)
    attackers = attack.chosen(run.peers, run.seed)
    if len(attackers):
        one = map_parts(lambda part: part[:1].copy(), data.train_inputs)
        attack.poison(one, data.train_labels[:1].copy(), data.classes)
    if attack.per_edge and not (graph and "aggregator" in algorithm.applies):
        raise InputError(
            f"--attack {run.attack} sends each neighbour a message of its own: choose --algorithm "
            "dfedavgm"
        )
    if attack.falsifies and not senders:
        raise InputError(
            f"--attack {run.attack} falsifies messages, and --algorithm {run.algorithm} sends none"
        )
    if attack.poisons and not algorithm.peers_train:
        raise InputError(
            f"--attack {run.attack} poisons what peers train on, and --algorithm {run.algorithm} "
            "trains no peer: leave it out"
        )
    if not attack.falsifies or not len(attackers):
        return
    # Fewer attackers than senders, where there are several: else all rows pass for theirs.
    rows = attackers if attack.per_edge else np.arange(min(len(attackers), max(1, senders - 1)))
    view = AttackView(
        updates=_blank(senders, reference if algorithm.server_data_rule else None),
        attackers=rows,
        ids=rows,
        coordinates=slice(0, 1),
        seed=0,
        t=0,
        slot="",
    )
    if not attack.per_edge:
        what = f"--attack {run.attack}: {len(rows)} falsified messages of one number"
        sent = _called(f"--attack {run.attack}", lambda: attack.falsify(view))
        require_form(what, sent, np.ndarray, (len(rows), 1))
        return
    (matrix,) = graph
    receivers, owners = matrix.nonzero()
    used = np.isin(owners, attackers) & (receivers != owners)
    edges = np.stack([owners[used], receivers[used]], axis=1).astype(np.int64)
    if len(edges):
        what = f"--attack {run.attack}: {len(edges)} falsified messages of one number"
        sent = _called(f"--attack {run.attack}", lambda: attack.falsify_edges(view, matrix, edges))
        require_form(what, sent, np.ndarray, (len(edges), 1))


def check_assumptions(
    run: Run,
    components: Components,
    weights: Sequence[csr_array],
    smallest: float,
    clustered: bool,
) -> tuple[str, ...]:
    """Return warnings of what a method expects of a run and does not have, one line each.

    Args:
        run: the settled run.
        components: its components.
        weights: the mixing matrices.
        smallest: their smallest eigenvalue.
        clustered: whether the topology states the clusters of the peers.

    Raises:
        InputError: the run lacks what the method requires, or that is not stated by assumptions.
    """
    assert run.peers is not None
    algorithm, schedule, attack = components.algorithm, components.lr_schedule, components.attack
    conditions = Conditions(
        examples(weights),
        endless(weights),
        smallest,
        lambda t: run.lr * schedule(t, run.rounds),
        run.rounds,
        components.faults,
        attack.falsifies and len(attack.chosen(run.peers, run.seed)) > 0,
        clustered,
    )

    for name in ("requires", "expects"):
        stated = getattr(algorithm, name)
        if not isinstance(stated, Mapping) or not all(isinstance(a, Assumption) for a in stated):
            raise InputError(
                f"--algorithm {run.algorithm}: {name} must be a dict of "
                f"dfl.algorithms.assumptions, not {shown(stated)}"
            )

    def lines(assumptions: Mapping[Assumption, str]) -> tuple[str, ...]:
        return tuple(
            f"{flag(each.setting)} {getattr(run, each.setting)}: --algorithm {run.algorithm} "
            f"assumes {each.text}: {why}"
            for each, why in assumptions.items()
            if not each.holds(conditions)
        )

    for line in lines(algorithm.requires):
        raise InputError(line)
    return lines(algorithm.expects)


def _check_copies(
    run: Run,
    components: Components,
    schedule: Schedule,
    lossy: bool,
    error: float,
) -> tuple[str, ...]:
    """Return warnings where public copies do not move in every round, or by coarse messages.

    Args:
        run: the settled run.
        components: its components.
        schedule: the mixing matrices.
        lossy: whether faults take messages away.
        error: the relative squared error of a message.

    Raises:
        InputError: the mixing matrices have no form in which copies are kept per edge.
    """
    assert run.peers is not None
    algorithm, weights = components.algorithm, examples(schedule.weights)
    if run.peers == 1 or not weights or algorithm.averaging_step is None:
        return ()
    per_edge = lossy or len(weights) > 1
    reversible = all(pi is not None for pi in schedule.stationary[: len(weights)])
    if not per_edge and (error < COARSE or not reversible):
        return ()
    if not reversible:
        raise InputError(
            f"--topology {run.topology} with --algorithm {run.algorithm}: in some round an edge "
            "has no edge back, and the weights are not doubly stochastic: choose "
            "--algorithm dfedavgm"
        )
    exact = isinstance(components.compressor, Exact)
    if exact and not lossy:
        return ()
    messages = max(1, max(matrix.nnz for matrix in weights))
    fewest, most = COORDINATES
    coordinates = 1 if exact else min(max(fewest, WORK // (ROUNDS * messages)), most)
    rounds = min(run.rounds, ROUNDS, 20 + WORK // (messages * coordinates))
    network = Network(
        Layout(run.peers, 1),
        schedule.weights,
        World(),
        ThreatModel(components.compressor, faults=components.faults),
        run.seed,
        stationary=schedule.stationary,
        possible=schedule.possible,
        shapes=((8, coordinates // 8),),
    )
    with isolated(run.threads):
        growth = _growth(network, algorithm.averaging_step, rounds, coordinates) if rounds else 0.0
    if growth < 2:
        return ()
    causes = [f"--faults {run.faults}"] * lossy
    causes += [f"--topology {run.topology}"] * (per_edge and not lossy)
    causes += [f"--compressor {run.compressor}"] * (not exact)
    return (
        f"with {' and '.join(causes)} peers average copies so old that consensus distance, without "
        f"training, grows {growth:.2g}-fold in {rounds} rounds: choose a gamma below "
        f"{algorithm.averaging_step:g}, "
        f"{'' if exact else 'finer messages, '}or --algorithm dfedavgm",
    )


def _check_compressor(
    run: Run, components: Components, error: float, bias: float
) -> tuple[str, ...]:
    """Return warnings of errors of messages that grow as copies feed them back, or that stay as
    nothing does.
    """
    if components.algorithm.averaging_step is None:
        if bias < BIASED:
            return ()
        return (
            f"messages of --compressor {run.compressor} are biased (their mean differs from normal "
            f"numbers by {math.sqrt(bias):.2g} of their norm), and --algorithm {run.algorithm} "
            "feeds no errors back: models may stay away from the optimum; choose finer messages or "
            "an unbiased compressor",
        )
    if error < 1:
        return ()
    return (
        f"messages of --compressor {run.compressor} do not contract (their squared error on normal "
        f"numbers is {error:.2g} times the numbers'), and the copies feed it back: consensus "
        "distance may grow; choose more bits, a smaller block or rounding=auto",
    )


def _compression_error(run: Run, components: Components) -> tuple[float, float]:
    """Return ||Q(x) - x||^2 / ||x||^2 and ||E Q(x) - x||^2 / ||x||^2 of normal numbers x.

    The first is that of one message. The second is estimated without bias, by products of errors
    of several messages.

    Raises:
        InputError: the compressor returns no bytes (q, B), or decodes them to something else than
            the messages (q, m).
    """
    generator = randomness.generator(run.seed, "rehearsed message")
    message = torch.from_numpy(generator.standard_normal((1, MESSAGE), np.float32))
    side = math.isqrt(MESSAGE)
    compressor = fitted(components.compressor, ((side, side),))
    draw = randomness.draws(run.seed, "rehearsed rounding", range(DRAWS))
    name, messages = f"--compressor {run.compressor}", message.expand(DRAWS, -1).contiguous()
    encoded = _called(name, lambda: compressor.encode(messages, draw))
    what = f"{name}: {DRAWS} encoded messages"
    require_form(what, encoded, torch.Tensor, (DRAWS, "B"), torch.uint8)
    decoded = _called(name, lambda: compressor.decode(encoded, MESSAGE, message.dtype))
    what = f"{name}: {DRAWS} decoded messages"
    require_form(what, decoded, torch.Tensor, (DRAWS, MESSAGE), message.dtype)
    errors = decoded - message
    squares = float(errors.square().sum())
    products = float(errors.sum(0).square().sum()) - squares
    norm = float(message.square().sum())
    return float(errors[0].square().sum()) / norm, products / (DRAWS * (DRAWS - 1)) / norm


def _growth(network: Network, step: float, rounds: int, coordinates: int) -> float:
    """Return the growth of consensus distance without training: its maximum over the last tenth of
    the rounds.

    Peers start from random models of so many coordinates, with public copies of zeros. The error of
    a compressor is proportional to the message, so the growth does not depend on the size of the
    differences.
    """
    start = randomness.generator(network.seed, "rehearsal").standard_normal(
        (network.layout.peers, coordinates)
    )
    x = torch.from_numpy(start)
    state = initial_replicas(x, torch.zeros_like(x), Net(network, 0))
    spread = [float(x.std(0).square().mean())]
    for t in range(rounds):
        state = average_replicas(state, state.x.clone(), Net(network, t, observed=False), step)
        spread.append(float(state.x.std(0).square().mean()))
    return math.sqrt(max(spread[-(1 + rounds // 10) :]) / spread[0])


def _lossy(run: Run, components: Components) -> bool:
    """Return whether faults may leave a peer with no message but its own.

    Raises:
        InputError: faults that do not apply to the algorithm, or that name a peer that does not
            exist.
    """
    assert run.peers is not None
    faults, algorithm = components.faults, components.algorithm
    round_key = RoundKey(run.peers, run.seed, 0)
    silent = not algorithm.sends
    if silent and (
        (algorithm.has_server and faults) or any(each.touches == "links" for each in faults)
    ):
        raise InputError(
            f"--faults {run.faults} has no part in --algorithm {run.algorithm}: leave it out"
        )
    for each in faults:
        _check_fault(each, round_key)
    return any(each.touches in ("links", "peers") for each in faults)


def _check_fault(fault: Fault, round_key: RoundKey) -> None:
    """Call a fault in a round, with the link of peer 0 to the server.

    Raises:
        InputError: it names a peer that does not exist, fails, or returns an array of another form.
    """
    peers, link = round_key.peers, np.array([round_key.peers], np.int64)
    name = f"--faults {fault.name if fault.name != Fault.name else type(fault).__name__}"
    down = _called(name, lambda: fault.down(round_key))
    require_form(f"{name}: what down returns", down, np.ndarray, (peers,), np.dtype(bool))
    pace = _called(name, lambda: fault.pace(round_key))
    require_form(f"{name}: what pace returns", pace, np.ndarray, (peers,))
    outside = pace[~((pace >= 0) & (pace <= 1))]
    if len(outside):
        raise InputError(f"{name}: what pace returns must be from 0 to 1, not {outside[0]:g}")
    lost = _called(name, lambda: fault.loses(link, round_key))
    require_form(f"{name}: what loses returns", lost, np.ndarray, (1,), np.dtype(bool))


def _check_later(
    run: Run, components: Components, reference: NDArray[np.float64] | None
) -> tuple[str, ...]:
    """Check the aggregation rule for graphs of later rounds, which may leave a peer its own message
    alone.

    Returns:
        A warning if the rule needs more and the topology is the caller's own, whose least number of
        messages is not known.

    Raises:
        InputError: the rule needs more, and the topology is a registered one, as `random_out`.
    """
    try:
        _check_rule(components, 1, reference, f" where --topology {run.topology} draws no more")
    except InputError as error:
        if not is_own(str(run.topology)):
            raise
        return (f"{error}: such a round ends the run",)
    return ()


def _check_rule(
    components: Components, n: int, reference: NDArray[np.float64] | None, where: str = ""
) -> None:
    """Call the aggregation rule with n messages.

    Args:
        components: of the run.
        n: the messages.
        reference: the server's or the receiver's own step, where the run has one.
        where: the end of the line if the rule refuses them.

    Raises:
        InputError: the rule refuses them or fails, or returns something else than an `Aggregate` of
            arrays.
    """
    try:
        result = components.aggregator(_blank(n, reference))
    except InputError as error:
        raise InputError(f"{error}{where}") from None
    except Exception as error:
        raise InputError(f"--aggregator fails on {n} messages: {one_line(error)}") from error
    if not isinstance(result, Aggregate):
        raise InputError(
            f"--aggregator must return a dfl.robust.aggregators.Aggregate, not {shown(result)}"
        )
    what = f"of {n} messages of one number"
    require_form(f"--aggregator: the row {what}", result.row, np.ndarray, (1,))
    if result.scores is not None:
        require_form(f"--aggregator: the scores {what}", result.scores, np.ndarray, (n,))


def _called(what: str, call: Callable[[], Any]) -> Any:
    """Return what a component returns, and refuse in one line one that fails."""
    with in_one_line(f"{what} fails"), np.errstate(all="ignore"):
        return call()


def _blank(n: int, reference: NDArray[np.float64] | None) -> Updates:
    return Updates(np.zeros((n, 1)), np.full(n, 1 / n), reference)
