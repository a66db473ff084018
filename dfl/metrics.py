"""How well does every peer do, and how far are the peers apart?

Each peer is measured where it lives; rank 0 gets one row of numbers per peer and takes means over them in peer
order, so that no figure depends on the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dfl.layout import Layout, blocks, columns

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.mpi import World
    from dfl.setup import Exam
    from dfl.simulation import Setting
    from dfl.task import Examples, Task
else:
    from dfl.lazy import torch

CHUNK = 512
"""Examples that are evaluated at a time; part of the result's last bits, hence fixed."""
LANES = 256
"""Peers that are evaluated at a time."""

Floats = NDArray[np.float64]


def on_common(x: Tensor, task: Task, exam: Exam) -> Floats:
    """Accuracy of every row of x (p, d) on the common test set, (p,); NaN where labels are no classes.

    Rows that are all the same, as at the start, are evaluated once.
    """
    if len(x) > 1 and bool((x == x[:1]).all()):
        return np.repeat(on_common(x[:1], task, exam), len(x))
    if not len(x) or not exam.classes or not len(exam.labels):
        return np.full(len(x), np.nan)
    right = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for inputs, labels in zip(exam.inputs.split(CHUNK), exam.labels.split(CHUNK), strict=True):
        seen = task.inputs(inputs)
        for rows, count in zip(x.split(LANES), right.split(LANES), strict=True):
            count += (task.outputs(task.spec.views(rows), seen, each=False).argmax(2) == labels).sum(1)
    return right.cpu().numpy() / len(exam.labels)


def on_own(x: Tensor, task: Task, examples: Examples, exam: Exam) -> tuple[Floats, Floats]:
    """Mean loss and accuracy of every row of x (p, d) on that peer's own examples, (p,) each; NaN where it has none."""
    loss, right, starts = np.zeros(len(x)), np.zeros(len(x)), examples.starts
    chunk = min(CHUNK, exam.longest)
    for first in range(0, int(examples.sizes.max()) if len(x) else 0, chunk):
        counts = np.clip(examples.sizes - first, 0, chunk)
        some = np.flatnonzero(counts)
        for lanes in np.split(some, range(LANES, len(some), LANES)):
            real = np.arange(chunk) < counts[lanes, None]
            index = starts[lanes, None] + (first + np.arange(chunk)) * real
            inputs, labels = examples.at(torch.from_numpy(index).to(task.device))
            out = task.outputs(task.spec.take(x, lanes), task.inputs(inputs))
            losses = task.loss(out.flatten(0, 1), labels.flatten(0, 1)).view(len(lanes), chunk)
            loss[lanes] += np.where(real, losses.double().cpu().numpy(), 0.0).sum(1)
            right[lanes] += ((out.argmax(2) == labels).cpu().numpy() & real).sum(1) if exam.classes else np.nan
    with np.errstate(invalid="ignore"):
        return loss / examples.sizes, right / examples.sizes


def models(x: Tensor, world: World) -> NDArray[Any] | None:
    """All peers' models (P, d) on rank 0; None elsewhere."""
    return world.gather(x.cpu().numpy())


def broken(x: Tensor) -> NDArray[np.int64]:
    """The rows of x (p, d) that hold a number that is not finite."""
    if not len(x):
        return np.zeros(0, np.int64)
    ends = torch.stack([x.amin(1), x.amax(1)])  # NaN where there is one; reads x twice and writes nothing
    return np.flatnonzero(~torch.isfinite(ends).all(0).cpu().numpy())


def consensus(x: Tensor, world: World, layout: Layout) -> tuple[float, Tensor | None]:
    """Consensus distance sqrt(mean_i ||x_i - mean x||^2), and the mean model (d,); both on rank 0, else (0, None).

    Every rank adds up its own coordinates over all peers, in float64, in peer order and in fixed blocks.
    """
    cut = columns(x.shape[1], world.size)
    everyone = world.columns(x.cpu().numpy(), cut, [len(layout.block(r)) for r in range(world.size)])
    mean, squares = np.zeros(everyone.shape[1]), []
    for block in blocks(everyone.shape[1]):
        part = everyone[:, block]
        mean[block] = np.add.reduce(part, axis=0, dtype=np.float64) / layout.peers
        rows = (part[first : first + LANES] - mean[block] for first in range(0, layout.peers, LANES))
        squares.append(np.concatenate([(row**2).sum(1) for row in rows]))
    means = world.gather(mean)
    apart = world.gather(np.array(squares).reshape(-1, layout.peers))
    if means is None or apart is None:
        return 0.0, None
    return float(np.sqrt(apart.sum(0).sum() / layout.peers)), torch.from_numpy(means).to(x.device, x.dtype)


def measure(state: Any, setting: Setting) -> dict[str, Floats] | None:
    """Every peer's figures, (P,) each by name, on rank 0; None elsewhere."""
    task, exam, x = setting.task, setting.exam, state.x
    own = {"accuracy": on_common(x, task, exam)}
    own["train_loss"], _ = on_own(x, task, task.train, exam)
    _, own["local_accuracy"] = on_own(x, task, exam.local, exam)
    if setting.run.validation:
        _, own["validation_accuracy"] = on_own(x, task, exam.held_out, exam)
    own |= {name: value.double().cpu().numpy() for name, value in setting.algorithm.observe(state).items()}
    own["payload_bytes"] = setting.network.payload.astype(np.float64)
    everyone = setting.world.gather(np.stack(list(own.values()), axis=1))
    return None if everyone is None else dict(zip(own, everyone.T, strict=True))


def summary(peers: dict[str, Floats], declared: tuple[str, ...]) -> dict[str, float]:
    """The means over peers that stand in a row of metrics.csv."""
    accuracy = peers["accuracy"]
    row = {
        "train_loss": _mean(peers["train_loss"]),
        "accuracy_mean": _mean(accuracy),
        "accuracy_min": float(accuracy.min()),
        "accuracy_max": float(accuracy.max()),
        "accuracy_std": float(accuracy.std()),
        "local_accuracy_mean": _mean(peers["local_accuracy"]),
        "payload_bytes": int(peers["payload_bytes"].sum()),
    }
    if "validation_accuracy" in peers:
        row["validation_accuracy_mean"] = _mean(peers["validation_accuracy"])
    return row | {name: float(peers[name].max()) for name in declared}


def _mean(values: Floats) -> float:
    """The mean over the peers that have a value; NaN where none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
