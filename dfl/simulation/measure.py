"""The figures of a run after t rounds: those of every peer, and their row of metrics.csv."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.forms import require_form
from dfl.core.parse import shown
from dfl.evaluation import metrics
from dfl.evaluation.ensembles import Ensemble
from dfl.models.modules import in_evaluation
from dfl.simulation.run_state import RunState, is_global
from dfl.store.callbacks import COLUMNS, FURTHER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.simulation.prepared import Prepared
else:
    from dfl.core.lazy import torch

FACTS = (
    "peer", "rank", "degree", "n_train", "labels", "is_attacker", "payload_bytes_sent",
    "payload_bytes_received", "download_bytes",
)  # fmt: skip
"""Columns of peers.csv and of the history that no method observes, besides what is measured."""


def row_of(
    run_state: RunState, prepared: Prepared
) -> tuple[dict[str, float], metrics.Figures | None]:
    """Return a row of metrics.csv without its clock, and all peers' figures; ({}, None) but on rank
    0. Models are in evaluation mode.
    """
    with in_evaluation(module for module, _ in run_state.task.every_kind):
        return _row_of(run_state, prepared)


def _row_of(
    run_state: RunState, prepared: Prepared
) -> tuple[dict[str, float], metrics.Figures | None]:
    """Return `row_of` for models in the mode in which they are."""
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
        of_mean = {name: row[f"{name}_mean"] for name in metrics.quality(prepared.test_sets)}
    else:
        of_mean = metrics.mean_model_figures(mean, run_state.task, prepared.test_sets)
    row |= {f"{name}_mean_model": value for name, value in of_mean.items()}
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
    own |= _observed(run_state, prepared, (*own, *FACTS, *COLUMNS, *FURTHER))
    own["payload_bytes"] = network.traffic.payload.astype(np.float64)
    own["download_bytes"] = network.traffic.downloaded.astype(np.float64)
    own["is_attacker"] = np.isin(task.peers, network.threat_model.attackers).astype(np.float64)
    everyone = prepared.world.gather(np.stack(list(own.values()), axis=1))
    if everyone is None:
        return None
    return dict(zip(own, prepared.layout.ascending(everyone).T, strict=True))


def _observed(run_state: RunState, prepared: Prepared, taken: Collection[str]) -> metrics.Figures:
    """Return what the method observes, (p,) each by name.

    Args:
        run_state: the task and the state of this rank.
        prepared: the run.
        taken: the names of other columns.

    Raises:
        InputError: on every rank, a column of the method is not among it, something is no tensor
            (p,), or has the name of another column.
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
            if name in taken:
                raise InputError(f"{what}: {name} is a column of dfl: name it otherwise")
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
