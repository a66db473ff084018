"""The command `dfl doctor`: what a bug report needs to know of this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dfl.core import command_line
from dfl.core.errors import one_line, printable

_ABOUT = (
    "Print what a bug report needs: versions, MPI and its launchers, threads, BLAS, GPU, data, "
    "Slurm. It writes and sends nothing."
)

PACKAGES = (
    "torch", "numpy", "scipy", "networkx", "pandas", "matplotlib", "scikit-learn", "safetensors",
    "cyclopts", "rich", "mpi4py", "mpich", "tensorboard", "wandb", "mlflow", "mlflow-skinny",
)  # fmt: skip
"""Packages whose versions are shown, where they are installed."""
PATIENCE = 30
"""Seconds for which another program is waited for."""
LAUNCHERS = ("mpirun", "mpiexec", "srun")
"""Programs that start ranks."""
VARIABLES = re.compile(r"(DFL|OMP|MKL|OPENBLAS|CUDA|MPICH|OMPI|I_MPI|UCX)_|SLURM_(JOB_ID|NTASKS)$")
"""The names of the environment variables that are shown."""
_LIBRARY = "from mpi4py import MPI; print(MPI.Get_library_version())"
_RANKS = "from mpi4py import MPI; print(MPI.COMM_WORLD.size, flush=True)"

Fact = tuple[str, str]
"""A name and what is known of it, on a line."""


def main() -> int:
    """Run the command line of this process and return the exit code: 0, 2, or 130 for Ctrl-C."""
    return command_line.run_command(_run_command_line)


def _run_command_line(tokens: Sequence[str]) -> None:
    app = command_line.app("doctor", _ABOUT)

    @app.default
    def command() -> None:
        """Print it."""
        for name, text in facts():
            print(f"{name:<11}{printable(text)}", flush=True)

    command_line.call(app, tokens)


def facts() -> Iterator[Fact]:
    """Yield what is known of this machine."""
    yield from _versions()
    yield from _machine()
    yield from _mpi()
    yield from _compute()
    yield from _data()
    yield "slurm", _output("sbatch", "--version") or "none"
    for name in sorted(filter(VARIABLES.match, os.environ)):
        yield "variable", f"{name}={os.environ[name]}"


def _versions() -> Iterator[Fact]:
    from dfl.core.version import VERSION
    from dfl.store.record import checkout

    git = checkout()
    of = f", commit {git['commit']}{', changed' if git['dirty'] else ''}" if git else ""
    yield "dfl", f"{VERSION}{of}, in {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield (
        "packages",
        ", ".join(f"{name} {number}" for name in PACKAGES if (number := _number(name))),
    )


def _machine() -> Iterator[Fact]:
    yield "system", platform.platform()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    yield "machine", f"{cores}, {memory:.1f} GiB of memory"
    here = "can" if os.access(Path.cwd(), os.W_OK) else "cannot"
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield "folder", f"{Path.cwd()}: {here} be written to, {free:.1f} GiB free"
    shown = "a terminal" if sys.stdout.isatty() else "no terminal"
    columns = shutil.get_terminal_size().columns
    yield "output", f"{shown}, {columns} columns, {sys.stdout.encoding}"


def _mpi() -> Iterator[Fact]:
    """Yield the library of mpi4py, and of every launcher whether its ranks find each other."""
    if _number("mpi4py") is None:
        yield "mpi", "mpi4py is not installed: one rank only"
        return
    yield "mpi", _output(sys.executable, "-c", _LIBRARY) or "mpi4py cannot be imported"
    for name in LAUNCHERS:
        if path := shutil.which(name):
            yield "launcher", f"{path}: {_launched(path)}"
    if not any(map(shutil.which, LAUNCHERS)):
        yield "launcher", "none: no mpirun, mpiexec or srun is on the PATH"


def _launched(launcher: str) -> str:
    """Return what comes of two ranks under a launcher."""
    ended = _run(launcher, "-n", "2", sys.executable, "-c", _RANKS)
    if isinstance(ended, str):
        return ended
    sizes = "".join(ended.stdout.split())  # both lines may come as one
    if sizes == "22":
        return "starts 2 ranks"
    if sizes == "11":
        return "starts 2 programs of 1 rank each: it is of another MPI than mpi4py"
    last = (ended.stderr.strip() or ended.stdout.strip() or "nothing printed").splitlines()[-1]
    return f"starts no 2 ranks: {last}"


def _compute() -> Iterator[Fact]:
    import numpy as np
    import torch

    yield "threads", f"{torch.get_num_threads()} of torch without --threads; a run sets its own"
    mkl = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    yield "blas", f"torch with {mkl}; numpy with {blas['name']} {blas['version']}"
    if not torch.cuda.is_available():
        yield "gpu", f"none that torch can use (built for {torch.version.cuda or 'processors'})"
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        size = f"{found.total_memory / 2**30:.1f} GiB"
        yield "gpu", f"cuda:{number} {found.name}, {size}, CUDA {torch.version.cuda}"


def _data() -> Iterator[Fact]:
    """Yield the data sets in $DFL_DATA and in the cache, by the names of their folders."""
    import pooch

    from dfl.datasets import DATASETS

    given = os.environ.get("DFL_DATA")
    folders = {"$DFL_DATA": Path(given) if given else None, "cache": Path(pooch.os_cache("dfl"))}
    for name, folder in folders.items():
        if folder is None:
            yield "data", f"{name} is not set"
            continue
        found = [each for each in DATASETS if (folder / each).is_dir()]
        yield "data", f"{name} {folder}: {', '.join(found) or 'no data set'}"


def _number(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """Return the first line that a program prints; empty where it is missing or fails."""
    ended = _run(*command)
    lines = [] if isinstance(ended, str) or ended.returncode else ended.stdout.strip().splitlines()
    return " ".join(lines[0].split()) if lines else ""


def _run(*command: str) -> subprocess.CompletedProcess[str] | str:
    """Run a program and return how it ended, or a line on why it did not."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
