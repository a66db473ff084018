"""Defaults that depend on the algorithm: peers, graph, mixing, compressor, aggregator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dfl.algorithms import ALGORITHMS, Algorithm, Method
from dfl.compression import COMPRESSORS, Exact
from dfl.config import Run, TopologySpec
from dfl.core.errors import InputError
from dfl.core.registry import choose, flag, name_of, shown_spec
from dfl.robust.aggregators import AGGREGATORS, ignores_weights, needs_reference


def settle(run: Run, ranks: int) -> Run:
    """Return the same run with peers, algorithm, graph, compressor and aggregator written out.

    Args:
        run: the settings as they were given.
        ranks: the number of ranks, which is the number of peers where none is given.

    Raises:
        InputError: settings that contradict each other, or that have no part in the algorithm.
    """
    if run.bits is not None and run.compressor is not None:
        raise InputError(
            f"--bits {run.bits} and --compressor {shown_spec(run.compressor)} both choose a "
            "compressor: give one of them"
        )
    if run.local_epochs is not None and run.local_steps is not None:
        raise InputError(
            f"--local-epochs {run.local_epochs} and --local-steps {run.local_steps} contradict: "
            "give one of them"
        )
    compressor = "none" if run.compressor is None else run.compressor
    if run.bits is not None:
        compressor = f"quantize:bits={run.bits}"
    default = "dfedavgm" if run.bits is None else "qdfedavgm"
    settled = replace(
        run,
        algorithm=default if run.algorithm is None else run.algorithm,
        compressor=compressor,
        bits=None,
        peers=_peers(run) or ranks,
    )
    method = _method(settled.algorithm)
    if method is None:  # it is refused where components are chosen
        return settled
    settled = replace(
        settled,
        aggregator=method.default_aggregator if run.aggregator is None else run.aggregator,
        topology=_topology(run, method)
        if run.topology is None and method.gossips
        else run.topology,
        mixing=method.default_mixing if run.mixing is None and method.gossips else run.mixing,
    )
    if isinstance(compressor, str):
        choose("--compressor", compressor, COMPRESSORS)  # a wrong name is refused as one
    _refuse_idle(run, settled, method)
    return settled


def _refuse_idle(run: Run, settled: Run, method: Method) -> None:
    """Refuse settings that have no part in the run.

    Args:
        run: the settings as they were given.
        settled: the same run, settled.
        method: its method.

    Raises:
        InputError: there is such a setting.
    """

    def given(field: str) -> str:
        if field == "compressor" and run.bits is not None:
            return f"--bits {run.bits}"
        return f"{flag(field)} {shown_spec(getattr(settled, field))}"

    if compresses(settled) and "compressor" not in method.applies:
        others = methods_that_apply("compressor", gossips=method.gossips)
        raise InputError(
            f"{given('compressor')} has no part in --algorithm {name_of(settled.algorithm)}: leave "
            f"it out, or choose --algorithm {others}{_stated(method, 'compressor')}"
        )
    if settled.examples_per_peer is not None and _parts(settled) is not None:
        raise InputError(
            f"{given('examples_per_peer')} has no part in --partition as indices, which state the "
            "examples of every peer: leave it out"
        )
    for field in _idle(settled, method):
        raise InputError(
            f"{given(field)} has no part in --algorithm {name_of(settled.algorithm)}: leave it out"
            f"{_stated(method, field)}"
        )
    if sends_no_numbers(settled, method):
        for field in _on_messages(settled, method):
            raise InputError(f"{given(field)} has no part in --share nothing: leave it out")
    option = method.weighting_option
    if option and _states(settled.aggregator, ignores_weights):
        raise InputError(
            f"--algorithm {name_of(settled.algorithm)}: {option} has no part in --aggregator "
            f"{name_of(settled.aggregator)}, which ignores weights: leave it out"
        )


def sends_no_numbers(run: Run, method: Method) -> bool:
    """Return whether the messages of a method have no numbers, as peers never share a parameter.

    Args:
        run: the settled run.
        method: its method; False for one that sends no messages.
    """
    nothing = run.share == "nothing" and run.share_all_goal == 0
    return method.sends and nothing and not any(method.lengths(0, ()))


def methods_that_apply(field: str, *, gossips: bool) -> str:
    """Return the names of the methods that apply `compressor` or `aggregator`, for messages.

    Args:
        field: which of the two.
        gossips: whether the methods are those whose peers send messages on a graph.
    """
    return " or ".join(
        name
        for name, each in ALGORITHMS.items()
        if field in each.applies and each.gossips == gossips
    )


def _stated(method: Method, field: str) -> str:
    """Return the end of a message about what a method does not apply: a method of the caller's own
    may apply it and not state so. It is "" for other messages.
    """
    own = not type(method).__module__.startswith("dfl.")
    unstated = field in ("compressor", "aggregator") and field not in method.applies
    return ", or state in `applies` that the method applies it" if own and unstated else ""


def compresses(run: Run) -> bool:
    """Return whether a settled run has a compressor."""
    if isinstance(run.compressor, str):
        return name_of(run.compressor) != "none"
    return not isinstance(run.compressor, Exact)


def _method(algorithm: object) -> Method | None:
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str) or name_of(algorithm) not in ALGORITHMS:
        return None
    method: Method = choose("--algorithm", algorithm, ALGORITHMS)()
    return method


def _peers(run: Run) -> int | None:
    """Return the number of peers that a run states, by itself, or by a graph or a partition that is
    an object.
    """
    if run.peers is not None:
        return run.peers
    if isinstance(run.topology, str | None) and isinstance(run.mixing, str | None):
        return _parts(run)
    from dfl.simulation.given_objects import peers_of

    of_graph = peers_of(run.topology, run.mixing)
    return _parts(run) if of_graph is None else of_graph


def _parts(run: Run) -> int | None:
    """Return the number of peers of a partition that is given as indices; None for another."""
    if isinstance(run.partition, str):
        return None
    from dfl.datasets.given import parts_given

    return parts_given(run.partition)


def _topology(run: Run, method: Method) -> TopologySpec:
    """Return the graph of a run that states none: that of its mixing matrix, or the method's."""
    if method.topology is not None:
        return method.topology
    if isinstance(run.mixing, str | None) or callable(run.mixing):
        return method.default_topology
    from dfl.simulation.given_objects import graphs_of

    return graphs_of(run.mixing)


def _idle(run: Run, method: Method) -> Iterator[str]:
    """Yield the fields of a settled run that have no part in its algorithm."""
    if not method.gossips:
        yield from (each for each in ("topology", "mixing") if getattr(run, each) is not None)
    if not method.mixes and isinstance(run.mixing, str) and run.mixing != method.default_mixing:
        yield "mixing"  # a matrix gives the graph
    if method.topology not in (None, run.topology):
        yield "topology"
    if not _is_default_aggregator(run, method) and (
        "aggregator" not in method.applies
        or _states(method.default_aggregator, needs_reference)
        or (method.has_server and _states(run.aggregator, needs_reference))
    ):
        yield "aggregator"
    if method.has_server and run.goal is not None and run.goal.column == "consensus_distance":
        yield "until"
    if run.share != "all" and not (method.sends or (run.share == "nothing" and method.peers_train)):
        yield "share"
    if run.init == "independent" and method.has_server:
        yield "init"
    if _has_links(run) and method.has_server and not method.sends:
        yield "links"


def _on_messages(run: Run, method: Method) -> Iterator[str]:
    """Yield the fields of a settled run that act on messages; attacks and faults are components
    first, as some act on peers.
    """
    if compresses(run):
        yield "compressor"
    if not _is_default_aggregator(run, method):
        yield "aggregator"
    if _has_links(run):
        yield "links"


def _is_default_aggregator(run: Run, method: Method) -> bool:
    return isinstance(run.aggregator, str) and name_of(run.aggregator) == method.default_aggregator


def _has_links(run: Run) -> bool:
    return not (isinstance(run.links, str) and run.links == "none")


def _states(aggregator: object, fact: Callable[[Any], bool]) -> bool:
    """Return whether an aggregation rule, a spec or an object, states a fact about itself."""
    if not isinstance(aggregator, str):
        return callable(aggregator) and fact(aggregator)
    name = name_of(aggregator)
    return name in AGGREGATORS and fact(AGGREGATORS[name])
