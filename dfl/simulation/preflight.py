"""Checks of a run's components before round 0: of what they can do together, and of what they
return.

Faults are called for round 0, the attack and the aggregation rule with messages of zeros.
`dfl.simulation.rehearsal` measures what the exchange does to models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dfl.algorithms.assumptions import Assumption, Conditions
from dfl.comm.schedule import SAMPLED, MixingMatrices
from dfl.config import Run
from dfl.core.errors import InputError, one_line
from dfl.core.forms import called, require_form
from dfl.core.isolation import isolated
from dfl.core.parse import shown
from dfl.core.parts import map_parts, shape_of
from dfl.core.registry import flag, is_own
from dfl.environment.faults import Fault, RoundKey
from dfl.robust.aggregators import Aggregate, Updates
from dfl.robust.attacks import AttackView
from dfl.simulation.defaults import compresses, methods_that_apply, sends_no_numbers
from dfl.simulation.rehearsal import check_compressor, check_copies, compression_error
from dfl.training.losses import cross_entropy

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from scipy.sparse import csr_array

    import topologies
    from dfl.datasets.data import Data
    from dfl.simulation.components import Components


SLACK = 1e-3
"""How far the sum of probabilities may be from 1."""
NUMBERS = 64
"""Numbers of a message with which an aggregation rule is called."""


def check_components(
    run: Run,
    components: Components,
    data: Data,
    matrices: MixingMatrices,
) -> tuple[str, ...]:
    """Refuse what the components of a run cannot do, and return warnings, one line each.

    Args:
        run: the settled run.
        components: its components.
        data: the data set, which an attack may poison.
        matrices: the mixing matrices; none where peers have no neighbours.

    Raises:
        InputError: a component cannot do what the run needs.
    """
    assert run.peers is not None
    algorithm = components.algorithm
    _check_faults(run, components)
    lossy = any(each.touches in ("links", "peers") for each in components.faults)
    components.augment.check_parts(shape_of(data.train_inputs))
    if not data.classes:
        if components.loss is cross_entropy:
            _check_probabilities(data)
        _refuse_accuracies(run)
    reference = np.zeros(NUMBERS)
    uploads, _ = algorithm.traffic(run.peers, 0)
    senders = run.peers if matrices.weights else int(uploads)
    own_step = reference if matrices.weights or algorithm.server_data_rule else None
    notes: tuple[str, ...] = ()
    if "aggregator" in algorithm.applies:
        received = np.array([int(uploads)])
        if matrices.weights:
            seen = matrices.sample[: max(run.rounds, 1)]
            received = np.concatenate([np.diff(matrix.indptr) for matrix in seen])
        _check_rule(components.aggregator, int(received.min()), own_step)
        if lossy:
            _check_rule(
                components.aggregator, 1, own_step, f" where --faults {run.faults} leaves no more"
            )
        if matrices.endless and run.rounds > SAMPLED and np.ptp(received):
            notes = _check_later(run, components, own_step)
    _check_attack(run, components, data, senders, matrices.sample[:1])
    if not compresses(run) or not senders:
        return (*notes, *check_copies(run, components, matrices, lossy, 0.0))
    with isolated(run.threads):
        error, bias = compression_error(run, components)
    return (
        *notes,
        *check_copies(run, components, matrices, lossy, error),
        *check_compressor(run, components, error, bias),
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
            f"{methods_that_apply('aggregator', gossips=True)}"
        )
    if attack.falsifies and not senders:
        raise InputError(
            f"--attack {run.attack} falsifies messages, and --algorithm {run.algorithm} sends none"
        )
    if attack.falsifies and sends_no_numbers(run, algorithm):
        raise InputError(
            f"--attack {run.attack} falsifies messages, and has no part in --share nothing: leave "
            "it out"
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
        updates=_blank(senders, reference if algorithm.server_data_rule else None, 1),
        attackers=rows,
        owners=np.arange(senders),
        coordinates=slice(0, 1),
        seed=0,
        t=0,
        slot="",
    )
    if not attack.per_edge:
        what = f"--attack {run.attack}: {len(rows)} falsified messages of one number"
        sent = called(f"--attack {run.attack}", lambda: attack.falsify(view))
        require_form(what, sent, np.ndarray, (len(rows), 1))
        return
    (matrix,) = graph
    receivers, owners = matrix.nonzero()
    used = np.isin(owners, attackers) & (receivers != owners)
    edges = np.stack([owners[used], receivers[used]], axis=1).astype(np.int64)
    if len(edges):
        what = f"--attack {run.attack}: {len(edges)} falsified messages of one number"
        sent = called(f"--attack {run.attack}", lambda: attack.falsify_edges(view, matrix, edges))
        require_form(what, sent, np.ndarray, (len(edges), 1))


def check_assumptions(
    run: Run, components: Components, graph: topologies.WeightedGraph
) -> tuple[str, ...]:
    """Return warnings of what a method expects of a run and does not have, one line each.

    Args:
        run: the settled run.
        components: its components.
        graph: the graph of the peers.

    Raises:
        InputError: the run lacks what the method requires, or that is not stated by assumptions.
    """
    assert run.peers is not None
    algorithm, attack = components.algorithm, components.attack
    conditions = Conditions(
        graph.examples,
        graph.endless,
        graph.spectrum.smallest,
        lambda t: run.lr * components.lr_schedule(t, run.rounds),
        run.rounds,
        components.faults,
        attack.falsifies and len(attack.chosen(run.peers, run.seed)) > 0,
        graph.clusters is not None,
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


def _refuse_accuracies(run: Run) -> None:
    """Refuse an ensemble, and goals of accuracy, where labels are no classes."""
    why = "labels that are no classes have no accuracy"
    for goal in (f"--until {run.until}", f"--share-all-until {run.share_all_until}"):
        if "accuracy" in goal:
            raise InputError(f"{goal}: {why}, choose train_loss")
    if run.ensemble:
        raise InputError(f"--ensemble: {why}, leave it out")


def _check_probabilities(data: Data) -> None:
    """Refuse labels of several numbers that are no probabilities of classes.

    Raises:
        InputError: there is one in either half of the data.
    """
    for half, labels in (("training", data.train_labels), ("test", data.test_labels)):
        if labels.ndim != 2 or labels.dtype.kind != "f":  # which the loss refuses
            continue
        whole = np.abs(labels.sum(1, dtype=np.float64) - 1) <= SLACK
        wrong = np.flatnonzero(~(whole & (labels >= 0).all(1)))
        if len(wrong):
            label = labels[wrong[0]]
            numbers = ", ".join(f"{each:.3g}" for each in label[:3])
            more = ", ..." if len(label) > 3 else ""
            raise InputError(
                "--loss cross_entropy takes a label of several numbers as probabilities of the "
                "classes, which are at least 0 and add up to 1, and that of "
                f"{half} example {wrong[0]} is ({numbers}{more}): choose --loss squared_error"
            )


def _check_faults(run: Run, components: Components) -> None:
    """Refuse faults that do not apply to the algorithm, and call each in round 0.

    Raises:
        InputError: there is such a fault, or as `_check_fault`.
    """
    assert run.peers is not None
    faults, algorithm = components.faults, components.algorithm
    round_key = RoundKey(run.peers, run.seed, 0)
    on_links = any(each.touches == "links" for each in faults)
    if sends_no_numbers(run, algorithm) and on_links:
        raise InputError(f"--faults {run.faults} has no part in --share nothing: leave it out")
    if not algorithm.sends and ((algorithm.has_server and faults) or on_links):
        raise InputError(
            f"--faults {run.faults} has no part in --algorithm {run.algorithm}: leave it out"
        )
    for each in faults:
        _check_fault(each, round_key)


def _check_fault(fault: Fault, round_key: RoundKey) -> None:
    """Call a fault in a round, with the link of peer 0 to the server.

    Raises:
        InputError: it names a peer that does not exist, fails, or returns an array of another form.
    """
    peers, link = round_key.peers, np.array([round_key.peers], np.int64)
    name = f"--faults {fault.name if fault.name != Fault.name else type(fault).__name__}"
    down = called(name, lambda: fault.down(round_key))
    require_form(f"{name}: what down returns", down, np.ndarray, (peers,), np.dtype(bool))
    pace = called(name, lambda: fault.pace(round_key))
    require_form(f"{name}: what pace returns", pace, np.ndarray, (peers,))
    outside = pace[~((pace >= 0) & (pace <= 1))]
    if len(outside):
        raise InputError(f"{name}: what pace returns must be from 0 to 1, not {outside[0]:g}")
    lost = called(name, lambda: fault.loses(link, round_key))
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
        _check_rule(
            components.aggregator, 1, reference, f" where --topology {run.topology} draws no more"
        )
    except InputError as error:
        if not is_own(str(run.topology)):
            raise
        return (f"{error}: such a round ends the run",)
    return ()


def _check_rule(
    rule: Callable[[Updates], Aggregate],
    n: int,
    reference: NDArray[np.float64] | None,
    where: str = "",
) -> None:
    """Call the aggregation rule with n messages.

    Args:
        rule: the rule.
        n: the messages.
        reference: the server's or the receiver's own step, where the run has one.
        where: the end of the line if the rule refuses them.

    Raises:
        InputError: the rule refuses them or fails, or returns something else than an `Aggregate` of
            arrays.
    """
    try:
        result: object = rule(_blank(n, reference, NUMBERS))
    except InputError as error:
        raise InputError(f"{error}{where}") from None
    except Exception as error:
        raise InputError(f"--aggregator fails on {n} messages: {one_line(error)}") from error
    if not isinstance(result, Aggregate):
        raise InputError(
            f"--aggregator must return a dfl.robust.aggregators.Aggregate, not {shown(result)}"
        )
    what = f"of {n} messages of {NUMBERS} numbers"
    require_form(f"--aggregator: the row {what}", result.row, np.ndarray, (NUMBERS,))
    if result.scores is not None:
        require_form(f"--aggregator: the scores {what}", result.scores, np.ndarray, (n,))


def _blank(n: int, reference: NDArray[np.float64] | None, numbers: int) -> Updates:
    return Updates(np.zeros((n, numbers)), np.full(n, 1 / n), reference)
