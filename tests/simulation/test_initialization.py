"""`init_from`: a run starts from the models of another, on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dfl import InputError, Run, load, simulate
from dfl.comm.mpi import World
from dfl.simulation.initialization import agree, start
from dfl.simulation.prepare import prepare
from tests.support.mpirun import mpirun

pytestmark = pytest.mark.usefixtures("no_figures")

FEW: dict[str, Any] = {
    "peers": 6,
    "rounds": 2,
    "examples_per_peer": 25,
    "model": "mlp:hidden=8",
    "eval_every": 2,
}


def ended(folder: Path, **settings: Any) -> Path:
    """Run to the end, and return the folder."""
    list(simulate(Run(**{**FEW, **settings, "out": folder})))
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ended(tmp_path_factory.mktemp("one") / "run", algorithm="fedavg")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ended(tmp_path_factory.mktemp("many") / "run", share="head:1")


def beginning(**settings: Any) -> tuple[torch.Tensor, bool]:
    """The initial models (P, d), and whether every peer knows the initial models of the others."""
    setting = prepare(Run(**{**FEW, **settings}), World())
    models = start(
        setting.run, setting.task, setting.own_module, setting.algorithm.has_server, setting.starts
    )
    return models, agree(setting.run, setting.starts)


def rows(folder: Path, **settings: Any) -> torch.Tensor:
    """The models (P, d) of a folder, in the parameter layout of another run."""
    spec, state = (
        prepare(Run(**{**FEW, **settings}), World()).task.parameter_layout,
        load_file(folder / "state.safetensors"),
    )
    return torch.cat([state[name].flatten(1) for name in spec.names], 1)


def test_one_model_is_the_known_start_of_every_peer(one: Path) -> None:
    row = rows(one)
    for settings in ({}, {"share": "head:1"}, {"algorithm": "qdfedavgm", "bits": 4}):
        x, known = beginning(init_from=one, **settings)
        assert torch.equal(x, rows(one, **settings).expand(6, -1))
        assert known
    x, _ = beginning(init_from=one, algorithm="fedavg")
    assert torch.equal(x, row)


def test_every_peer_starts_from_its_own_model(many: Path) -> None:
    x, known = beginning(init_from=many)
    assert torch.equal(x, rows(many))
    assert not known


def test_additional_peers_start_from_the_mean(many: Path) -> None:
    x, _ = beginning(init_from=many, peers=8)
    assert torch.equal(x[:6], rows(many))
    assert torch.equal(x[6], x[7])
    assert torch.allclose(x[6], x[:6].mean(0), atol=1e-7)


def test_additional_peers_start_from_the_mean_of_honest_peers(tmp_path: Path) -> None:
    attacked = ended(tmp_path / "attacked", share="head:1", attack="label_flip:peers=1")
    x, _ = beginning(init_from=attacked, peers=7)
    honest = [0, 2, 3, 4, 5]
    assert torch.allclose(x[6], x[honest].mean(0), atol=1e-7)
    assert not torch.allclose(x[6], x[:6].mean(0), atol=1e-5)


def test_the_figures_of_round_0_are_the_last_of_the_other_run(one: Path, many: Path) -> None:
    for folder, settings in ((one, {"algorithm": "fedavg"}), (many, {"share": "head:1"})):
        first = next(simulate(Run(**{**FEW, **settings, "init_from": folder})))
        last = load(folder).rows.iloc[-1]
        for figure in ("accuracy_mean", "train_loss", "consensus_distance"):
            assert first[figure] == pytest.approx(last[figure], abs=1e-12)


def test_personal_parameters_are_restored_with_a_server(tmp_path: Path) -> None:
    lg = ended(tmp_path / "lg", algorithm="fedavg", share="head:1")
    first = next(
        simulate(Run(**{**FEW, "algorithm": "fedavg", "share": "head:1", "init_from": lg}))
    )
    assert first["accuracy_mean"] == pytest.approx(
        load(lg).rows["accuracy_mean"].iloc[-1], abs=1e-12
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "mlp:hidden=9"}, "has other parameters"),
        ({"model": "softmax"}, "has other parameters"),
        ({"peers": 5}, "has 6 models for 5 peers"),
        ({"init": "independent"}, "leave --init independent out"),
        ({"algorithm": "fedavg"}, "the shared parameters of these differ"),
        (
            {"algorithm": "fedavg", "share": "first:1", "share_all_until": "1"},
            "the shared parameters of these differ",
        ),
        ({"init_from": Path("/nowhere/at/all")}, "is no run directory"),
    ],
)
def test_init_from_refuses(many: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        beginning(**{"init_from": many, **settings})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_init_from_refuses_a_run_without_models(tmp_path: Path) -> None:
    folder = ended(tmp_path / "run")
    (folder / "state.safetensors").unlink()
    with pytest.raises(InputError, match=r"state.*missing"):
        beginning(init_from=folder)
    (folder / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="damaged"):
        beginning(init_from=folder)


TWICE = """
import sys
from pathlib import Path
from dfl import Run, simulate
from tests.simulation.test_initialization import EIGHT
many, out = map(Path, sys.argv[1:])
for _ in simulate(Run(**EIGHT, init_from=many, out=out)):
    pass
for _ in simulate(Run(**EIGHT, init_from=many, algorithm="fedavg", out=out.with_name("refused"))):
    pass
"""
EIGHT = FEW | {"peers": 8, "rounds": 1, "share": "head:1"}


@pytest.mark.mpi
def test_init_from_does_not_depend_on_the_ranks(tmp_path: Path, many: Path) -> None:
    """Each rank receives the rows of its own peers, additional peers included; all ranks refuse."""
    (tmp_path / "twice.py").write_text(TWICE)
    alone = ended(tmp_path / "one", **EIGHT, init_from=many)
    done = mpirun(3, str(tmp_path / "twice.py"), str(many), str(tmp_path / "three"), timeout=120)
    first, second = (
        load_file(folder / "state.safetensors") for folder in (alone, tmp_path / "three")
    )
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("the shared parameters of these differ") == 1
    assert not (tmp_path / "refused").exists()
