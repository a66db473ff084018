"""Evaluation of a run: when it is due, its row of figures, and whether the run has reached its
goal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.config import Run
from dfl.core.errors import DivergedError, InputError
from dfl.core.forms import require_form
from dfl.core.parse import shown
from dfl.core.profiling import Profiles, active, phase
from dfl.evaluation import metrics
from dfl.evaluation.ensembles import Ensemble
from dfl.evaluation.goals import reached
from dfl.models.modules import frozen
from dfl.simulation.run_state import RunState, is_global
from dfl.store import logs
from dfl.store.callbacks import Callback, Outcome, Row

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.comm.mpi import World
    from dfl.simulation.prepare import Prepared
    from dfl.training.task import Task
else:
    from dfl.core.lazy import torch

COLUMNS = (
    "round", "seconds", "train_loss", "accuracy_mean", "accuracy_min", "accuracy_max",
    "accuracy_std", "accuracy_mean_model", "local_accuracy_mean", "consensus_distance",
    "payload_bytes", "wire_bytes",
)  # fmt: skip
"""First columns of metrics.csv; then follow sim_seconds, where links are simulated, and those of
the method.
"""


def due(t: int, run: Run) -> bool:
    """Return whether the state after t rounds is evaluated."""
    return t % run.eval_every == 0 or t > run.rounds - run.eval_last


@contextmanager
def opened(prepared: Prepared, callback: Callback | None) -> Iterator[Evaluator]:
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
        answer = prepared.world.from_root(self._start)
        self.watched = bool(answer)
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
        if not due(t, run):
            if self.callback:
                self.callback.round(t)
            self.since = time.perf_counter()
            return
        begun = time.perf_counter()
        with phase("evaluate"):
            figures, peers = _row(run_state, self.prepared)
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
        if not self.watched or self.last is None:
            return
        run_state, peers = self.last
        models = gathered(run_state, self.prepared)
        profile = _profiles(self.prepared.world)

        def pass_on() -> bytes:
            if self.callback and models is not None and peers is not None:
                state = {n: np.ascontiguousarray(v) for n, v in _state(run_state, models).items()}
                self.callback.finish(Outcome(peers, state, profile))
                self.callback.close(None)
            return b""

        self.prepared.world.from_root(pass_on)

    def _pass_models(self, run_state: RunState) -> None:
        """Pass the models of all peers to the callback, if it needs them."""
        if not self.needs_models:
            return
        models = gathered(run_state, self.prepared)

        def pass_on() -> bytes:
            if self.callback and models is not None:
                self.callback.evaluated_models(run_state.t, _state(run_state, models))
            return b""

        self.prepared.world.from_root(pass_on)

    def _not_finite(self, peers: metrics.Figures | None) -> str:
        """Return what is not finite among the figures of honest peers, on rank 0."""
        info = self.prepared.info
        return metrics.not_finite(peers, info.sizes, info.classes) if peers and info else ""


def _state(run_state: RunState, models: NDArray[np.floating]) -> dict[str, NDArray[np.floating]]:
    """Return gathered models by parameter name, without a copy."""
    named = by_name(run_state.task, torch.from_numpy(models))
    return {name: value.numpy() for name, value in named.items()}


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


def _row(
    run_state: RunState, prepared: Prepared
) -> tuple[dict[str, float], metrics.Figures | None]:
    """Return a row of metrics.csv without its clock, and all peers' figures; ({}, None) but on rank
    0.
    """
    world, network, algorithm = prepared.world, prepared.network, prepared.algorithm
    ensemble = None
    if prepared.run.ensemble:
        attackers = np.asarray(network.threat_model.attackers)
        ensemble = Ensemble.of(world, prepared.layout, attackers)
    peers = measure(run_state, prepared, ensemble)
    distance, mean = consensus(run_state, prepared)
    counts = world.gather(np.array([[network.traffic.wire, network.traffic.lost]]))
    if peers is None or mean is None or counts is None:
        return {}, None
    wire, lost = counts.sum(0).tolist()
    row = metrics.summary(peers, algorithm.columns)
    row |= traffic(peers, network.traffic.parameters if algorithm.has_server else None)
    row |= {"consensus_distance": distance, "wire_bytes": wire}
    effects = network.fault_effects(max(run_state.t - 1, 0))  # of the round that ended here
    if effects is not None:
        row |= {"peers_up": int(effects.up.sum()), "messages_lost": lost}
    if is_global(run_state.task, has_server=algorithm.has_server):
        row["accuracy_mean_model"] = row["accuracy_mean"]
    else:
        row["accuracy_mean_model"] = metrics.mean_model_accuracy(
            mean, run_state.task, prepared.test_sets
        )
    if ensemble:
        row |= ensemble.figures(row["accuracy_mean"])
    if network.clock:
        row["sim_seconds"] = network.clock.seconds
    ordered = (*COLUMNS, "sim_seconds", *row)
    return {name: row[name] for name in ordered if name in row}, peers


def measure(
    run_state: RunState, prepared: Prepared, ensemble: Ensemble | None = None
) -> metrics.Figures | None:
    """Return all peers' figures, (P,) each by name, on rank 0; None elsewhere.

    Args:
        run_state: the task and the state of this rank.
        prepared: the run.
        ensemble: receives the outputs on the common test set.
    """
    network, task, algorithm = prepared.network, run_state.task, prepared.algorithm
    own = metrics.peer_figures(
        run_state.models,
        task,
        prepared.test_sets,
        prepared.world,
        is_global=is_global(task, has_server=algorithm.has_server),
        ensemble=ensemble,
    )
    own |= _observed(run_state, prepared)
    own["payload_bytes"] = network.traffic.payload.astype(np.float64)
    own["download_bytes"] = network.traffic.downloaded.astype(np.float64)
    own["is_attacker"] = np.isin(task.peers, network.threat_model.attackers).astype(np.float64)
    everyone = prepared.world.gather(np.stack(list(own.values()), axis=1))
    if everyone is None:
        return None
    return dict(zip(own, prepared.layout.ascending(everyone).T, strict=True))


def _observed(run_state: RunState, prepared: Prepared) -> metrics.Figures:
    """Return what the method observes, (p,) each by name.

    Raises:
        InputError: on every rank, a column of the method is not among it, or something is no
            tensor (p,).
    """
    algorithm = prepared.algorithm
    what = f"--algorithm {prepared.run.algorithm}: what observe returns"
    observed = algorithm.observe(run_state.state)
    with prepared.world.agreed():
        if not isinstance(observed, dict):
            raise InputError(f"{what} must be a dict of tensors, not {shown(observed)}")
        if missing := [name for name in algorithm.columns if name not in observed]:
            raise InputError(f"{what} lacks {', '.join(missing)}, which columns names")
        for name, value in observed.items():
            require_form(f"{what}: {name}", value, torch.Tensor, (len(run_state.task.peers),))
    return {name: value.double().cpu().numpy() for name, value in observed.items()}


def consensus(run_state: RunState, prepared: Prepared) -> tuple[float, Tensor | None]:
    """Return the consensus distance of the honest peers, in parameters, and their mean model.

    Models of several kinds are compared in the shared parameters.
    """
    task = run_state.task
    if is_global(task, has_server=prepared.algorithm.has_server):
        return 0.0, run_state.state.x[0]
    x = run_state.models[:, : task.parameter_layout.shared] if task.kinds else run_state.models
    attackers = prepared.network.threat_model.attackers
    counted = task.parameter_layout.is_parameter[: x.shape[1]]
    return metrics.consensus_distance(x, prepared.world, prepared.layout, attackers, counted)


def traffic(peers: Mapping[str, NDArray[np.float64]], parameters: int | None) -> dict[str, float]:
    """Return the bytes sent so far, by peers and server; and the parameters, where there is a
    server.

    `parameters_k_plus_m` counts as Table 1 of LG-FedAvg: the server sends to all K peers, and m
    answer.
    """
    up, down = (int(peers[name].sum()) for name in ("payload_bytes", "download_bytes"))
    if parameters is None:
        return {"payload_bytes": up}
    return {
        "payload_bytes": up + down,
        "upload_bytes": up,
        "download_bytes": down,
        "parameters_k_plus_m": parameters,
    }


def gathered(run_state: RunState, prepared: Prepared) -> NDArray[np.floating] | None:
    """Return all peers' models (P, d), or the one that all have (1, d), on rank 0; None
    elsewhere.
    """
    world, models = prepared.world, run_state.models
    if is_global(run_state.task, has_server=prepared.algorithm.has_server):
        return world.gather((models[:0] if world.rank else models).cpu().numpy())
    everyone = world.gather(models.cpu().numpy())
    return None if everyone is None else prepared.layout.ascending(everyone)


def by_name(task: Task, models: Tensor) -> dict[str, Tensor]:
    """Return models (P, d) by parameter name, (P, *shape).

    Frozen parameters have one row, (1, *shape). Of several kinds of model, personal parameters are
    named `kind/name`, with a row for each peer of the kind.
    """
    if not task.kinds:
        fixed = {name: value[None].cpu() for name, value in frozen(task.module).items()}
        return task.parameter_layout.views(models) | fixed
    shared = task.parameter_layout.shared_parameters
    named = {name: v for name, v in task.parameter_layout.views(models).items() if name in shared}
    for k, (module, spec) in enumerate(task.kinds):
        own = spec.views(models[k :: len(task.kinds)])
        own |= {name: value[None].cpu() for name, value in frozen(module).items()}
        named |= {f"{k}/{name}": value for name, value in own.items() if name not in shared}
    return named
