"""The experiment on a GPU, tried on a processor."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.speed import gpu as experiment
from experiments.speed.baselines import job as jobs
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

FEW = [
    "--device", "cpu", "--side", "64", "--rounds", "2", "--warm-up", "1", "--peers", "2",
    "--works", "16 perceptrons", "--precisions", "float32", "bf16",
]  # fmt: skip
PFL = """#!/bin/sh
echo "$@" > {given}
echo 'INFO of pfl'
echo '{{"seconds": [0.5, 0.25, 1.0], "peak_memory": 1073741824}}'
"""


def test_every_system_is_timed_and_kept(tmp_path: Path) -> None:
    program, given = tmp_path / "python", tmp_path / "given"
    program.write_text(PFL.format(given=given))
    program.chmod(0o755)
    out = tmp_path / "out"
    done = run_experiment("speed.gpu", out, *FEW, "--pfl", str(program))
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(out / "table.csv")
    assert list(table["system"]) == list(experiment.SYSTEMS) * 2
    assert (table["ms_min"] <= table["ms"]).all()
    assert (table["ms"] <= table["ms_max"]).all()
    pfl = table[table["system"] == "pfl"]
    assert set(pfl["ms"]) == {500}
    assert set(pfl["peak_gib"]) == {1}
    assert table["share"].to_numpy() == pytest.approx(
        (table["limit_ms"] / table["ms"]).to_numpy(), rel=0.01
    )
    flags = given.read_text().split()
    job = jobs.read(flags[2:])
    assert flags[:2] == ["-m", "baselines.drive_pfl"]
    assert (job.network, job.hidden, job.peers) == ("perceptron", (200, 200), 2)
    assert (job.device, job.precision) == ("cpu", "bf16")

    given.unlink()
    again = run_experiment("speed.gpu", out, *FEW, "--pfl", str(program), "--keep")
    assert again.returncode == 0, again.stderr
    assert not given.exists()
    assert (out / "cells/16 perceptrons, bf16, dfl.json").exists()


def test_the_products_of_a_step_are_counted() -> None:
    """A perceptron: twice the weights for each example forward, and as often for each gradient."""
    _, job = experiment.WORKS["16 perceptrons"]
    first, others = 784 * 200, 200 * 200 + 200 * 10
    assert experiment.operations(job) == 2 * job.batch_size * (2 * first + 3 * others)
    for name, (_, each) in experiment.WORKS.items():
        peers = int(name.partition(" ")[0].replace(",", ""))
        assert each.peers == peers
        out = jobs.network(each)(torch.zeros(2, *each.shape))
        assert out.shape == (2, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "flower"], "--systems must be among dfl, dfl, step by step, pfl, torch"),
        (["--works", "A"], "--works must be among 1,000 LeNets"),
        (["--precisions", "int8"], "--precisions must be among float32, tf32, bf16, not int8"),
    ],
)
def test_unknown_choices_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_experiment("speed.gpu", tmp_path / "out", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpu: {message}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused(tmp_path: Path) -> None:
    done = run_experiment("speed.gpu", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu: --device cuda: there is no GPU; cpu tries the experiment\n"


def test_a_broken_pfl_is_named(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho No module named pfl >&2\nexit 1\n")
    program.chmod(0o755)
    done = run_experiment(
        "speed.gpu", tmp_path / "out", *FEW, "--systems", "pfl", "--pfl", str(program)
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "gpu: pfl: No module named pfl"
    assert not list((tmp_path / "out/cells").iterdir())
