"""Installs every baseline into an environment of its own, from PyPI, in the versions that were
measured.

    python -m experiments.speed.baselines.install --envs DIR

Environments that exist are left alone. torch is pinned to the version of constraints.txt, so
every system computes with the same kernels, dfl too; where an index has CPU wheels of it, pip is
pointed there as usual (`PIP_EXTRA_INDEX_URL` or `PIP_FIND_LINKS`). gossipy imports torchvision
for data sets that are not used here, and there may be no CPU build of it: an empty module stands
in for it. FedJAX calls functions that later versions of JAX have no more; of 0.4.30 and 0.4.35 the
former took 26 ms for a round of work B, the latter 64. Haiku 0.0.17 needs a later JAX.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import dfl
from experiments import common

ENVS = Path.home() / ".cache" / "dfl-baselines"
"""The default folder of the environments."""

BASELINES = {
    "pfl": ("pfl[pytorch]==0.6.0",),
    "gossipy": ("gossipy-dfl==0.0.1",),
    "flower": ("flwr[simulation]==1.41.0",),
    "blazefl": ("blazefl[contrib,reproducibility]==2.0.3",),
    "fedjax": ("fedjax==0.0.17", "jax==0.4.30", "jaxlib==0.4.30", "dm-haiku==0.0.13"),
    "torch": (),
}
"""Baseline -> the packages to install besides those of all."""
COMMON = ("torch==2.13.0", "numpy==2.4.6")
"""The packages of all; a plain loop of torch needs no others."""

PROGRAMS = {"blazefl": "python3.12"}
"""Baseline -> its Python, where it needs a newer one than dfl."""

STAND_IN = (
    '"""Stands in for torchvision, which gossipy imports for its data sets."""\n'
    "datasets = transforms = None\n"
)


def install(
    *,
    envs: Path = ENVS,
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = tuple(BASELINES),
) -> None:
    """Install the baselines.

    Args:
        envs: folder of the environments.
        only: the baselines to install.

    Raises:
        InputError: no such baseline is known, the Python of one is missing, or pip failed.
    """
    unknown = sorted(set(only) - set(BASELINES))
    if unknown:
        raise dfl.InputError(
            f"--only must be among {', '.join(BASELINES)}, not {', '.join(unknown)}"
        )
    for baseline in only:
        if not ready(envs, baseline):
            make(envs, baseline)
        print(f"{baseline}: {python(envs, baseline)}")


def python(envs: Path, baseline: str) -> Path:
    """Return the interpreter of a baseline's environment."""
    return envs.expanduser().absolute() / baseline / "bin" / "python"


def ready(envs: Path, baseline: str) -> bool:
    """Return whether a baseline is installed in these versions."""
    note = _note(envs, baseline)
    return note.exists() and note.read_text() == _requirements(baseline)


def make(envs: Path, baseline: str) -> None:
    """Make a baseline's environment, or update it to these versions.

    Raises:
        InputError: the Python that it needs is not on the path, or pip failed.
    """
    own = python(envs, baseline)
    program = shutil.which(PROGRAMS.get(baseline, sys.executable))
    if program is None:
        raise dfl.InputError(f"{baseline} needs {PROGRAMS[baseline]} on the path")
    _run(program, "-m", "venv", str(own.parents[1]))
    _run(str(own), "-m", "pip", "install", "--quiet", *BASELINES[baseline], *COMMON)
    if baseline == "gossipy":
        place = _run(
            str(own), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
        ).strip()
        (Path(place) / "torchvision.py").write_text(STAND_IN)
    _note(envs, baseline).write_text(_requirements(baseline))


def _note(envs: Path, baseline: str) -> Path:
    return python(envs, baseline).parents[1] / "installed.txt"


def _requirements(baseline: str) -> str:
    return "\n".join([*BASELINES[baseline], *COMMON]) + "\n"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise dfl.InputError(
            f"{' '.join(command)}: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(common.start(install, "speed.baselines.install"))
