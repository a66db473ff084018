"""How are the rounds of dfl and of its baselines timed? Each set-up as a program of its own, which
answers in JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dfl
from dfl.sweep.scheduler import mpirun
from experiments.speed.baselines.install import python, ready
from experiments.speed.stopwatch import WORK, Work

ROOT = Path(__file__).parents[3]
HIDDEN = {"2nn": (200, 200), "mlp:hidden=32": (32,), "softmax": ()}
"""The hidden layers of the models of the stopwatch's works."""
PATIENCE = 1800.0
"""Seconds after which a program is given up."""


@dataclass(frozen=True)
class Setup:
    """A way to run a system."""

    system: str
    processes: int
    threads: int
    style: str = "lean"

    def __str__(self) -> str:
        """For a person to read."""
        return f"{self.system}, {self.processes} processes of {self.threads} threads, {self.style}"


SETUPS = (
    Setup("dfl", 2, 1),
    Setup("dfl", 1, 1),
    Setup("pfl", 2, 1),
    Setup("pfl", 1, 1),
    Setup("pfl", 1, 2),
    Setup("gossipy", 1, 1),
    Setup("gossipy", 1, 1, "tutorial"),
    Setup("gossipy", 1, 2, "tutorial"),
    Setup("flower", 2, 1),
    Setup("flower", 2, 1, "tutorial"),
)
"""What is measured, on two cores: gossipy has one process, Flower as many as there are clients at a
time.
"""


@dataclass(frozen=True)
class Terms:
    """The same for every set-up."""

    envs: Path
    rounds: int
    warm_up: int
    prefix: Sequence[str] = ()
    """Updates before every command, such as `taskset -c 0,1`."""


def check(terms: Terms, systems: Sequence[str]) -> None:
    """Refuse what cannot be run before anything is.

    Raises:
        InputError: a baseline is not installed, or there is no mpirun.
    """
    for system in systems:
        if system != "dfl" and not ready(terms.envs, system):
            command = f"python -m experiments.speed.baselines.install --envs {terms.envs}"
            raise dfl.InputError(f"{system} is not installed in {terms.envs}: {command}")
    if "dfl" in systems:
        mpirun("two ranks need")


def answer(setup: Setup, work: str, terms: Terms) -> dict[str, Any]:
    """Run one set-up, and read what it says: its `seconds` are those of the rounds after the
    warm-up.

    Raises:
        InputError: it failed, or said nothing of the kind.
    """
    ours = setup.system == "dfl"
    words = _ours(setup, work, terms) if ours else _theirs(setup, WORK[work], terms)
    done = subprocess.run(
        [*terms.prefix, *words],
        cwd=ROOT if ours else ROOT / "experiments/speed",
        env=_environment(setup.threads),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode:
        raise dfl.InputError(
            f"{setup} on {work}: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
        )
    return _read(done.stdout, setup, terms)


def _read(printed: str, setup: Setup, terms: Terms) -> dict[str, Any]:
    """The last line that is JSON, among whatever else a baseline prints."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    said: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if len(said.get("seconds", ())) != terms.rounds:
        raise dfl.InputError(f"{setup} did not time {terms.rounds} rounds")
    return {"version": dfl.__version__, **said}


def _environment(threads: int) -> Mapping[str, str]:
    """Ours without what would change theirs; the number of threads for those who read it before
    torch is asked.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    return own | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _ours(setup: Setup, work: str, terms: Terms) -> list[str]:
    ranks = [mpirun("two ranks need"), "-n", str(setup.processes)] if setup.processes > 1 else []
    numbers = {
        "work": work,
        "rounds": terms.rounds,
        "warm-up": terms.warm_up,
        "threads": setup.threads,
    }
    return [*ranks, sys.executable, "-m", "experiments.speed.stopwatch", *_flags(numbers)]


def _theirs(setup: Setup, it: Work, terms: Terms) -> list[str]:
    several = setup.system == "pfl" and setup.processes > 1
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(setup.processes),
        "-m",
    ]
    numbers = {
        "peers": it.peers,
        "examples": it.examples,
        "features": it.features,
        "batch-size": it.batch_size,
        "rounds": terms.rounds,
        "warm-up": terms.warm_up,
        "processes": setup.processes,
        "threads": setup.threads,
        "style": setup.style,
    }
    driver = [*(torchrun if several else []), f"baselines.drive_{setup.system}", *_flags(numbers)]
    return [
        str(python(terms.envs, setup.system)),
        "-m",
        *driver,
        "--hidden",
        *map(str, HIDDEN[it.model]),
    ]


def _flags(numbers: Mapping[str, object]) -> Iterator[str]:
    return (word for name, value in numbers.items() for word in (f"--{name}", str(value)))
