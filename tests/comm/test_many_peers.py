"""Two thousand peers in one process: results and memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

import dfl
from dfl.comm.mpi import World
from dfl.comm.schedule import MixingMatrices
from dfl.config import Run
from dfl.datasets import DATASETS, split_data
from dfl.datasets.partitions.base import iid
from dfl.simulation import distribute_data
from dfl.simulation.prepare import prepare
from tests.support.mpirun import mpirun
from topologies import MIXINGS, TOPOLOGIES, build

pytestmark = pytest.mark.slow

PEERS = 2000
EACH = 12
"""Training examples of a peer."""


def run(peers: int = PEERS, **more: Any) -> Run:
    """Return a run of tiny softmax regressions on a random graph with four neighbours each."""
    dataset = f"gaussian:features=10,examples={peers * EACH},test=300"
    return Run(
        peers=peers, topology="regular:k=4", dataset=dataset, model="softmax", lr=0.3, **more
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three rounds with a report."""
    out = tmp_path_factory.mktemp("many") / "run"
    for _ in dfl.simulate(run(rounds=3, eval_every=3, out=out)):
        pass
    return out


def test_every_peer_is_in_the_table_of_peers(folder: Path) -> None:
    peers = pd.read_csv(folder / "peers.csv")
    assert peers["peer"].tolist() == list(range(PEERS))
    assert (peers["degree"] == 4).all()
    assert (peers["n_train"] == EACH).all()
    assert (peers["payload_bytes_sent"] == 3 * 4 * 4 * 110).all()
    counted = peers["labels"].str.findall(r":(\d+)").map(lambda counts: sum(map(int, counts)))
    assert (counted == EACH).all()


def test_models_and_figures_are_saved(folder: Path) -> None:
    state = load_file(folder / "state.safetensors")
    assert sorted(value.shape for value in state.values()) == [(PEERS, 10), (PEERS, 10, 10)]
    assert len(np.unique(state["1.weight"].reshape(PEERS, -1), axis=0)) == PEERS
    names = {
        "accuracy_by_bytes",
        "accuracy_by_round",
        "consensus_distance",
        "graph",
        "label_distribution",
    }
    assert {each.stem for each in (folder / "figures").iterdir()} == names


def test_peers_learn_and_stay_near_consensus(folder: Path) -> None:
    first, last = pd.read_csv(folder / "metrics.csv").to_dict("records")
    assert last["accuracy_mean"] > first["accuracy_mean"] + 0.2
    assert last["accuracy_mean_model"] >= last["accuracy_min"]
    assert 0 < last["consensus_distance"] < 1


def test_two_ranks_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in run(rounds=3, eval_every=3).to_dict().items()
    ]
    done = mpirun(2, "-m", "dfl.run", *flags, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    saved, other = (each / "state.safetensors" for each in (folder, tmp_path / "run"))
    assert saved.read_bytes() == other.read_bytes()


def peak_bytes(make: Callable[[], object]) -> int:
    """Return the bytes of Python and numpy objects at the peak of a call."""
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_preparing_a_run_takes_a_few_times_the_memory_of_the_data() -> None:
    """The data is read, split and packed; besides, every peer costs some kilobytes, not a row."""
    data = PEERS * EACH * (4 * 10 + 8)
    peak = peak_bytes(lambda: prepare(run(rounds=1), World()))
    assert peak < 6 * data + PEERS * 6000


def test_the_memory_of_a_split_grows_linearly_with_the_peers() -> None:
    def peak(peers: int) -> int:
        data = DATASETS["gaussian"](None, features=2, classes=2, examples=peers * EACH)
        return peak_bytes(lambda: split_data(iid, data, peers=peers))

    few, many = peak(500), peak(5000)
    assert many < 14 * few


def test_a_sparse_graph_stays_sparse() -> None:
    """Six numbers of 8 and of 4 bytes per peer, a few times over; a dense matrix takes 200 MB."""
    peak = peak_bytes(
        lambda: (
            build(
                TOPOLOGIES["regular"], MIXINGS["metropolis"], 5000, np.random.default_rng(0)
            ).spectrum
        )
    )
    assert peak < 25e6


def test_the_broadcast_facts_do_not_hold_the_training_examples() -> None:
    data = DATASETS["gaussian"](None, features=10, examples=PEERS * EACH, test=30)
    split = split_data(iid, data, peers=PEERS)
    graph = build(TOPOLOGIES["regular"], MIXINGS["metropolis"], PEERS, np.random.default_rng(0))
    message = distribute_data.pack(
        distribute_data.known_to_all(data, split, MixingMatrices(graph.weights))
    )
    assert len(message) < data.train_inputs.nbytes
    owned = [
        distribute_data.owned(data, split, np.arange(first, first + 500))
        for first in range(0, PEERS, 500)
    ]
    assert sum(len(own["train labels"]) for own in owned) == PEERS * EACH
    places = [own["train inputs"] for own in owned]
    assert len(np.unique(np.concatenate(places), axis=0)) == PEERS * EACH
