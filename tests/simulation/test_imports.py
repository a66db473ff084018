"""What a run imports: a start of a rank costs its imports, times the number of ranks."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dfl.inference
import dfl.sweep
from dfl.algorithms import ALGORITHMS
from tests.support.hospitals import command_line as hospital_flags
from tests.support.hospitals import frame
from tests.support.mpirun import ENV, mpirun
from tests.support.small_run import FLAGS

COMPILER = {"torch._dynamo", "sympy"}
"""What torch imports for some functions on the meta device, and where gradients are given."""
HEAVY = {"pandas", "sklearn", "networkx", "scipy.special", "scipy.stats", *COMPILER}
"""What no run on a ring needs."""
AT_ROOT = {"cyclopts", "rich", "topologies", "scipy.linalg"}
"""What rank 0 alone needs."""
LATE = {"matplotlib", "jinja2"}
"""What draws figures and the report after the last round."""

WATCHED = """
import gc, json, sys
from pathlib import Path
from dfl.core import command_line
command_line.spare_imports()
import dfl.run
from dfl.comm.mpi import connect

folder = Path(sys.argv[1])
sys.argv[1:] = [*sys.argv[2:], f"--out={folder / 'run'}"]
at_round_0, again = [], command_line.search_garbage
def watched():
    at_round_0.append([*sys.modules])
    again()
command_line.search_garbage = watched
assert dfl.run.main() == 0
found = [at_round_0[0], [*sys.modules], gc.isenabled(), gc.get_freeze_count()]
(folder / f"{connect().rank}.json").write_text(json.dumps(found))
"""


def test_what_prepares_a_run_is_imported_without_torch() -> None:
    code = "import sys, topologies, dfl.reporting.simulate, dfl.run; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert ended.returncode == 0, ended.stderr
    assert not {*HEAVY, *LATE, "torch", "mpi4py", "rich"} & set(ended.stdout.split())


@pytest.mark.parametrize("package", [dfl, dfl.inference, dfl.sweep])
def test_a_package_lists_what_it_imports_at_its_first_use(package: ModuleType) -> None:
    assert dir(package) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in dir(package))


def test_nothing_is_searched_for_garbage_when_the_process_ends() -> None:
    code = (
        "import atexit, gc; atexit.register(lambda: print(len(gc.get_objects()))); "
        "from dfl.core.command_line import spare_imports; spare_imports()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 1000


EVERY_METHOD = """
import sys
import dfl
from tests.mpi.layouts import methods, runs
from tests.simulation.test_imports import COMPILER

for label, run in [*methods(), ("adapters", dict(runs())["adapters"])]:
    for _ in dfl.simulate(run):
        pass
    print(label, *COMPILER & {*sys.modules})
"""


@pytest.mark.slow
def test_no_method_imports_the_compiler_of_torch() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EVERY_METHOD], capture_output=True, text=True, env=ENV
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) > len(ALGORITHMS)
    assert [line for line in lines if len(line.split()) > 1] == []


@pytest.mark.slow
def test_inference_imports_torch_before_it_searches_for_garbage(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    frame(sites=2).to_csv(table, index=False)
    code = (
        "import sys; from dfl.core import command_line; "
        "command_line.search_garbage = lambda: print('torch' in sys.modules); "
        "from dfl.inference.__main__ import main; assert main() == 0"
    )
    flags = hospital_flags(table, "--estimator", "meta")
    ended = subprocess.run(
        [sys.executable, "-c", code, *flags], capture_output=True, text=True, env=ENV
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("True\n")


@pytest.mark.mpi
def test_ranks_import_what_they_need_only(tmp_path: Path) -> None:
    done = mpirun(2, "-c", WATCHED, str(tmp_path), *FLAGS)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        early, late = set(found[0]), set(found[1])
        assert not HEAVY & late
        assert not LATE & early
        assert (late >= LATE) is (rank == 0)
        assert AT_ROOT & early == (AT_ROOT if rank == 0 else set())
        assert found[2]
        assert found[3] > 100_000, "garbage is searched for among what was imported"
