"""Seconds per round of any run, recorded by a callback.

    mpirun -n 2 python -m experiments.speed.stopwatch --work A

prints one line of JSON: the seconds of every round after a warm-up, the ranks, and the peak
memory of rank 0. Rounds are those of `dfl.simulate`, which evaluates before the first and after
the last of them only; so training, the exchange, mixing and the check that models are finite are
timed, evaluation is not. With `--data` the same rounds run once more, each with an evaluation, and
the mean accuracy at the start and after each round is printed, too. Other experiments take `WORK`,
`examples` and `seconds` from here.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter

import dfl
from dfl.comm.mpi import connect
from dfl.config import Run
from dfl.datasets.data import Data
from dfl.store.callbacks import Callback


@dataclass(frozen=True)
class Work:
    """A workload: each peer has `examples` of float32 numbers of a shape, with ten labels."""

    peers: int
    examples: int
    shape: tuple[int, ...]
    model: str
    batch_size: int


WORK = {
    "A": Work(16, 600, (784,), "2nn", 50),
    "B": Work(100, 60, (64,), "mlp:hidden=32", 10),
    "C": Work(1000, 60, (64,), "softmax", 10),
    "D": Work(16, 600, (3, 32, 32), "lenet", 50),
    "E": Work(100, 60, (6, 20), "har_lstm:hidden=32,layers=1", 10),
}
"""Five workloads: sixteen medium models, a hundred small ones, a thousand tiny ones, sixteen of
convolutions on images, and a hundred of an LSTM on 20 steps of 6 signals.
"""


class Stopwatch(Callback):
    """Records the time at which every round ended."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.ends: list[float] = []

    def round(self, t: int) -> None:
        """Record the time."""
        self.ends.append(self.clock())

    def row(self, row: Mapping[str, float]) -> None:
        """Record the time after an evaluation, at which the next round begins."""
        self.ends.append(self.clock())


def examples(shape: tuple[int, ...], n: int, classes: int = 10) -> Data:
    """Return normal numbers (n, *shape) with random labels, for timing."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(n, *shape)).astype(np.float32)
    labels = rng.integers(0, classes, n)
    return Data(inputs, labels, inputs[:classes], labels[:classes], classes=classes)


def read(path: Path) -> Data:
    """Return the examples of an npz file: inputs (P, n, *shape) and labels (P, n) of peers, which
    are groups, and test_inputs and test_labels.
    """
    with np.load(path) as file:
        inputs, labels = file["inputs"], file["labels"]
        peers = np.arange(len(labels))
        return Data(
            inputs.reshape(-1, *inputs.shape[2:]),
            labels.reshape(-1),
            file["test_inputs"],
            file["test_labels"],
            classes=int(labels.max()) + 1,
            train_groups=np.repeat(peers, labels.shape[1]),
            test_groups=np.resize(peers, len(file["test_labels"])),  # none is a peer's own
        )


def accuracies(run: Run, data: Data) -> list[float]:
    """Simulate, and return the mean accuracy over peers at the start and after each round."""
    rows = dfl.simulate(replace(run, dataset=data, eval_every=1))
    return [float(row["accuracy_mean"]) for row in rows]


def seconds(
    run: Run, data: Data, warm_up: int = 2, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Simulate, and return the seconds of every round, by a clock, except the first ones and the
    last, which ends in an evaluation.

    Returns:
        run.rounds - warm_up - 1 times, on rank 0; nothing elsewhere.
    """
    watch = Stopwatch(clock)
    for _ in dfl.simulate(replace(run, dataset=data), callbacks=[watch]):
        pass
    times: list[float] = np.diff(watch.ends)[warm_up:-1].tolist()
    return times


@dataclass(frozen=True, kw_only=True)
class Options:
    """The rounds to time."""

    work: str = "A"
    """A, B, C, D or E."""
    rounds: int = 10
    """Number of rounds to time."""
    warm_up: int = 2
    """Number of rounds before them."""
    peers: int | None = None
    """Number of peers, in place of that of the workload."""
    engine: str = "auto"
    """auto, batched or loop."""
    bits: int | None = None
    """Bits per coordinate of a message; float32 where not given."""
    threads: int = 1
    """Threads per rank."""
    data: Path | None = None
    """An npz file of the examples of as many peers; drawn at random where not given."""


def main(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Time the rounds of a workload."""
    work = WORK[options.work]
    warm_up = options.warm_up
    number = options.peers or work.peers
    rounds = options.rounds + warm_up + 1
    settings = {
        "engine": options.engine,
        "bits": options.bits,
        "threads": options.threads,
        "lr": 0.01,
    }
    run = Run.from_dict(
        {
            "peers": number,
            "model": work.model,
            "batch_size": work.batch_size,
            "rounds": rounds,
            "eval_every": rounds,
        }
        | settings
    )
    if options.data is None:
        data = examples(work.shape, number * work.examples)
    else:
        data, run = read(options.data), replace(run, partition="natural")
    times = seconds(run, data, warm_up)
    more = {}
    if options.data is not None:  # after the timing, whose first round is to find nothing prepared
        more["accuracies"] = accuracies(replace(run, rounds=rounds - 1), data)
    world = connect()
    if world.rank == 0:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            json.dumps(
                {
                    "work": options.work,
                    "peers": number,
                    "ranks": world.size,
                    "seconds": times,
                    "peak_memory": memory,
                    **more,
                }
            )
        )


if __name__ == "__main__":
    app = App(
        name="python -m experiments.speed.stopwatch", help_format="plaintext", version_flags=[]
    )
    app.default(main)
    app()
