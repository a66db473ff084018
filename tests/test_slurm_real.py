"""A sweep as a job array of a real Slurm, on a cluster of one node that is put up for it."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import dfl
from dfl import grid
from dfl.cells import DONE, look
from dfl.config import Run
from dfl.errors import InputError
from dfl.slurm import Slurm, queued, submit, write
from tests.slurm import cluster, missing, said, wait
from tests.test_mpi import CLOCKS

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no Slurm on this machine: {missing()} is missing")

GRID = """
peers = 4
rounds = 200
eval_every = 50
checkpoint_every = 5
examples_per_peer = 60
[sweep]
bits = [4, 8]
seed = [0, 1]
"""
ASKED = Slurm(ntasks=2, time="10", signal=60, mpi="pmi2")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with cluster() as environment, pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "SLURM_CONF"):
            patch.setenv(name, environment[name])
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        yield environment


def submitted(folder: Path) -> str:
    """Submit what has not finished and is not queued; the job."""
    cells = [folder / cell.name for cell in grid.read(folder / "grid.toml", 2).cells]
    here = queued(folder)
    left = [cell for cell in cells if look(cell).status != DONE and cell.name not in here]
    return submit(write(folder, left, ASKED)) if left else ""


def test_whatever_becomes_of_its_tasks_a_sweep_ends_in_the_same_bits(
    tmp_path: Path, slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.toml").write_text(GRID)
    asked, sweep = grid.read(tmp_path / "grid.toml", 2), tmp_path / "sweep"
    grid.keep(asked, sweep)
    shutil.copy(tmp_path / "grid.toml", sweep)
    cells = [sweep / cell.name for cell in asked.cells]
    job = submitted(sweep)
    assert set(queued(sweep)) == {cell.name for cell in cells}
    assert submitted(sweep) == ""  # they are all queued
    disturb(job, cells, slurm)

    wait(lambda: not queued(sweep), 200, lambda: said("squeue", env=slurm) + logs(sweep))
    assert [look(cell).status for cell in cells[:3]] == [DONE] * 3, logs(sweep)
    assert look(cells[3]).status != DONE
    assert submitted(sweep)
    assert list(queued(sweep)) == [cells[3].name]
    wait(lambda: not queued(sweep), 100)
    assert look(cells[3]).status == DONE, logs(sweep)

    first = [(sweep / "slurm" / f"{job}_{task}.log").read_text() for task in (1, 2, 3, 4)]
    assert [log.count("restarts 1") for log in first] == [1, 1, 1, 0], logs(sweep)
    assert [log.count("goes back into the queue") for log in first] == [1, 0, 0, 0]
    for cell in cells:
        same(cell, tmp_path / "undisturbed" / cell.name)


def disturb(job: str, cells: list[Path], env: dict[str, str]) -> None:
    """Warn the first as before its time limit, kill the second, put the third back, cancel the fourth."""
    for number, cell in enumerate(cells, 1):
        wait(lambda cell=cell: list((cell / "checkpoint").glob("*")), 100)
        for words in (
            (["scancel", "--signal=USR1"],),
            (["scancel", "--signal=KILL"],),
            (["scontrol", "requeue"],),
            (["scancel"],),
        )[number - 1]:
            said(*words, f"{job}_{number}", env=env)
    wait(lambda: "FAILED" in said("squeue", "--states=all", "-h", "-r", "-j", f"{job}_2", "-o", "%T", env=env), 30)
    said("scontrol", "requeue", f"{job}_2", env=env)


def same(cell: Path, undisturbed: Path) -> None:
    """Whether a cell has what the same run has that nobody disturbs, here on one rank."""
    run = Run.from_dict(tomllib.loads((cell / "cell.toml").read_text()) | {"out": str(undisturbed)})
    for _ in dfl.simulate(run):
        pass
    assert (cell / "state.safetensors").read_bytes() == (undisturbed / "state.safetensors").read_bytes()
    one, two = (pd.read_csv(f / "metrics.csv", dtype=str).drop(columns=CLOCKS) for f in (cell, undisturbed))
    pd.testing.assert_frame_equal(one, two)


def logs(sweep: Path) -> str:
    return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted((sweep / "slurm").glob("*.log")))


def test_what_this_slurm_refuses(tmp_path: Path, slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as refused:
        submit(write(tmp_path, [tmp_path / "cell"], Slurm(partition="nowhere")))
    assert "invalid partition specified: nowhere" in str(refused.value)
    assert "\n" not in str(refused.value)
