"""Evaluation of a run: in which rounds, its row of figures, and whether the run has reached its
goal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from dfl.config import Run
from dfl.core.errors import DivergedError, InputError
from dfl.core.profiling import Profiles, active, phase
from dfl.evaluation import metrics
from dfl.evaluation.goals import reached
from dfl.simulation.measure import row_of
from dfl.simulation.run_state import RunState, arrays_by_name, gathered
from dfl.store import logs
from dfl.store.callbacks import Callback, Outcome, Row

if TYPE_CHECKING:
    from dfl.comm.mpi import World
    from dfl.simulation.prepared import Prepared


def is_evaluated(t: int, run: Run) -> bool:
    """Return whether the state after t rounds is evaluated."""
    return t % run.eval_every == 0 or t > run.rounds - run.eval_last


@contextmanager
def evaluating(prepared: Prepared, callback: Callback | None) -> Iterator[Evaluator]:
    """Start the callback, log the run, and close the callback with the error that ends the run, if
    any.
    """
    evaluator = Evaluator(prepared, callback)
    notes = prepared.info.notes if prepared.info else ()
    try:
        with logs.opened(prepared.run, prepared.world, notes):
            yield evaluator
            evaluator.finish()
    except BaseException as error:
        if callback:
            callback.close(error)
        raise


class Evaluator:
    """Evaluates states when it is due, and passes the figures to a callback, which only rank 0 has.

    Attributes:
        done: whether the run has ended, by its rounds or its goal.
        sharing_all: whether all parameters are still shared, see `--share-all-until`.
        refused: the error of the callback about a round without an evaluation, by which all ranks
            stop at the next agreement.
        begun: time at which the run began, in seconds of `time.perf_counter`.
    """

    def __init__(self, prepared: Prepared, callback: Callback | None) -> None:
        self.prepared = prepared
        self.callback = callback
        self.begun = time.perf_counter()
        self.since = self.begun
        self.last: tuple[RunState, metrics.Figures | None] | None = None
        self.done = False
        self.sharing_all = True
        self.refused: InputError | None = None
        answer = prepared.world.from_root(self._start)
        self.has_callback = bool(answer)
        self.needs_models = answer == b"models"

    def _start(self) -> bytes:
        """Start the callback, and return what it watches: nothing, the figures, or models too."""
        if self.callback is None or self.prepared.info is None:
            return b""
        self.callback.start(self.prepared.info)
        return b"models" if self.callback.needs_models else b"figures"

    def evaluate(self, run_state: RunState) -> Iterator[Row]:
        """Yield a row of figures on the models after t rounds, if one is due.

        Raises:
            DivergedError: on every rank, if a loss or an accuracy of an honest peer is not finite.
        """
        run, world, t = self.prepared.run, self.prepared.world, run_state.t
        world.pulse.round = t
        logs.LOG.debug("round %d: %.6f s", t, time.perf_counter() - self.since)
        if isinstance(run.share_all_goal, int):
            self.sharing_all = t < run.share_all_goal
        if not is_evaluated(t, run):
            self._pass_round(t)
            self.since = time.perf_counter()
            return
        begun = time.perf_counter()
        with phase("evaluate"):
            figures, peers = row_of(run_state, self.prepared)
        logs.LOG.info("evaluation after round %d in %.2f s", t, time.perf_counter() - begun)

        def pass_on() -> bytes:
            if wrong := self._not_finite(peers):
                return json.dumps({"wrong": wrong}).encode()
            text = json.dumps({"round": t, "seconds": time.perf_counter() - self.begun} | figures)
            if self.callback and peers is not None:
                with phase("write"):
                    self.callback.row(Row(json.loads(text)))
                    self.callback.evaluated(t, peers)
            logs.LOG.info("%s", text)
            return text.encode()

        answer = json.loads(world.from_root(pass_on))
        if "wrong" in answer:
            raise DivergedError(
                f"{answer['wrong']} after round {t} while all models are finite: try a smaller "
                f"--lr (it is {run.lr}), or look at the data and the loss"
            )
        self._pass_models(run_state)
        row = Row(answer)
        self.done = t == run.rounds or (t > 0 and reached(row, run.goal))
        if not isinstance(run.share_all_goal, int) and reached(row, run.share_all_goal):
            self.sharing_all = False
        if self.done:  # not before: the state would be kept beside those to come
            self.last = run_state, peers
        yield row
        self.since = time.perf_counter()

    def finish(self) -> None:
        """Pass the last state to the callback, and close it."""
        self.prepared.world.pulse.round = None
        if not self.has_callback or self.last is None:
            return
        run_state, peers = self.last
        models = gathered(run_state, self.prepared)
        profile = _profiles(self.prepared.world)

        def pass_on() -> bytes:
            if self.callback and models is not None and peers is not None:
                state = {
                    n: np.ascontiguousarray(v) for n, v in arrays_by_name(run_state, models).items()
                }
                self.callback.finish(Outcome(peers, state, profile))
                self.callback.close(None)
            return b""

        self.prepared.world.from_root(pass_on)

    def _pass_round(self, t: int) -> None:
        """Pass a round without an evaluation to the callback, and keep its error: only rank 0 has
        it.
        """
        try:
            if self.callback:
                self.callback.round(t)
        except InputError as error:
            self.refused = error

    def _pass_models(self, run_state: RunState) -> None:
        """Pass the models of all peers to the callback, if it needs them."""
        if not self.needs_models:
            return
        models = gathered(run_state, self.prepared)

        def pass_on() -> bytes:
            if self.callback and models is not None:
                self.callback.evaluated_models(run_state.t, arrays_by_name(run_state, models))
            return b""

        self.prepared.world.from_root(pass_on)

    def _not_finite(self, peers: metrics.Figures | None) -> str:
        """Return what is not finite among the figures of honest peers, on rank 0."""
        info = self.prepared.info
        if not peers or not info:
            return ""
        return metrics.not_finite(peers, info.sizes, info.n_test, info.classes)


def _profiles(world: World) -> Profiles | None:
    """Return the profiles of all ranks on rank 0, if the run is profiled; None elsewhere."""
    profile = active()
    if profile is None:
        return None
    events = profile.events()
    mine = np.full((len(events), 1), world.rank)
    tables, everything = (
        world.gather(profile.table()[None]),
        world.gather(np.hstack([mine, events])),
    )
    return None if tables is None or everything is None else Profiles(tables, everything)
