"""Jobs under a real mpirun."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
CLOCKS = ["seconds", "wire_bytes"]
"""Columns that differ between launches: the time that passed, and what MPI moved between ranks."""


def mpirun_command(ranks: int, *arguments: str) -> list[str]:
    """Return the command line that starts Python with these arguments on so many ranks."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    launcher = shutil.which("mpirun", path=path)
    assert launcher, "mpirun is missing: pip install 'dfl-sim[mpi]'"
    return [launcher, "-n", str(ranks), sys.executable, *arguments]


def mpirun(ranks: int, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on so many ranks, and return how the job ended."""
    return subprocess.run(
        mpirun_command(ranks, *arguments),
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
