"""Runs the rounds of dfl and of its baselines, each set-up as a program of its own that prints
JSON.
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
NETWORKS = {
    "2nn": ("perceptron", (200, 200)),
    "mlp:hidden=32": ("perceptron", (32,)),
    "softmax": ("perceptron", ()),
    "lenet": ("lenet", ()),
    "har_lstm:hidden=32,layers=1": ("lstm", (32,)),
}
"""Model of the stopwatch's works -> network of the drivers, and the widths of its hidden layers."""
PATIENCE = 1800.0
"""Maximum number of seconds of a program."""


@dataclass(frozen=True)
class Setup:
    """A way to run a system."""

    system: str
    processes: int
    threads: int
    style: str = "lean"

    def __str__(self) -> str:
        """Return a description."""
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
    Setup("blazefl", 2, 1),
    Setup("blazefl", 1, 1),
    Setup("blazefl", 1, 2),
    Setup("fedjax", 2, 1),
    Setup("fedjax", 1, 1),
    Setup("fedjax", 1, 2),
    Setup("torch", 2, 1),
    Setup("torch", 1, 1),
    Setup("torch", 1, 2),
)
"""The set-ups, on two cores: gossipy has one process, Flower one per client at a time, FedJAX one
with so many devices.
"""


@dataclass(frozen=True)
class Terms:
    """The terms of all set-ups: environments, rounds, start of the command, examples."""

    envs: Path
    rounds: int
    warm_up: int
    prefix: Sequence[str] = ()
    """The start of every command, such as `taskset -c 0,1`."""
    data: Path | None = None
    """An npz file of the examples, whose test examples the model of every round is tested on; drawn
    at random, and not tested, where not given.
    """

    def flags(self) -> list[str]:
        """Return the flags that all programs have in common."""
        numbers = {"rounds": self.rounds, "warm-up": self.warm_up}
        return [*_flags(numbers), *([] if self.data is None else ["--data", str(self.data)])]


def check(terms: Terms, systems: Sequence[str]) -> None:
    """Refuse systems that cannot be run, before any is run.

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
    """Run one set-up, and return what it prints: `seconds` are those of the rounds after the
    warm-up.

    Raises:
        InputError: it failed, or printed no such line.
    """
    ours = setup.system == "dfl"
    command = _ours(setup, work, terms) if ours else _theirs(setup, WORK[work], terms)
    done = subprocess.run(
        [*terms.prefix, *command],
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
    """Return the last line that is JSON, among the other output of a baseline."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if len(result.get("seconds", ())) != terms.rounds:
        raise dfl.InputError(f"{setup} did not time {terms.rounds} rounds")
    return {"version": dfl.__version__, **result}


def _environment(threads: int) -> Mapping[str, str]:
    """Return our environment without our Python paths, with the number of threads."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    return own | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _ours(setup: Setup, work: str, terms: Terms) -> list[str]:
    ranks = [mpirun("two ranks need"), "-n", str(setup.processes)] if setup.processes > 1 else []
    program = [sys.executable, "-m", "experiments.speed.stopwatch"]
    numbers = {"work": work, "threads": setup.threads}
    return [*ranks, *program, *_flags(numbers), *terms.flags()]


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
        "batch-size": it.batch_size,
        "processes": setup.processes,
        "threads": setup.threads,
        "style": setup.style,
    }
    network, hidden = NETWORKS[it.model]
    driver = [*(torchrun if several else []), f"baselines.drive_{setup.system}", *_flags(numbers)]
    driver += terms.flags()
    return [
        str(python(terms.envs, setup.system)),
        "-m",
        *driver,
        "--network",
        network,
        "--shape",
        *map(str, it.shape),
        "--hidden",
        *map(str, hidden),
    ]


def _flags(numbers: Mapping[str, object]) -> Iterator[str]:
    return (text for name, value in numbers.items() for text in (f"--{name}", str(value)))
