"""Runs on a real GPU: their numbers, captured steps, and layouts of peers on ranks.

`test_device` has what can be tested on a stand-in.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import random_array

import dfl
from dfl.comm.weighting import weighted_sum
from dfl.compression.quantize import Quantize
from dfl.core import randomness
from dfl.simulation import build_task
from dfl.training import capture
from tests.mpi import layouts
from tests.support.mpirun import mpirun
from tests.support.quadratic import FEW
from tests.support.stopping import crash, same
from tests.training.test_device import RUNS

pytestmark = [
    pytest.mark.usefixtures("no_figures"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

GPU = torch.device("cuda")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": "2nn"},
    "convolutions": {"model": "cnn", "examples_per_peer": 20},
    "strides": {"model": "resnet20", "examples_per_peer": 10},
    "momentum": {"algorithm": "dsgdm", "model": "cnn", "examples_per_peer": 20},
    "clients": {"algorithm": "fedavg:fraction=0.4", "model": "cnn", "examples_per_peer": 20},
    "one client": {"algorithm": "fedavg:fraction=0", "model": "cnn", "examples_per_peer": 20},
    "correction": {"algorithm": "gradient_tracking", "weight_decay": 0.01},
    "proximal": {"algorithm": "fedprox:mu=0.1,stragglers=0.5", "local_epochs": 3},
    "ascent": {"algorithm": "dfedsam:rho=0.1"},
    "bf16": {"model": "cnn", "precision": "bf16", "examples_per_peer": 20},
    "tf32": {"model": "cnn", "precision": "tf32", "examples_per_peer": 20},
    "unequal": {"partition": "dirichlet:alpha=0.3", "model": "mlp:hidden=8", "batch_size": 3},
    "all examples": {"partition": "dirichlet:alpha=0.3", "batch_size": 0, "local_steps": 3},
    "loop": {"engine": "loop", "model": "cnn", "examples_per_peer": 20},
    "rates": {"lr_schedule": "step:every=1,factor=0.5", "model": "cnn", "examples_per_peer": 20},
    "no momentum": {
        "momentum": 0.0,
        "weight_decay": 0.01,
        "lr_schedule": "cosine",
        "model": "cnn",
        "examples_per_peer": 20,
    },
}
"""Runs with every form of a local step."""


def run(folder: Path, **settings: Any) -> dfl.Run:
    return dfl.Run(**{**FEW, "device": "cuda", "out": folder, **settings})


def simulated(folder: Path, **settings: Any) -> list[dict[str, float]]:
    return [dict(row) for row in dfl.simulate(run(folder, **settings))]


@pytest.mark.parametrize("name", [*RUNS, *MODELS])
def test_a_run_learns_as_on_a_processor(name: str, tmp_path: Path) -> None:
    settings = {**RUNS, **MODELS}[name]
    if settings.get("precision") == "tf32":
        other = {**settings, "precision": "float32"}
    else:
        other = settings
    there = simulated(tmp_path / "gpu", **settings)[-1]
    here = simulated(tmp_path / "cpu", **{**other, "device": "cpu"})[-1]
    assert np.isfinite(there["train_loss"])
    np.testing.assert_allclose(there["train_loss"], here["train_loss"], rtol=0.03)


@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_are_those_that_they_capture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[capture.Captured | None] = []
    known = capture._capture

    def noted(*given: Any, **more: Any) -> capture.Captured | None:
        captured.append(known(*given, **more))
        return captured[-1]

    monkeypatch.setattr(capture, "_capture", noted)
    simulated(tmp_path / "captured", **MODELS[name])
    assert captured
    assert None not in captured
    monkeypatch.setattr(build_task, "is_captured", lambda *given: False)
    simulated(tmp_path / "one by one", **MODELS[name])
    same(tmp_path / "captured", tmp_path / "one by one")


def test_a_loss_that_waits_for_the_gpu_is_not_captured(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
        return each * (1.0 if float(each.detach().sum()) > 0 else 0.5)

    settings: dict[str, Any] = {"model": "cnn", "examples_per_peer": 20}
    waits = simulated(tmp_path / "waits", loss=loss, **settings)
    does_not = simulated(tmp_path / "does not", **settings)
    assert [row["train_loss"] for row in waits] == [row["train_loss"] for row in does_not]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_the_same_again_and_after_a_crash(name: str, tmp_path: Path) -> None:
    simulated(tmp_path / "whole", **MODELS[name])
    again = run(tmp_path / "again", checkpoint_every=1, **MODELS[name])
    crash(again, 2)
    list(dfl.simulate(dfl.resumed(tmp_path / "again")))
    same(tmp_path / "whole", tmp_path / "again")


@pytest.mark.parametrize("part", ["few"])
def test_runs_are_the_same_on_one_and_three_ranks(part: str, tmp_path: Path) -> None:
    """`--device auto` takes the GPU."""
    layouts.main(tmp_path / "1", part)
    done = mpirun(3, "-m", "tests.mpi.layouts", str(tmp_path / "3"), part)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = sorted(each.name for each in (tmp_path / "1").iterdir())
    assert len(names) == 8
    for name in names:
        same(tmp_path / "1" / name, tmp_path / "3" / name)


JOB = """
import sys
from pathlib import Path
import dfl
from tests.training.test_gpu import MODELS, run
for name in MODELS:
    for row in dfl.simulate(run(Path(sys.argv[1], name), **MODELS[name])):
        pass
"""


def test_every_form_of_a_step_is_the_same_on_one_and_three_ranks(tmp_path: Path) -> None:
    for name in MODELS:
        simulated(tmp_path / "1" / name, **MODELS[name])
    done = mpirun(3, "-c", JOB, str(tmp_path / "3"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in MODELS:
        same(tmp_path / "1" / name, tmp_path / "3" / name)


def on_both(f: Callable[[torch.device], torch.Tensor]) -> None:
    there = f(GPU)
    assert there.is_cuda
    assert torch.equal(there.cpu(), f(torch.device("cpu")))


def test_random_numbers_are_those_of_a_processor() -> None:
    on_both(lambda device: randomness.bits(3, "test", [1, 5], 2, n=slice(7, 400), device=device))
    on_both(lambda device: randomness.uniform(3, "test", [1, 5], 2, n=400, device=device))
    sizes = np.array([40, 7])
    on_both(lambda device: randomness.permutations(3, "o", [1, 5], sizes=sizes, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_sums_are_those_of_a_processor(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    weights = random_array((20, 43), density=0.2, rng=rng, format="csr")
    rows = torch.from_numpy(rng.normal(size=(43, 2570))).to(dtype)
    on_both(lambda device: weighted_sum(weights, rows.to(device)))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 11])
def test_encoded_messages_are_those_of_a_processor(bits: int) -> None:
    messages = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 1003))).float()
    ids = np.arange(5)

    def encoded(device: torch.device) -> torch.Tensor:
        draw = randomness.draws(0, "test", ids, 1, device=device)
        return Quantize(bits=bits).encode(messages.to(device), draw)

    on_both(encoded)
