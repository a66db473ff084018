"""Preparing a run: data of the ranks, refusals, notes, initial models, memory and engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dfl
from dfl.comm.mpi import World
from dfl.core.errors import InputError
from dfl.core.ragged import Ragged
from dfl.datasets.data import Data
from dfl.datasets.partitions.base import DataSplit
from dfl.simulation import cost, distribute_data, initialization
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from tests.support.quadratic import digits, info, points


def data(n: int = 24, classes: int = 3) -> Data:
    rng = np.random.default_rng(0)
    labels = np.arange(n) % classes if classes else rng.normal(size=n).astype(np.float32)
    return Data(
        rng.normal(size=(n, 4)).astype(np.float32),
        labels,
        rng.normal(size=(6, 4)).astype(np.float32),
        labels[:6],
        classes,
    )


def own(module: nn.Module | None = None, given: Data | None = None, **settings: Any) -> Prepared:
    return prepare(
        dfl.Run(
            **{"peers": 4, **settings}, model=module or nn.Linear(4, 3), dataset=given or data()
        ),
        World(),
    )


def test_owned_examples_are_concatenated_by_peer() -> None:
    whole = data()
    none = np.zeros(0, np.int64)
    split = DataSplit(
        Ragged.of([np.array([5, 3]), np.array([0]), np.array([7, 8, 9])]),
        Ragged.of([np.array([1]), none, none]),
        Ragged.of([np.array([2]), np.array([0, 1]), np.array([3])]),
    )
    arrays = distribute_data.owned(whole, split, np.arange(1, 3))
    np.testing.assert_array_equal(arrays["train inputs"], whole.train_inputs[[0, 7, 8, 9]])
    np.testing.assert_array_equal(arrays["train labels"], whole.train_labels[[0, 7, 8, 9]])
    assert arrays["held inputs"].shape == (0, 4)
    assert arrays["test"].tolist() == [0, 1, 3]
    assert distribute_data.owned(whole, split, np.arange(0))["train inputs"].shape == (0, 4)


def test_arrays_are_unpacked_as_they_were_packed() -> None:
    arrays = {
        "a": np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::2],
        "b": np.array(0.5),
        "c": np.zeros((0, 4), np.float32),
    }
    back = distribute_data.unpack(distribute_data.pack(arrays))
    assert set(back) == set(arrays)
    for name, value in arrays.items():
        np.testing.assert_array_equal(back[name], value)
        assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape)


def test_the_network_has_the_matrices_of_the_graph() -> None:
    setting = digits(topology="one_peer_exponential", peers=8)
    graph = info(setting).graph
    assert graph
    for received, made in zip(setting.network.schedule.weights, graph.weights, strict=True):
        np.testing.assert_array_equal(received.toarray(), made.toarray())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_labels": np.zeros(23, np.int64)}, "24 train inputs with 23 labels"),
        ({"test_inputs": np.zeros((0, 4)), "test_labels": np.zeros(0, np.int64)}, "0 test inputs"),
        ({"train_labels": np.zeros(24)}, "as float64"),
        ({"train_labels": np.full(24, 3)}, r"from 3 to 3 .* range\(3\)"),
        ({"test_labels": np.full(6, -1)}, "test_labels from -1"),
    ],
)
def test_a_callers_own_data_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        own(given=replace(data(), **change))


def test_labels_without_classes_are_partitioned_iid_only() -> None:
    with pytest.raises(InputError, match="--partition shards partitions by label"):
        own(nn.Linear(4, 1), data(classes=0), partition="shards")


def test_more_test_examples_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match="--eval-examples 7 of 6 test examples"):
        own(eval_examples=7)


def test_a_single_peer_gives_a_note() -> None:
    setting = own(peers=1)
    assert setting.info is not None
    assert any("one peer has no neighbours" in note for note in setting.info.notes)


def test_notes_are_warnings_in_python() -> None:
    with pytest.warns(UserWarning, match=r"lambda_min\(W\) = -0.333"):
        list(dfl.simulate(dfl.Run(peers=6, algorithm="qdfedavgm:exchange=paper", rounds=0)))


def test_weights_of_a_file_are_used_without_a_mixing_rule(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "w.csv", np.full((4, 4), 0.25), delimiter=",")
    setting = own(topology=f"edges:path={tmp_path / 'w.csv'}", mixing="lazy")
    assert setting.info is not None
    assert any("no mixing rule is applied" in note for note in setting.info.notes)
    np.testing.assert_allclose(setting.network.schedule.weights[0].toarray(), 0.25)


def test_inputs_are_normalised_by_the_values_of_the_data_set() -> None:
    setting = digits()
    raw = setting.task.examples.inputs[:5]
    assert raw.dtype == torch.uint8
    seen = setting.task.inputs(raw)
    assert seen.dtype == torch.float32
    assert torch.allclose(seen, (raw.float() / 16 - 0.3055) / 0.3763, atol=2e-3)
    assert raw.max() > 10  # unchanged


def test_initial_models_are_common_or_independent() -> None:
    common, independent = (digits(init=init) for init in ("common", "independent"))
    x = initialization.start(common.run, common.task, False)
    assert bool((x == x[0]).all())
    assert initialization.agree(common.run, None)
    x = initialization.start(independent.run, independent.task, False)
    assert len({tuple(row) for row in x[:, :20].tolist()}) == len(x)
    assert not initialization.agree(independent.run, None)


def test_another_seed_gives_other_models_and_data() -> None:
    first, second = (digits(seed=seed) for seed in (0, 1))
    assert not torch.equal(
        initialization.start(first.run, first.task, False),
        initialization.start(second.run, second.task, False),
    )
    assert not torch.equal(first.task.examples.inputs, second.task.examples.inputs)


def memory_of_state(setting: Prepared, peers: int) -> int:
    algorithm, network, layout = setting.algorithm, setting.network, setting.task.parameter_layout
    x = cost.blank_models(algorithm, network, layout.shared, torch.float32)
    return cost.memory_of_state(cost.blank_state(algorithm, network, x), peers, layout)


@pytest.mark.parametrize(
    ("algorithm", "rows"), [("dfedavgm", 1), ("qdfedavgm", 3), ("qdfedavgm:exchange=paper", 1)]
)
def test_the_estimate_of_memory_counts_rows_of_the_state(algorithm: str, rows: int) -> None:
    setting = digits(algorithm=algorithm)
    d = setting.task.parameter_layout.d
    assert memory_of_state(setting, 6) == pytest.approx(rows * 6 * d * 4, abs=6 * 8)


def test_a_rank_without_peers_holds_only_the_servers_model() -> None:
    setting = digits(algorithm="fedavg", share="head:1", peers=1)
    setting.network.traffic.payload = setting.network.traffic.payload[:0]
    d = setting.task.parameter_layout.d
    assert memory_of_state(setting, 0) < 2 * 4 * d


def test_the_estimate_of_memory_counts_edges() -> None:
    setting = digits(algorithm="qdfedavgm", topology="one_peer_exponential", peers=8)
    d = setting.task.parameter_layout.d
    assert memory_of_state(setting, 8) == pytest.approx(
        (1 + 2 * 3) * 8 * d * 4, abs=8 * 8
    )  # three outgoing and three incoming edges


def test_the_engine_is_chosen_by_the_model_and_the_batch() -> None:
    for settings, batched in (
        ({"model": "softmax"}, True),
        ({"model": "cnn"}, False),
        ({"model": "mlp:hidden=2000"}, True),
        ({"model": "mlp:hidden=2000", "threads": 2}, False),
        ({"model": "mlp:hidden=20", "threads": 2}, True),
        ({"model": "mlp:hidden=2000", "threads": 2, "engine": "batched"}, True),
        ({"model": "softmax", "engine": "loop"}, False),
    ):
        for peers in (2, 7):  # not by the layout
            assert digits(peers=peers, **settings).task.solver.batched is batched, settings


def test_a_model_in_float64_stays_in_float64() -> None:
    setting = prepare(dfl.Run(peers=3, model=nn.Linear(4, 3).double(), dataset=data()), World())
    assert initialization.start(setting.run, setting.task, True).dtype == torch.float64
    assert info(setting).payload_shared == 15 * 8 * 6
    assert points(3, 2).classes == 0


def test_sizes_are_counted_by_peer() -> None:
    none = np.zeros(0, np.int64)
    halves = [np.arange(3), np.arange(2)], [none, np.arange(1)], [np.arange(4), none]
    train, validation, test = map(Ragged.of, halves)
    split = DataSplit(train, validation, test)
    assert distribute_data.sizes(split).tolist() == [[3, 0, 4], [2, 1, 0]]


def test_the_payload_of_a_directed_graph_counts_every_edge() -> None:
    setting = digits(topology="exponential", peers=8)
    assert info(setting).payload_shared == 8 * 3 * setting.task.parameter_layout.d * 4
