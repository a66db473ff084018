"""Launches: the ranks of a job find each other, and no rank leaves the others waiting."""

import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dfl.comm import mpi
from dfl.comm.mpi import World
from dfl.comm.startup import RANKS, first
from dfl.core.errors import DivergedError, InputError
from tests.support.mpirun import ENV, ROOT, mpirun

pytestmark = pytest.mark.mpi

LAUNCHERS = [*mpi._SIZES, *RANKS]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove the launcher's variables and the result of an earlier `connect`."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mpi, "_WORLDS", [])
    return monkeypatch


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        ({"PMI_SIZE": "1"}, False),
        ({"PMI_SIZE": "16"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"SLURM_STEP_NUM_TASKS": "32"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_NTASKS": "32"}, False),  # inside an allocation, but not started by srun
        ({"PMI_SIZE": ""}, False),
    ],
)
def test_launchers_are_known_by_their_environment(
    alone: pytest.MonkeyPatch, environment: dict[str, str], launched: bool
) -> None:
    for name, value in environment.items():
        alone.setenv(name, value)
    assert mpi._launched() is launched


def test_mpi4py_is_not_imported_without_a_launcher(alone: pytest.MonkeyPatch) -> None:
    alone.setitem(sys.modules, "mpi4py", None)  # importing it would fail
    world = mpi.connect()
    assert (world.rank, world.size, world.comm) == (0, 1, None)


def test_a_launcher_without_mpi4py_is_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("PMI_SIZE", "4")
    alone.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(InputError, match=r"mpi4py.*\[mpi\]"):
        mpi.connect()


@pytest.mark.parametrize(
    ("environment", "prints"),
    [
        ({}, True),
        ({"PMI_RANK": "0"}, True),
        ({"PMIX_RANK": "3"}, False),
        ({"SLURM_PROCID": "2"}, False),
    ],
)
def test_the_first_process_prints(
    alone: pytest.MonkeyPatch, environment: dict[str, str], prints: bool
) -> None:
    for name, value in environment.items():
        alone.setenv(name, value)
    assert first() is prints


def test_a_launcher_of_another_mpi_is_refused() -> None:
    """Else every process would run its own simulation: Open MPI's variables, MPICH's library."""
    environment = {k: v for k, v in ENV.items() if k not in LAUNCHERS} | {
        "OMPI_COMM_WORLD_SIZE": "4"
    }
    command = [sys.executable, "-m", "dfl.run", "--rounds", "1"]
    first, other = (
        subprocess.run(
            command,
            env={**environment, "OMPI_COMM_WORLD_RANK": rank},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        for rank in ("0", "1")
    )
    assert (first.returncode, other.returncode) == (2, 2)
    assert "mpi4py sees one" in first.stderr
    assert len(first.stderr.strip().splitlines()) == 1
    assert other.stderr == ""


def test_the_operations_of_a_lone_rank_need_no_mpi() -> None:
    world = World()
    rows = np.arange(6).reshape(3, 2)
    assert world.from_root(lambda: b"x") == b"x"
    assert world.scatter(lambda rank: bytes([rank])) == b"\0"
    np.testing.assert_array_equal(world.gather(rows), rows)
    np.testing.assert_array_equal(world.columns(rows, [range(2)], [3]), rows)
    assert world.minimum(7, 8) == (7, 8)
    nothing = np.zeros(0, np.uint8)
    world.exchange(world.link({}, {}), (nothing, []), (nothing, []))
    assert world.local_rank == 0
    world.leave()


def test_errors_have_their_exit_codes() -> None:
    assert (InputError("x").code, DivergedError("x").code) == (2, 3)


ABANDONED = """
import sys, dfl, dfl.comm.mpi
from functools import partialmethod
dfl.comm.mpi.World.leave = partialmethod(dfl.comm.mpi.World.leave, seconds=3.0)
for row in dfl.simulate(dfl.Run(peers=4, rounds=10**6, model="softmax", eval_every=5)):
    if row["round"] and dfl.comm.mpi.connect().rank == 1:
        sys.exit(0)
"""

REFUSED = """
import sys, dfl, dfl.comm.mpi
from functools import partialmethod
dfl.comm.mpi.World.leave = partialmethod(dfl.comm.mpi.World.leave, seconds=3.0)
from dfl.comm.received import Received
average, calls = Received.average, []
def refusing(self):
    calls.append(0)
    if len(calls) == 20 and dfl.comm.mpi.connect().rank == 1:
        raise dfl.InputError("this rank has too few messages")
    return average(self)
Received.average = refusing
for row in dfl.simulate(dfl.Run(peers=4, rounds=10**6, model="softmax", eval_every=10**5)):
    pass
"""

DIVERGED = """
import dfl
for row in dfl.simulate(dfl.Run(peers=4, rounds=50, model="mlp", lr=1e4)):
    pass
"""


def script(folder: Path, text: str, ranks: int = 3) -> tuple[Any, float]:
    (folder / "script.py").write_text(text)
    begun = time.monotonic()
    return mpirun(ranks, str(folder / "script.py"), timeout=120), time.monotonic() - begun


def test_a_rank_that_leaves_alone_ends_the_job(tmp_path: Path) -> None:
    done, seconds = script(tmp_path, ABANDONED)
    assert done.returncode != 0
    assert "rank 1 of 3 (peers 1 to 1) stopped alone" in done.stderr
    assert seconds < 90


def test_the_error_of_a_rank_that_stops_alone_is_printed_once(tmp_path: Path) -> None:
    done, seconds = script(tmp_path, REFUSED, ranks=2)
    assert done.returncode != 0
    message = "rank 1 of 2 (peers 2 to 3) stopped alone: this rank has too few messages"
    assert done.stderr.count(message) == 1
    assert "finite" not in done.stderr  # the others took nothing for a figure
    assert seconds < 90


def test_divergence_in_a_script_is_printed_once(tmp_path: Path) -> None:
    done, _ = script(tmp_path, DIVERGED)
    assert done.returncode == 3
    assert done.stderr.count("is no longer finite") == 1
    assert "Traceback" not in done.stderr


OWN = r"""
import os, sys
import numpy as np, torch
from torch import nn
import dfl
x, y = np.random.default_rng(0).normal(size=(60, 4)).astype("f4"), np.arange(60) % 3
data = dfl.Data(x, y, x, y, 3)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).float()
model[0].requires_grad_(False)
torch.manual_seed(os.getpid())
unequal = nn.Linear(4, 3).float()
run = dict(peers=2, rounds=2, eval_every=1)
def ends(**more):
    try:
        for _ in dfl.simulate(dfl.Run(**run | {"model": model, "dataset": data} | more)): pass
    except (dfl.InputError, dfl.DivergedError) as error:
        return f"{type(error).__name__}: {error}"
    return "ran"
def late(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none") / (labels != 2)
class Signs:
    def encode(self, messages, draw):
        return (messages < 0).to(torch.uint8).reshape(len(messages), -1)
    def decode(self, encoded, m, dtype):
        return (1 - 2.0 * encoded.reshape(len(encoded), -1)).to(dtype)
found = [
    ends(out=sys.argv[1]),
    ends(dataset=dfl.Data(x * np.nan, y, x, y, 3)),
    ends(loss=late),
    ends(model=unequal),
    ends(model=f"{sys.argv[2]}:build"),
    ends(algorithm="choco", compressor=Signs()),
]
for row in dfl.simulate(dfl.Run(peers=4, rounds=10**6, model="softmax", eval_every=5)):
    if row["round"] == 10:
        break
os.write(1, ("|".join(found) + "\n").encode())  # in one write
"""
UNEQUAL = """
import os, torch
torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
def build(shape, classes):
    return torch.nn.Linear(4, 3)
"""


def test_given_objects_run_on_several_ranks_and_errors_are_raised_on_every_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model has frozen parameters, and some ranks have no peer.

    Models that differ between the ranks are refused. The last run is left after some rounds, and
    the job ends well.
    """
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    more = [str(tmp_path / "own.py"), str(tmp_path / "3"), str(tmp_path / "unequal.py")]
    done = mpirun(3, *more, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    ran, refused, diverged, unequal, file, signs = lines[0].split("|")
    assert ran == signs == "ran"
    assert refused.startswith("InputError: train_inputs has nan")
    assert diverged.startswith("DivergedError: train_loss of peer 0 is")
    for line in (unequal, file):
        assert line.startswith("InputError: ")
        assert "differs between the ranks" in line
    assert "initial values" in file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [more[0], str(tmp_path / "1"), more[2]])
        try:
            runpy.run_path(more[0])
        finally:
            torch.set_default_dtype(torch.float32)
    alone = capfd.readouterr().out.strip().split("|")
    assert alone == [ran, refused, diverged, "ran", "ran", "ran"]
    states = [(tmp_path / n / "state.safetensors").read_bytes() for n in ("1", "3")]
    assert states[0] == states[1]


CHANGING = """
import os, sys, torch, dfl
from dataclasses import dataclass
from dfl.algorithms.gossip.dfedavgm import DFedAvgM
@dataclass(frozen=True)
class Kept:
    x: torch.Tensor
    kept: torch.Tensor
@dataclass(frozen=True, kw_only=True)
class Changing(DFedAvgM):
    after: int
    def init(self, x, copies, net):
        return Kept(x, torch.zeros_like(x))
    def round(self, state, task, net):
        x = super().round(state, task, net).x
        return Kept(x, state.kept if net.t < self.after else state.kept[:1])
found = []
for t in (0, 3):
    run = dfl.Run(algorithm=Changing(after=t), peers=4, rounds=6, eval_every=6, model="softmax")
    try:
        list(dfl.simulate(run))
    except dfl.InputError as error:
        found.append(str(error))
os.write(1, ("|".join(found) + "\\n").encode())  # in one write
"""


def test_a_state_of_another_form_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    """Two of four peers are on one of three ranks; the others keep a state with one row."""
    (tmp_path / "changing.py").write_text(CHANGING)
    done = mpirun(3, str(tmp_path / "changing.py"), timeout=45)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    first, later = lines[0].split("|")
    for line in (first, later):
        assert "what round returns: kept must be Tensor of float32 (2, " in line


FULL = """
import dfl, dfl.store.run_files
from pathlib import Path
import sys
def full(path, flags):
    raise OSError(28, "No space left on device")
dfl.store.run_files.no_follow = full
out = Path(sys.argv[0] + ".run")
for row in dfl.simulate(dfl.Run(peers=4, rounds=10**6, model="softmax", out=out)):
    pass
"""


def test_a_full_disk_on_rank_0_ends_the_job(tmp_path: Path) -> None:
    done, seconds = script(tmp_path, FULL)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("cannot be written to: No space left on device") == 1
    assert seconds < 90


ONE_SIDED = """
import dfl, dfl.comm.mpi
from functools import partialmethod
from dfl.simulation import prepare
dfl.comm.mpi.World.leave = partialmethod(dfl.comm.mpi.World.leave, seconds=3.0)
known = prepare.make_test_sets
def refuse(task, *more, **named):
    if task.peers.tolist() == [2]:
        raise dfl.InputError("only rank 2 raises this")
    return known(task, *more, **named)
prepare.make_test_sets = refuse
for row in dfl.simulate(dfl.Run(peers=3, rounds=10**6, model="softmax")):
    pass
"""


def test_an_error_that_only_one_rank_sees_ends_the_job(tmp_path: Path) -> None:
    """Ranks agree on refusals; should one not be agreed upon, no rank waits forever."""
    done, seconds = script(tmp_path, ONE_SIDED)
    assert done.returncode != 0
    assert "rank 2 of 3" in done.stderr
    assert seconds < 90
