"""Who looks at the states that a run goes through, when, and when has it gone far enough?"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.config import Run
from dfl.core.errors import DivergedError
from dfl.evaluation import metrics
from dfl.evaluation.ensembles import Ensemble
from dfl.store import logs

if TYPE_CHECKING:
    from dfl.reporting.report import Report
    from dfl.simulation.loop import Setting

COLUMNS = (
    "round", "seconds", "train_loss", "accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_std",
    "accuracy_mean_model", "local_accuracy_mean", "consensus_distance", "payload_bytes", "wire_bytes",
)  # fmt: skip
"""The columns of metrics.csv; behind them come sim_seconds, if asked for, and those of the run or its algorithm."""


def due(t: int, run: Run) -> bool:
    """Whether the state after t rounds is looked at."""
    return t % run.eval_every == 0 or t == run.rounds


@contextmanager
def told(report: Report | None, setting: Setting) -> Iterator[Watch]:
    """Begin a report, and say in it how the run ended, whatever ended it."""
    watch = Watch(setting, report)
    try:
        with logs.opened(setting):
            yield watch
            watch.finish()
    except BaseException as error:
        if report:
            report.close(error)
        raise


class Watch:
    """Looks at states when it is time to, and tells the report, which only rank 0 may have.

    Attributes:
        done: whether the run has gone as far as it was to.
        opening: whether everything is shared still.
    """

    def __init__(self, setting: Setting, report: Report | None) -> None:
        self.setting, self.report = setting, report
        self.begun = self.since = time.perf_counter()
        self.last: tuple[Any, Any] = (None, None)
        self.done, self.opening = False, True
        self.telling = bool(setting.world.from_root(self._begin))

    def _begin(self) -> bytes:
        if self.report is None:
            return b""
        self.report.start(self.setting)
        return b"told"

    def look(self, t: int, state: Any) -> Iterator[dict[str, float]]:
        """Yield a row of figures on the state after t rounds, if one is due.

        Raises:
            DivergedError: on every rank, if a loss or an accuracy of an honest peer is not finite.
        """
        run, world = self.setting.run, self.setting.world
        world.pulse.round = t
        logs.LOG.debug("round %d: %.6f s", t, time.perf_counter() - self.since)
        if isinstance(run.opening, int):
            self.opening = t < run.opening
        if not due(t, run):
            if self.report:
                self.report.tick(t)
            self.since = time.perf_counter()
            return
        begun = time.perf_counter()
        figures, peers = _row(t, state, self.setting)
        logs.LOG.info("evaluation after round %d in %.2f s", t, time.perf_counter() - begun)

        def told() -> bytes:
            if wrong := _wrong(peers, self.setting):
                return json.dumps({"wrong": wrong}).encode()
            row = json.dumps({"round": t, "seconds": time.perf_counter() - self.begun} | figures)
            if self.report:
                self.report.row(json.loads(row))
            logs.LOG.info("%s", row)
            return row.encode()

        row = json.loads(world.from_root(told))
        if "wrong" in row:
            raise DivergedError(
                f"{row['wrong']} after round {t} while all models are finite: try a smaller --lr (it is {run.lr}), or "
                "look at the data and the loss"
            )
        self.done = t == run.rounds or (t > 0 and reached(row, run.goal))
        if not isinstance(run.opening, int) and reached(row, run.opening):
            self.opening = False
        if self.done:  # not before: it would be kept beside the states to come
            self.last = state, peers
        yield row
        self.since = time.perf_counter()

    def finish(self) -> None:
        """Hand the last state to the report, and end it."""
        state, peers = self.last
        self.setting.world.pulse.round = None
        models = metrics.models(state, self.setting) if self.telling else None

        def told() -> bytes:
            if self.report and models is not None:
                self.report.finish(peers, models)
                self.report.close(None)
            return b""

        self.setting.world.from_root(told)


def _wrong(peers: dict[str, Any] | None, setting: Setting) -> str:
    """Return what is not finite among the figures of honest peers, on rank 0."""
    if peers is None or setting.run_info is None:
        return ""
    return metrics.not_finite(peers, setting.run_info.sizes, setting.test_sets.classes)


def reached(row: Mapping[str, float], goal: tuple[str, float, bool] | None) -> bool:
    """Whether a row is as good as a goal asks, one of `Run.goal` and `Run.opening`."""
    if goal is None:
        return False
    column, wanted, at_least = goal
    return row[column] >= wanted if at_least else row[column] <= wanted


def _row(t: int, state: Any, setting: Setting) -> tuple[dict[str, float], dict[str, Any] | None]:
    """A row of metrics.csv without its clock, and every peer's figures; on rank 0, else nothing."""
    together, network = Ensemble.of(setting), setting.network
    peers = metrics.measure(state, setting, together)
    apart, mean = metrics.apart(state, setting)
    counts = setting.world.gather(np.array([[network.wire, network.lost]]))
    if peers is None or mean is None or counts is None:
        return {}, None
    wire, lost = counts.sum(0).tolist()
    row = metrics.summary(peers, setting.algorithm.columns) | metrics.traffic(peers, setting)
    row |= {"consensus_distance": apart, "wire_bytes": wire}
    if network.threat_model.faults:  # of the round that led here
        row |= {
            "peers_up": int(network.fault_effects(max(t - 1, 0)).up.sum()),
            "messages_lost": lost,
        }
    row["accuracy_mean_model"] = (
        row["accuracy_mean"] if state.is_global else metrics.of_mean(mean, setting)
    )
    row |= {} if together is None else together.figures(row["accuracy_mean"])
    row |= {"sim_seconds": clock.seconds} if (clock := setting.network.clock) else {}
    return {name: row[name] for name in (*COLUMNS, "sim_seconds", *row) if name in row}, peers
