"""Runs under a real mpirun: the same bytes on one and three ranks, and after a kill.

`tests/comm/test_mpi.py` and `tests/store/test_survival.py` have more of both.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import dfl
from tests.mpi import layouts
from tests.support.mpirun import mpirun
from tests.support.stopping import same

pytestmark = pytest.mark.usefixtures("no_figures")

HARD = dfl.Run(
    peers=7,
    rounds=12,
    eval_every=5,
    checkpoint_every=2,
    topology="one_peer_exponential",
    bits=3,
    attack="sign_flip:peers=2",
    model="mlp:hidden=12",
    faults="link_loss:p=0.2+outage:p=0.05",
)
KILL = """
import os, signal, sys
import dfl
from dataclasses import replace
from pathlib import Path
from dfl.simulation import prepare
from tests.mpi.layouts import shuffled
from tests.simulation.test_ranks import HARD

if "shuffled" in sys.argv:
    prepare.placed = shuffled

class Kill(dfl.Callback):
    def row(self, row):
        if row.round == 5:
            os.kill(os.getpid(), signal.SIGKILL)

for row in dfl.simulate(replace(HARD, out=Path(sys.argv[1])), [Kill()]):
    pass
"""


def test_a_sample_of_runs_is_the_same_on_one_and_three_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / "1", tmp_path / "3"]
    layouts.main(folders[0], "few")
    done = mpirun(3, "-m", "tests.mpi.layouts", str(folders[1]), "few")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = [sorted(each.name for each in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert len(names[0]) == 8
    for name in names[0]:
        same(folders[0] / name, folders[1] / name)


@pytest.mark.parametrize("order", ["consecutive", "shuffled"])
def test_a_job_whose_rank_0_is_killed_is_resumed_on_one_rank(tmp_path: Path, order: str) -> None:
    (tmp_path / "kill.py").write_text(KILL)
    done = mpirun(2, str(tmp_path / "kill.py"), str(tmp_path / "killed"), order)
    assert done.returncode not in (0, 1, 2), done.stderr
    list(dfl.simulate(dfl.resumed(tmp_path / "killed")))
    list(dfl.simulate(replace(HARD, out=tmp_path / "whole")))
    same(tmp_path / "whole", tmp_path / "killed")
