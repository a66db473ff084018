"""A run stays on its device, and its numbers do not depend on the device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import random_array
from torch import nn

import dfl
from dfl.comm.mpi import World
from dfl.comm.weighting import weighted_sum
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.simulation import build_task, engine
from dfl.simulation.prepare import prepare
from dfl.store.callbacks import COLUMNS
from dfl.training import sgd as training
from dfl.training.batches import groups
from tests.conftest import Command
from tests.support.quadratic import FEW
from tests.support.standin import DEVICE, Held, Standin

pytestmark = pytest.mark.usefixtures("no_figures")

ALLOWED = {
    "comm/exchange.py",
    "comm/transport.py",
    "comm/received.py",
    "evaluation/metrics.py",
    "evaluation/ensembles.py",
    "simulation/try_models.py",  # before round 0
    "simulation/measure.py",
    "simulation/run_state.py",
}
"""The only files that may move a tensor to the CPU."""

NORMED = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 10))
RUNS: dict[str, dict[str, Any]] = {
    "products": {"model": "mlp:hidden=8"},
    "vmap": {"model": NORMED, "engine": "batched", "peers": 2, "examples_per_peer": 10},
    "convolutions": {"model": "cnn", "engine": "batched", "peers": 2, "examples_per_peer": 10},
    "loop": {"engine": "loop", "weight_decay": 0.01},
    "replicas": {"bits": 4},
    "sign": {"bits": 1, "partition": "dirichlet:alpha=0.3", "validation": 0.2},
    "edges": {"bits": 3, "topology": "one_peer_exponential", "peers": 8},
    "paper": {"algorithm": "qdfedavgm:exchange=paper", "mixing": "lazy", "init": "independent"},
    "server": {"algorithm": "fedprox:fraction=0.5,stragglers=0.5", "local_epochs": 2, "bits": 4},
    "trust": {"algorithm": "fltrust:root=20,server_momentum=0.5", "attack": "alie"},
    "pooled": {"algorithm": "pooled"},
    "rules": {"aggregator": "median", "attack": "dissensus:peers=1", "topology": "complete"},
    "together": {"ensemble": True, "algorithm": "local_only"},
    "bf16": {"model": "mlp:hidden=8", "precision": "bf16"},
    "bf16 loop": {"engine": "loop", "precision": "bf16"},
    "own steps": {"local_steps": 5, "batch_size": 0, "partition": "dirichlet:alpha=0.3"},
}


def few(**settings: Any) -> dict[str, Any]:
    return {**FEW, **settings}


def rows(**settings: Any) -> list[dict[str, float]]:
    found = list(dfl.simulate(dfl.Run(**{**FEW, "eval_every": 2, **settings})))
    return [{name: row[name] for name in COLUMNS if name != "seconds"} for row in found]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_stays_on_its_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"engine": "batched", **RUNS[name]}
    here = rows(**settings)
    monkeypatch.setattr(engine, "device_of", lambda requested, world: DEVICE)
    with Standin() as standin:
        there = rows(**settings)
    if name == "convolutions":  # computed one after the other on a processor only
        pd.testing.assert_frame_equal(pd.DataFrame(there), pd.DataFrame(here), rtol=1e-5)
    else:
        np.testing.assert_equal(there, here)
    assert {file for file, _ in standin.moved} <= ALLOWED
    assert ("evaluation/metrics.py", "_to_copy") in standin.moved  # the stand-in records moves


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_frozen_parameters_are_on_the_device(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {**FEW, "engine": engine, "rounds": 2, "eval_every": 1}
    run = dfl.Run(**settings, out=tmp_path / "here")
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    module[1].requires_grad_(False)
    here = list(dfl.simulate(replace(run, model=module)))
    monkeypatch.setattr("dfl.simulation.engine.device_of", lambda requested, world: DEVICE)
    with Standin() as standin:
        there = list(dfl.simulate(replace(replace(run, out=tmp_path / "there"), model=module)))
    assert [row["train_loss"] for row in there] == [row["train_loss"] for row in here]
    assert {file for file, _ in standin.moved} <= ALLOWED
    states = [(tmp_path / name / "state.safetensors").read_bytes() for name in ("here", "there")]
    assert states[0] == states[1]


def test_the_stand_in_refuses_mixed_devices_and_records_moves() -> None:
    with Standin() as standin:
        x = torch.ones(3).to(DEVICE)
        assert isinstance(x, Held)
        assert x.device == DEVICE
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(3)
        with pytest.raises((RuntimeError, TypeError)):
            x.numpy()
        assert not standin.moved
        assert float((x * 2).sum()) == 6
        assert torch.equal(x.cpu(), torch.ones(3))
    assert [name for _, name in standin.moved] == ["_local_scalar_dense", "_to_copy"]


def test_random_numbers_are_the_same_on_every_device() -> None:
    with Standin():
        there = randomness.bits(3, "test", [1, 5], 2, n=slice(7, 40), device=DEVICE)
        assert isinstance(there, Held)
        assert torch.equal(there.cpu(), randomness.bits(3, "test", [1, 5], 2, n=40)[:, 7:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_weighted_equally_on_every_device(dtype: torch.dtype) -> None:
    """Sums are equal to the bit, also of rows with no weights and of one with many."""
    rng = np.random.default_rng(0)
    weights = random_array((20, 43), density=0.2, rng=rng, format="csr")
    parts = [torch.from_numpy(rng.normal(size=(n, 257))).to(dtype) for n in (30, 1, 12)]
    with Standin():
        there = weighted_sum(weights, *(rows.to(DEVICE) for rows in parts)).cpu()
    assert torch.equal(there, weighted_sum(weights, *parts))
    dense = weights.toarray() @ torch.cat(parts).double().numpy()
    np.testing.assert_allclose(there.double(), dense, atol=1e-5)


def test_auto_is_the_cpu_on_a_machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert engine.device_of("auto", World()) == torch.device("cpu")
    with pytest.raises(InputError, match="cuda:1: every rank can have 0 GPUs"):
        engine.device_of("cuda:1", World())


def test_ranks_of_a_machine_are_spread_over_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = World()
    assert engine.device_of("cpu", world) == torch.device("cpu")
    for beside, index in ((0, 0), (1, 1), (2, 0)):
        world.local_rank = beside
        assert (
            engine.device_of("auto", world)
            == engine.device_of("cuda", world)
            == torch.device("cuda", index)
        )
    assert engine.device_of("cuda:1", world) == torch.device("cuda", 1)
    with pytest.raises(InputError, match="can have 2 GPUs"):
        engine.device_of("cuda:2", world)


def test_every_rank_must_have_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    class Poorer(World):
        """Another rank's machine has no GPU."""

        def minimum(self, *numbers: int) -> tuple[int, ...]:
            return (0,)

    assert engine.device_of("auto", Poorer()) == torch.device("cpu")
    with pytest.raises(InputError, match="every rank can have 0 GPUs"):
        engine.device_of("cuda", Poorer())


def test_auto_trains_peers_together_on_a_gpu() -> None:
    """A peer alone is known to have the bits of a peer in a batch on the CPU only."""
    setting = prepare(dfl.Run(peers=3), World())
    assert setting.task.bit_equal_alone
    with Standin():
        scale = setting.task.scale.to(DEVICE)
        assert not replace(setting.task, scale=scale).bit_equal_alone


def test_the_size_of_groups_does_not_depend_on_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with two of seven peers has the groups of one with all of them."""
    monkeypatch.setattr(engine, "device_of", lambda requested, world: DEVICE)
    run = dfl.Run(**few(peers=7, partition="dirichlet:alpha=0.3", batch_size=0))
    known: Any = build_task.make_task
    sizes: list[int] = []

    def noted(*given: Any) -> Any:
        for peers in (np.arange(7), np.array([2, 5])):
            task = known(*given[:5], peers, given[6])
            sizes.append(task.solver.group_size)
        return known(*given)

    monkeypatch.setattr(build_task, "make_task", noted)
    with Standin():
        task = prepare(run, World()).task
    assert sizes == [7, 7]
    assert task.models_at_once == 7
    assert {len(group) for group in groups(task)} == {7}


@pytest.mark.parametrize(
    ("options", "clients"),
    [
        ("fraction=1", 7),
        ("fraction=0.4", 3),
        ("fraction=0", 1),
        ("stragglers=0.6", 3),
        ("stragglers=0.6,straggler_policy=fewer", 7),
    ],
)
def test_groups_have_the_size_of_the_clients_of_a_round(
    options: str, clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "device_of", lambda requested, world: DEVICE)
    computed: list[int] = []
    known = training._step

    def step(models: Any, given: Any, *rest: Any, **more: Any) -> None:
        computed.append(len(given.labels))
        known(models, given, *rest, **more)

    monkeypatch.setattr(training, "_step", step)
    with Standin():
        run = few(peers=7, algorithm=f"fedavg:{options}", local_epochs=2, out=tmp_path)
        list(dfl.simulate(dfl.Run(**run)))
    assert set(computed) == {clients}


def test_a_server_that_trains_has_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "device_of", lambda requested, world: DEVICE)
    with Standin():
        task = prepare(dfl.Run(**few(algorithm="pooled")), World()).task
        assert task.of_server.solver.group_size == 1


def test_an_unknown_device_is_refused(dfl_run: Command) -> None:
    assert dfl_run.refused("--device", "gpu").startswith(
        "--device must be auto, cpu, cuda or cuda:NUMBER, not 'gpu'"
    )
    assert dfl_run.refused("--device", "cuda:9").startswith("--device cuda:9: ")
