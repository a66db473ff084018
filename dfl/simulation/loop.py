"""The round loop: peers train and exchange messages, and their models are evaluated."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dfl.comm.exchange import Net
from dfl.comm.mpi import connect
from dfl.config import Run
from dfl.core.errors import DivergedError, InputError
from dfl.core.isolation import isolated
from dfl.core.parse import shown
from dfl.core.profiling import Profile, profiled
from dfl.core.registry import is_own
from dfl.evaluation import metrics
from dfl.simulation import checkpointing
from dfl.simulation.defaults import settle
from dfl.simulation.evaluator import evaluating, is_evaluated
from dfl.simulation.heartbeats import alive
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.simulation.run_state import Form, RunState, begin, check_same_form, forms, narrowed
from dfl.store import logs
from dfl.store.callbacks import Callback, Callbacks, Row, as_callbacks
from dfl.store.resume import finished
from dfl.store.run_directory import refuse_unusable
from dfl.store.run_files import RunFiles

if TYPE_CHECKING:
    import torch

    from dfl.comm.network import Network
else:
    from dfl.core.lazy import torch


SERVER = -1
"""The number of the server among those that diverged, before the peers: the lowest is named."""


def rows_of_run(run: Run, callbacks: Sequence[Callback] = ()) -> Iterator[Row]:
    """Yield the rows of a run as `dfl.simulate` does, with no callback but the caller's and the one
    that writes `run.out`.
    """
    if not isinstance(run, Run):
        raise InputError(f"run must be a dfl.Run, not {shown(run)}: write dfl.Run(rounds=20)")
    world = connect(run.timeout)
    world.busy = True
    settled = settle(run, world.size).described()
    if done := world.from_root(lambda: _usable(run, callbacks, settled)):
        if not world.rank:
            warnings.warn(f"{done.decode()}: dfl.load reads it back", stacklevel=2)
        world.busy = False
        return
    with alive(world, run.out, run.timeout), logs.gathered(run):
        with logs.listening(world, run):
            prepared = prepare(run, world)
            callback, files = _callbacks(prepared, callbacks)
        rows = _rounds(prepared, callback, files)
        profile = _profile(prepared) if run.profile else None

        def leave() -> None:
            with logs.listening(world, run), isolated(run.threads):
                rows.close()

        atexit.register(leave)  # for a caller that keeps the iterator to the end of the program
        try:
            while True:
                with logs.listening(world, run), isolated(run.threads), profiled(profile):
                    row = next(rows, None)
                if row is None:
                    break
                yield row
        finally:  # also where the caller leaves
            if not sys.is_finalizing():  # when it has left, and modules are gone
                atexit.unregister(leave)
                leave()
    world.busy = False


def _usable(run: Run, callbacks: Sequence[Callback], settled: Run) -> bytes:
    """Refuse callbacks or a folder that cannot be used, on rank 0, before anything is written.

    Returns:
        One line where the run is finished, else nothing.
    """
    as_callbacks(callbacks)
    if run.out is not None:
        refuse_unusable(run.out, run.resume is not None, run.report)
    return finished(settled).encode()


def _callbacks(
    prepared: Prepared, callbacks: Sequence[Callback]
) -> tuple[Callback | None, RunFiles | None]:
    """Return all callbacks as one, and the one that writes the folder; (None, None) but on rank 0.

    Without a callback, the notes of the run are issued as warnings.
    """
    if prepared.info is None or prepared.progress is None:
        return None, None
    out = prepared.run.out
    files = RunFiles(out, prepared.progress) if out is not None else None
    every = (*((files,) if files else ()), *as_callbacks(callbacks))
    if not every:
        for note in prepared.info.notes:
            warnings.warn(note, stacklevel=3)
        return None, None
    return Callbacks(every), files


def _rounds(
    prepared: Prepared, callback: Callback | None, files: RunFiles | None
) -> Generator[Row, None, None]:
    run, algorithm, network = prepared.run, prepared.algorithm, prepared.network
    shared = prepared.task.parameter_layout.shared
    with evaluating(prepared, callback) as evaluator:
        run_state = checkpointing.restore(begin(prepared), prepared, evaluator)
        if run_state.t == 0:
            run_state.task.recompute_statistics(run_state.state.x)
        yield from evaluator.evaluate(run_state)
        while not evaluator.done:
            if not evaluator.sharing_all and run_state.task.parameter_layout.shared != shared:
                run_state = narrowed(run_state, prepared)
            t, task, state = run_state
            measured = is_evaluated(t + 1, run) or checkpointing.due(t + 1, run)
            task.solver.lr(t)  # every rank refuses a round without a rate, also one without peers
            _check_graph(run, network, t)
            net = Net(network, t, measured=measured)
            before = forms(state)
            state = algorithm.round(state, task.paced(net.work), net)
            error = _misformed(run, state, before)
            network.end_round(t)
            if measured and not error:  # training does not read running statistics
                task.recompute_statistics(state.x)
            run_state = RunState(t + 1, task, state)
            signal = _agree_after_round(run_state, prepared, error or evaluator.refused)
            checkpointing.keep(run_state, prepared, evaluator, files, signal)
            yield from evaluator.evaluate(run_state)
    network.close()


def _check_graph(run: Run, network: Network, t: int) -> None:
    """Refuse a graph of round t that has no mixing matrix by the rule of the run.

    Raises:
        InputError: on every rank, it is such a graph.
    """
    if not network.schedule.weights:
        return
    import topologies

    try:
        network.schedule.matrix(t)
    except topologies.GraphError as error:
        line = str(error).removeprefix(f"round {t} ")
        raise InputError(f"--topology {run.topology}, round {t}: {line}") from None


def _misformed(run: Run, state: object, before: Mapping[str, Form]) -> InputError | None:
    """Return the error of a state of another form than before a round; None for the same form."""
    try:
        check_same_form(f"--algorithm {run.algorithm}: what round returns", state, before)
    except InputError as error:
        return error
    return None


def _agree_after_round(run_state: RunState, prepared: Prepared, error: InputError | None) -> int:
    """Agree on what may end the run after a round: a state of another form, a callback's error, a
    model that is not finite, or a signal.

    Models of attackers may be anything.

    Args:
        run_state: the state after the round.
        prepared: what the run is made of.
        error: why this rank cannot go on.

    Returns:
        The number of the signal that stops the run on some rank; 0 for none.

    Raises:
        InputError: on every rank, if some rank cannot go on.
        DivergedError: on every rank, if the model of the server or of an honest peer is not finite.
    """
    none = prepared.layout.peers
    broken = none if error else min(_broken(run_state, prepared), default=none)
    # The smallest of -signal is the largest signal.
    lowest, minus_signal = prepared.world.agree(error, broken, -prepared.world.stop_signal)
    if lowest < none:
        rule = prepared.run.aggregator
        whose = "the server" if lowest == SERVER else f"peer {lowest}"
        raise DivergedError(
            f"{whose}'s model is no longer finite after round {run_state.t}: try a smaller --lr "
            f"(it is {prepared.run.lr}) or other messages"
            + (f", or check --aggregator {rule}" if is_own(rule) else "")
        )
    return -minus_signal


def _broken(run_state: RunState, prepared: Prepared) -> list[int]:
    """Return the honest peers of this rank, and `SERVER`, whose models are not finite."""
    task = run_state.task
    shared = metrics.not_finite_rows(run_state.state.x)
    personal = metrics.not_finite_rows(task.personal)
    has_server = prepared.algorithm.has_server
    broken = task.peers[personal if has_server else np.union1d(shared, personal)]
    honest = np.setdiff1d(broken, prepared.network.threat_model.attackers)
    server = [SERVER] if has_server and len(shared) else []
    return [*server, *honest.tolist()]


def _profile(prepared: Prepared) -> Profile:
    """Return a profile that waits for the device of this rank, if calls to it return at once."""
    device = prepared.task.device
    if device.type != "cuda":
        return Profile()
    return Profile(partial(torch.cuda.synchronize, device))
