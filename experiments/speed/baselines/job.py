"""The work of every driver: its command line, its data, its model, and the line of JSON that it
prints.

Drivers in environments of their own import it, so it imports nothing of dfl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

CLASSES = 10
LR = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class Job:
    """Peers with `examples` of float32 numbers each, and a network that they train for an epoch a
    round.
    """

    peers: int
    examples: int
    shape: tuple[int, ...]
    """The shape of an example."""
    network: str
    """perceptron, lenet, resnet20 or lstm."""
    hidden: tuple[int, ...]
    """The widths of hidden layers of a perceptron or an LSTM."""
    batch_size: int
    rounds: int
    """Rounds to time, after the warm-up."""
    warm_up: int
    processes: int
    threads: int
    """Threads of torch in each process."""
    style: str = "lean"
    """The code that is left to the user: lean, or as in the baseline's own tutorial or scripts."""
    device: str = "cpu"
    """cpu or cuda."""
    precision: str = "float32"
    """Of products: float32, tf32 or bf16."""
    data: Path | None = None
    """An npz file of the examples: inputs (P, n, *shape), labels (P, n), test_inputs and
    test_labels. With it the model of every round is tested; else examples are drawn, with random
    labels.
    """


class Watch:
    """Records the end of every round, and the models at it where they are to be tested.

    Attributes:
        ends: times of the start and of the end of each round, without what copies of models took.
        models: for each of these times the parameters of every model that is tested, by name.
    """

    def __init__(self, job: Job) -> None:
        self.tested = job.data is not None
        self.ends: list[float] = []
        self.models: list[list[dict[str, torch.Tensor]]] = []
        self.copying = 0.0

    def end(self, models: Callable[[], Iterable[Mapping[str, torch.Tensor]]]) -> None:
        """Record the start of the first round or the end of a round.

        Args:
            models: returns the parameters of the models at that time; called where they are tested.
        """
        now = time.perf_counter()
        self.ends.append(now - self.copying)
        if self.tested:
            self.models.append(
                [{name: value.clone() for name, value in each.items()} for each in models()]
            )
            self.copying += time.perf_counter() - now

    def accuracies(self, job: Job, net: torch.nn.Module) -> list[float]:
        """Return the accuracy on the test examples at every recorded time, in the mean over its
        models; none where they are not to be tested.

        Args:
            job: the job.
            net: computes with the parameters.
        """
        if job.data is None:
            return []
        with np.load(job.data) as file:
            inputs, labels = (
                torch.from_numpy(file[f"test_{name}"]) for name in ("inputs", "labels")
            )
        found = []
        with torch.no_grad():
            for models in self.models:
                right = []
                for values in models:
                    net.load_state_dict(values)
                    right.append(float((net(inputs).argmax(1) == labels).double().mean()))
                found.append(float(np.mean(right)))
        return found


def read(arguments: Sequence[str] | None = None) -> Job:
    """Return the job of a command line."""
    parser = argparse.ArgumentParser()
    for name in (
        "peers",
        "examples",
        "batch-size",
        "rounds",
        "warm-up",
        "processes",
        "threads",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--shape", type=int, nargs="+", required=True)
    parser.add_argument("--network", choices=tuple(NETWORKS), default="perceptron")
    parser.add_argument("--hidden", type=int, nargs="*", default=[])
    parser.add_argument("--style", choices=("lean", "tutorial"), default="lean")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("float32", "tf32", "bf16"), default="float32")
    parser.add_argument("--data", type=Path)
    values = vars(parser.parse_args(arguments))
    return Job(**{**values, **{name: tuple(values[name]) for name in ("shape", "hidden")}})


def data(job: Job) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the inputs (P, n, *shape) and labels (P, n) of the job's file, or normal numbers with
    random labels, alike in every process.
    """
    if job.data is not None:
        with np.load(job.data) as file:
            return file["inputs"], file["labels"]
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(job.peers, job.examples, *job.shape)).astype(np.float32)
    return inputs, rng.integers(0, CLASSES, (job.peers, job.examples))


def network(job: Job) -> torch.nn.Module:
    """Return the network of a job, with the same initialization in every process."""
    generator = torch.Generator().manual_seed(0)
    net = NETWORKS[job.network](job)
    normed = [layer for layer in net.modules() if isinstance(layer, torch.nn.GroupNorm)]
    scales = {id(weight) for layer in normed for weight in layer.parameters()}
    for weight in net.parameters():
        if id(weight) in scales:
            continue
        fan_in = weight[0].numel() if weight.dim() > 1 else len(weight)
        torch.nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5, generator=generator)
    return net


def perceptron(job: Job) -> torch.nn.Module:
    """Return dense layers, which are softmax regression where none is hidden."""
    nn = torch.nn
    sizes = (*job.shape, *job.hidden, CLASSES)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def lenet(job: Job) -> torch.nn.Module:
    """Return the LeNet that dfl has, for square images."""
    nn = torch.nn
    channels, side, _ = job.shape
    pixels = (((side - 4) // 2 - 4) // 2) ** 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * pixels, 120), nn.ReLU(),
        nn.Linear(120, 100), nn.ReLU(), nn.Linear(100, CLASSES),
    )  # fmt: skip


class Residual(torch.nn.Module):
    """A block of a ResNet with GroupNorm; new channels of its shortcut are zeros."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        nn = torch.nn
        self.stride = 1 if a == b else 2
        self.padding = (b - a) // 2
        self.change = nn.Sequential(
            nn.Conv2d(a, b, 3, stride=self.stride, padding=1, bias=False), nn.GroupNorm(2, b),
            nn.ReLU(), nn.Conv2d(b, b, 3, padding=1, bias=False), nn.GroupNorm(2, b),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(x + f(x))."""
        kept = x[:, :, :: self.stride, :: self.stride]
        kept = torch.nn.functional.pad(kept, (0, 0, 0, 0, self.padding, self.padding))
        return torch.relu(kept + self.change(x))


def resnet20(job: Job) -> torch.nn.Module:
    """Return the ResNet-20 with GroupNorm that dfl has."""
    nn = torch.nn
    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [Residual(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(job.shape[0], 16, 3, padding=1, bias=False), nn.GroupNorm(2, 16), nn.ReLU(),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


class LastState(torch.nn.Module):
    """An LSTM layer over the steps of signals (n, channels, steps), and a dense layer on its last
    state.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        (hidden,) = job.hidden
        self.lstm = torch.nn.LSTM(job.shape[0], hidden, batch_first=True)
        self.last = torch.nn.Linear(hidden, CLASSES)

    def forward(self, signals: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        scores: torch.Tensor = self.last(self.lstm(signals.mT)[0][:, -1])
        return scores


NETWORKS: dict[str, Callable[[Job], torch.nn.Module]] = {
    "perceptron": perceptron,
    "lenet": lenet,
    "resnet20": resnet20,
    "lstm": LastState,
}
"""Networks by name."""


def train(
    job: Job,
    net: torch.nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Train a model for an epoch on the examples of a peer, in a random order, by torch's SGD."""
    optimizer = torch.optim.SGD(net.parameters(), LR, momentum=MOMENTUM)
    bf16 = job.precision == "bf16"
    products = torch.autocast(job.device, torch.bfloat16) if bf16 else nullcontext()
    order = torch.randperm(job.examples, generator=generator, device=inputs.device)
    for batch in order.split(job.batch_size):
        optimizer.zero_grad()
        with products:
            loss = torch.nn.functional.cross_entropy(net(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()


def set_precision(job: Job) -> None:
    """Set the precision of float32 products of torch to that of a job."""
    tf32 = job.precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


@torch.no_grad()
def loss(
    model: Callable[[torch.Tensor], torch.Tensor], job: Job, users: slice = slice(None)
) -> float:
    """Return a model's mean loss on the examples of some users, of all where not given."""
    inputs, labels = (
        torch.from_numpy(each[users].reshape(-1, *each.shape[2:])).to(job.device)
        for each in data(job)
    )
    return float(torch.nn.functional.cross_entropy(model(inputs), labels))


def report(
    job: Job,
    package: str,
    watch: Watch,
    losses: tuple[float, float],
    net: torch.nn.Module | None = None,
) -> None:
    """Print a line of JSON with the seconds of the rounds after the warm-up.

    Args:
        job: the job.
        package: the baseline's name on PyPI.
        watch: recorded the start and the end of each round.
        losses: before the first round and after the last.
        net: computes with the recorded models; that of the job where not given.

    Raises:
        SystemExit: rounds are missing, or the models have not learned.
    """
    if len(watch.ends) != 1 + job.warm_up + job.rounds:
        sys.exit(f"{package} ran {len(watch.ends) - 1} rounds, not {job.warm_up + job.rounds}")
    if not losses[1] < losses[0]:
        sys.exit(f"{package} did not train: its loss went from {losses[0]:.4f} to {losses[1]:.4f}")
    answer: dict[str, Any] = {
        "peers": job.peers,
        "processes": job.processes,
        "threads": job.threads,
        "losses": losses,
        "seconds": np.diff(watch.ends)[job.warm_up :].tolist(),
        "accuracies": watch.accuracies(job, network(job) if net is None else net),
    }
    if job.device == "cuda":
        answer["peak_memory"] = torch.cuda.max_memory_allocated()
    versions = {"version": version(package), "torch": torch.__version__}
    print(json.dumps({**answer, **versions}), flush=True)
