"""The facts of a run before round 0, as callbacks receive them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dfl.algorithms import Method, State
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.config import Run
from dfl.core.layout import Layout
from dfl.core.parts import parts_of
from dfl.evaluation.test_sets import TestSets
from dfl.simulation import cost
from dfl.simulation.read_on_root import RootFacts
from dfl.store.callbacks import Memory, MethodInfo, RunInfo, rows_of

if TYPE_CHECKING:
    from dfl.training.task import Task

WORK_ROWS = 2
"""Rows per peer that a round needs besides the state: the trained models, and the next state."""


def sizes_of_states(task: Task, state: State, world: World) -> tuple[float, int] | None:
    """Return, on rank 0, the rows of m numbers that a peer remembers besides its model, the mean
    over all peers; and the bytes of models and work on the fullest rank. None elsewhere.
    """
    layout, p = task.parameter_layout, len(task.peers)
    work = (WORK_ROWS * p * layout.d + task.frozen_numbers) * task.dtype.itemsize
    models = cost.memory_of_state(state, p, layout) + work
    sizes = world.gather(np.array([[*cost.numbers_of_state(state), models]]))
    if sizes is None:
        return None
    held, own, _ = sizes.sum(0).tolist()
    return held / own - 1 if own else 0.0, int(sizes[:, 2].max())


def run_info(
    run: Run,
    task: Task,
    network: Network,
    algorithm: Method,
    test_sets: TestSets,
    own_module: bool,
    facts: RootFacts,
    held: tuple[float, int],
) -> RunInfo:
    """Return the facts that callbacks receive.

    Args:
        run, task, network, algorithm, test_sets, own_module: as of `Prepared`.
        facts: what rank 0 knows of the data and the graph.
        held: what `sizes_of_states` returns.
    """
    layout, dtype, progress = network.layout, task.dtype, facts.progress
    rows, models = held

    def payload(coordinates: int) -> float:
        return cost.payload_per_round(algorithm, network, coordinates, dtype)

    found = progress.found
    return RunInfo(
        run=run,
        layout=layout,
        device=str(task.device),
        own_module=own_module,
        parameters=task.parameter_layout.d,
        shared=task.parameter_layout.shared,
        frozen=task.frozen_numbers,
        dtype=str(dtype).removeprefix("torch."),
        attackers=np.asarray(network.threat_model.attackers),
        local_steps=task.solver.steps_for(facts.sizes[:, 0]),
        batch_size=task.solver.batch_size,
        classes=test_sets.classes,
        shape=facts.shape,
        places=tuple(test_sets.labels.shape[1:]) if task.is_sequence else (),
        label_counts=facts.label_counts,
        sizes=facts.sizes,
        n_test=facts.n_test,
        evaluated_train=test_sets.longest_train,
        graph=facts.graph,
        has_server=algorithm.has_server,
        broadcasts=algorithm.traffic(layout.peers, 0)[1],
        payload_shared=payload(task.parameter_layout.shared),
        payload_whole=payload(task.parameter_layout.all_shared.shared),
        method=MethodInfo(
            rows=rows,
            messages=algorithm.messages,
            within_clusters=algorithm.within_clusters,
            assumes=tuple(each.text for each in (*algorithm.requires, *algorithm.expects)),
        ),
        memory=_memory(models, layout, test_sets, facts),
        notes=facts.notes,
        resumed=(found.round, found.path) if found else None,
        earlier=rows_of(found.content["table"]) if found else (),
    )


def _memory(models: int, layout: Layout, test_sets: TestSets, facts: RootFacts) -> Memory:
    """Return the estimated bytes on the fullest rank."""
    ends = np.concatenate([[0], np.cumsum(layout.by_rank(facts.sizes.sum(1)))])
    tensors = (*parts_of(test_sets.inputs), test_sets.labels)
    example = sum(each.element_size() * math.prod(each.shape[1:]) for each in tensors)
    return Memory(
        models=models,
        examples=int(np.diff(ends[layout.starts]).max()) * example,
        test_set=facts.n_test * example,
    )
