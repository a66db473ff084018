"""What does every rank need before round 0? Rank 0 reads and decides, the others are told.

Each rank is sent its own peers' examples and nobody else's; everybody gets the common test set and the graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl import keys
from dfl.config import Run
from dfl.datasets.data import Data
from dfl.datasets.partition import Deal, deal
from dfl.errors import InputError
from dfl.models import Spec, draw
from dfl.task import Examples, Loss, Solver, Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

else:
    from dfl.lazy import torch

Arrays = dict[str, NDArray[Any]]
Parts = dict[str, Any]

AFFORDABLE = 2**20
"""Parameters times examples of a batch up to which peers train together: beyond, one peer fills the cores."""


@dataclass(frozen=True)
class Exam:
    """What this rank's peers are measured on.

    Attributes:
        inputs, labels: the common test set, or the fixed part of it that `--eval-examples` asks for.
        local: each peer's own part of the whole test set.
        held_out: each peer's validation examples.
        classes: number of labels; 0 where labels are no classes, and nothing is called accuracy.
        longest: the most examples that any peer anywhere has of its own, of one kind.
    """

    inputs: Tensor
    labels: Tensor
    local: Examples
    held_out: Examples
    classes: int
    longest: int


@dataclass(frozen=True)
class Facts:
    """What rank 0 knows of a run before it starts, for the header, --dry-run and the report.

    Attributes:
        graph: edges, directed, degrees (P,), notes (`topologies.Network`).
        spectrum: second, smallest, gap, half_rounds (`topologies.Spectrum`).
        label_counts: (P, classes) training examples; (P, 0) where labels are no classes.
        sizes: (P, 3) training, validation and own test examples.
        shape: shape of one example.
        n_test: examples of the common test set.
        notes: what to warn of, one line each.
    """

    graph: Any
    spectrum: Any
    label_counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    shape: tuple[int, ...]
    n_test: int
    notes: tuple[str, ...]


def read(run: Run, parts: Parts, given: Data | None) -> tuple[Data, Deal]:
    """Load the data set, on rank 0, and deal it to the peers.

    Raises:
        InputError: missing or damaged files, or too few examples for the peers.
    """
    named = run.data_dir or (Path(os.environ["DFL_DATA"]) if os.environ.get("DFL_DATA") else None)
    data = given if given is not None else parts["dataset"](named)
    _check_data(data)
    if run.eval_examples and run.eval_examples > len(data.test_labels):
        raise InputError(
            f"--eval-examples {run.eval_examples} of {len(data.test_labels)} test examples in {run.dataset}"
        )
    if not data.classes and run.partition != "iid":
        raise InputError(f"--partition {run.partition} deals by label, and these labels are no classes: choose iid")
    dealt = deal(parts["partition"], data, run)
    if run.validation and not any(map(len, dealt.validation)):
        most = max(map(len, dealt.train))
        raise InputError(f"--validation {run.validation} sets no example aside where a peer has at most {most}")
    return data, dealt


def _check_data(data: Data) -> None:
    """Refuse what a caller's own data may have wrong.

    Raises:
        InputError: unequal lengths, no examples, or labels that are not whole numbers in range(classes).
    """
    for part, inputs, labels in (
        ("train", data.train_inputs, data.train_labels),
        ("test", data.test_inputs, data.test_labels),
    ):
        if len(inputs) != len(labels) or not len(labels):
            raise InputError(
                f"{len(inputs)} {part} inputs with {len(labels)} labels: as many of each, and at least one"
            )
        if data.classes and not (labels.dtype == np.int64 and labels.min() >= 0 and labels.max() < data.classes):
            raise InputError(
                f"{part} labels from {labels.min()} to {labels.max()} as {labels.dtype}: they must be int64 in "
                f"range({data.classes}), or classes=0 and a loss of your own"
            )


def count_labels(data: Data, dealt: Deal) -> NDArray[np.int64]:
    """Training examples of every label at every peer, (P, classes)."""
    return (
        np.array([np.bincount(data.train_labels[own], minlength=data.classes) for own in dealt.train], dtype=np.int64)
        if data.classes
        else np.zeros((len(dealt.train), 0), np.int64)
    )


def sizes(dealt: Deal) -> NDArray[np.int64]:
    """Training, validation and own test examples of every peer, (P, 3)."""
    return np.array([[len(own) for own in one] for one in zip(dealt.train, dealt.validation, dealt.test, strict=True)])


def known_to_all(data: Data, dealt: Deal, weights: Sequence[csr_array]) -> Arrays:
    """What rank 0 tells everyone: the graphs, the test set, how a batch is normalised, and who has how much."""
    arrays = {
        "inputs": data.test_inputs, "labels": data.test_labels, "classes": np.array(data.classes),
        "scale": np.asarray(data.scale, np.float64), "shift": np.asarray(data.shift, np.float64),
        "sizes": sizes(dealt),
    }  # fmt: skip
    for k, matrix in enumerate(weights):
        arrays |= {f"data {k}": matrix.data, f"indices {k}": matrix.indices, f"indptr {k}": matrix.indptr}
    return arrays


def matrices(common: Arrays) -> list[csr_array]:
    """The mixing matrices in what everyone was told."""
    peers, count = len(common["sizes"]), sum(name.startswith("indptr") for name in common)
    parts = [[common[f"{part} {k}"] for part in ("data", "indices", "indptr")] for k in range(count)]
    return [csr_array(tuple(part), shape=(peers, peers)) for part in parts]


def owned(data: Data, dealt: Deal, peers: range) -> Arrays:
    """The examples of some peers, one peer after the other, and which test examples are theirs."""
    train, held, test = (
        np.concatenate([part[i] for i in peers] or [np.zeros(0, np.int64)])
        for part in (dealt.train, dealt.validation, dealt.test)
    )
    return {
        "train inputs": data.train_inputs[train], "train labels": data.train_labels[train],
        "held inputs": data.train_inputs[held], "held labels": data.train_labels[held], "test": test,
    }  # fmt: skip


def make_module(parts: Parts, shape: tuple[int, ...], classes: int) -> Module:
    """Build the model without drawing its weights: rows take their place."""
    with torch.device("meta"):
        module: Module = parts["model"](shape, classes)
    return module


def make_task(run: Run, parts: Parts, peers: range, model: tuple[Module, Loss], arrays: tuple[Arrays, Arrays]) -> Task:
    """Put a rank's learning problem together."""
    (module, loss), (common, own) = model, arrays
    spec, sizes = Spec.of(module), common["sizes"][:, 0]
    dtype = next(module.parameters()).dtype
    widest = int(min(run.batch_size or sizes.max(), sizes.max()))
    batched = spec.d * widest <= AFFORDABLE and not any(
        isinstance(m, torch.nn.modules.conv._ConvNd) for m in module.modules()
    )
    solver = Solver(
        lr=partial(_rate, run, parts["lr_schedule"]),
        momentum=run.momentum,
        weight_decay=run.weight_decay,
        batch_size=run.batch_size,
        epochs=run.local_epochs or 1,
        steps=run.local_steps or 0,
        batched={"auto": batched, "batched": True, "loop": False}[run.engine],
    )
    train = Examples(
        _tensor(own["train inputs"]), _tensor(own["train labels"]), _tensor(sizes[peers.start : peers.stop])
    )
    scale, shift = (_tensor(common[name]).to(dtype) for name in ("scale", "shift"))
    return Task(module, spec, loss, peers, train, widest, scale, shift, solver, run.seed)


def make_exam(run: Run, peers: range, common: Arrays, own: Arrays) -> Exam:
    """Put together what a rank's peers are measured on."""
    inputs, labels, sizes = (
        _tensor(common["inputs"]),
        _tensor(common["labels"]),
        _tensor(common["sizes"][peers.start : peers.stop]),
    )
    local = Examples(inputs[own["test"]], labels[own["test"]], sizes[:, 2])
    held_out = Examples(_tensor(own["held inputs"]), _tensor(own["held labels"]), sizes[:, 1])
    if run.eval_examples:
        chosen = np.sort(keys.generator(run.seed, "eval-examples").permutation(len(labels))[: run.eval_examples])
        inputs, labels = inputs[chosen], labels[chosen]
    return Exam(inputs, labels, local, held_out, int(common["classes"]), int(common["sizes"].max()))


def start(run: Run, task: Task, given: bool) -> tuple[Tensor, Tensor]:
    """Where this rank's peers start, (p, d), and what their neighbours know of that.

    Args:
        run: says whether all start at the same point.
        task: the problem.
        given: whether the module is the caller's own, whose parameters are the common point.
    """
    p, dtype = len(task.peers), task.scale.dtype
    if run.init == "independent":
        x = draw(task.module, run.seed, task.peers).to(dtype)
        return x, torch.zeros_like(x)
    row = task.spec.row(task.module) if given else draw(task.module, run.seed, [0])[0]
    x = row.to(dtype).expand(p, -1).contiguous()
    return x, x


def check_start(run: Run, task: Task, given: bool, room: tuple[int, int]) -> None:
    """Refuse what `start` could not do.

    Args:
        run, task, given: as for `start`.
        room: peers on the fullest rank, and bytes of memory of the smallest machine.

    Raises:
        InputError: the models do not fit into memory even once, or have parameters that nobody knows how to draw.
    """
    peers, memory = room
    if (needed := peers * task.spec.d * task.scale.element_size()) > memory:
        raise InputError(
            f"--model {run.model} has {task.spec.d:,} parameters: for {peers:,} peers on one rank they take "
            f"{needed / 1e9:,.0f} GB, the machine has {memory / 1e9:,.0f} GB"
        )
    if run.init == "independent" or not given:
        draw(task.module, run.seed, [])


def memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def packed(arrays: Arrays) -> bytes:
    """Arrays by name as bytes that can be sent or stored; nothing is pickled."""
    from safetensors.numpy import save

    return save({name: np.asarray(value, order="C") for name, value in arrays.items()})


def unpacked(message: bytes) -> Arrays:
    """The inverse of `packed`."""
    from safetensors.numpy import load

    return load(message)


def _rate(run: Run, factor: Callable[..., float], t: int) -> float:
    return run.lr * factor(t, run.rounds)


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(values, order="C"))
