"""Small images with two protected attributes, and their training in plain torch."""

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dfl.comm.mpi import World
from dfl.config import Run
from dfl.core import randomness
from dfl.datasets.data import Data
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.training.batches import batches, groups
from dfl.training.objectives import RepresentationObjective
from dfl.training.task import Task

F = nn.functional
MODEL = "mlp:hidden=7+5,dropout=0.2"
BOTH = "adversary:lambda_global=0.7,lambda_local=0.6,hidden=6+4"


def shaded(n: int = 60) -> Data:
    """Return images whose left and upper pixels depend on the attributes, and all on the label."""
    rng = np.random.default_rng(4)
    protected = rng.integers(0, 2, (n + 20, 2))
    images: Any = rng.integers(0, 120, (n + 20, 1, 6, 6))
    images[:, 0, :, :2] += 60 * protected[:, :1, None]
    images[:, 0, :2] += 60 * protected[:, 1:, None]
    labels = (images.mean((1, 2, 3)) // 30 % 3).astype(np.int64)
    images = images.astype(np.uint8)
    return Data(
        images[:n],
        labels[:n],
        images[n:],
        labels[n:],
        classes=3,
        scale=1 / 60,
        shift=-1.0,
        train_protected=protected[:n],
        test_protected=protected[n:],
        protected=("left", "upper"),
    )


def one_attribute() -> Data:
    """Return the same images with the first attribute only."""
    data = shaded()
    assert data.train_protected is not None
    assert data.test_protected is not None
    first: dict[str, Any] = {
        "train_protected": data.train_protected[:, :1],
        "test_protected": data.test_protected[:, :1],
    }
    return replace(data, **first, protected=("left",))


def setting(module: nn.Module | None = None, data: Data | None = None, **more: Any) -> Prepared:
    """Return a run of five peers, ready to start."""
    few: dict[str, Any] = {
        "peers": 5,
        "model": MODEL,
        "batch_size": 4,
        "lr": 0.1,
        "init": "independent",
    }
    few |= {"dataset": data or shaded()} | ({"model": module} if module else {})
    return prepare(Run(**{**few, **more}), World())


class Plain:
    """The model of one peer, with torch's functions on the values of its row; dropout by hand."""

    def __init__(self, task: Task, row: Tensor) -> None:
        self.task = task
        views = task.parameter_layout.views(row)
        self.values = {name: value.clone().requires_grad_() for name, value in views.items()}
        self.speed = {name: torch.zeros_like(value) for name, value in self.values.items()}
        self.start = {name: value.detach().clone() for name, value in self.values.items()}
        self.masks: dict[str, Tensor] = {}

    def dense(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = F.linear(x, self.values[f"{name}.weight"], self.values[f"{name}.bias"])
            x = x if name == names[-1] else x.relu()
        return x

    def h(self, inputs: Tensor) -> Tensor:
        first = self.dense(inputs.flatten(1), "1").relu() * self.masks["3"][: len(inputs)]
        return self.dense(first, "4").relu() * self.masks["6"][: len(inputs)]

    def loss_g(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.dense(h, "7"), labels)

    def loss_r(self, h: Tensor, protected: Tensor) -> Tensor:
        p = torch.sigmoid(self.dense(h, *(f"adversary.{k}" for k in (1, 3, 5)))).clamp(
            1e-7, 1 - 1e-7
        )
        y = protected.float()
        return -(y * p.log() + (1 - y) * (1 - p).log()).mean()

    def named(self, *beginnings: str) -> list[str]:
        return [name for name in self.values if name.startswith(beginnings)]

    def step(self, terms: dict[tuple[str, ...], Tensor]) -> None:
        """Take a heavy-ball step on the loss of every part, with weight decay and proximal term."""
        solver = self.task.solver
        found: dict[str, Tensor] = {}
        for beginnings, loss in terms.items():
            names = self.named(*beginnings)
            slopes = torch.autograd.grad(loss, [self.values[n] for n in names], retain_graph=True)
            found.update(zip(names, slopes, strict=True))
        for name, g in found.items():
            value = self.values[name].detach()
            g = g + solver.weight_decay * value + solver.prox_mu * (value - self.start[name])
            self.speed[name] = solver.momentum * self.speed[name] - solver.lr(0) * g
            self.values[name] = (value + self.speed[name]).requires_grad_()

    def row(self) -> Tensor:
        return torch.cat(
            [self.values[name].detach().flatten() for name in self.task.parameter_layout.names]
        )


def posed(kind: str, inputs: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return images that are rotated, or cut in four and rearranged, and how, by drawn numbers."""
    new = []
    which = []
    for image, u in zip(inputs.numpy(), drawn.tolist(), strict=False):
        k = int(u * (4 if kind == "rotation" else 24))
        a, b, c, d = image[:, :3, :3], image[:, :3, 3:], image[:, 3:, :3], image[:, 3:, 3:]
        order = list(permutations((a, b, c, d)))[k] if kind == "jigsaw" else (a, b, c, d)
        turned = (
            np.rot90(image, k, (1, 2))
            if kind == "rotation"
            else np.block([[*order[:2]], [*order[2:]]])
        )
        new.append(torch.from_numpy(np.ascontiguousarray(turned)))
        which.append(k)
    return torch.stack(new), torch.tensor(which)


def loss_a(peer: Plain, kind: str, inputs: Tensor, labels: Tensor, drawn: Tensor) -> Tensor:
    """Return the loss of the auxiliary net, which has one hidden layer."""
    if kind in ("rotation", "jigsaw"):
        inputs, labels = posed(kind, inputs, drawn)
    outputs = peer.dense(peer.h(inputs), "auxiliary.1", "auxiliary.3")
    if kind == "autoencoder":
        return ((outputs - inputs.flatten(1)) ** 2).mean()
    return F.cross_entropy(outputs, labels)


def trained(task: Task, row: Tensor, i: int, t: int) -> Tensor:
    """Return a peer's row after a round, by the equations in the appendix of the paper."""
    peer = Plain(task, row)
    objective = task.objective
    taken = 0
    group = next(group for group in groups(task) if i in group)
    for k, batch in enumerate(batches(task, t, group)):
        taken += list(group).index(i) < len(batch.index)
        if taken == k:
            break
        place = list(group).index(i)
        index = batch.index[place][batch.weight.expand(batch.index.shape)[place] > 0]
        inputs, labels = task.inputs(task.examples.inputs[index]), task.examples.labels[index]

        def u(purpose: str, n: int, k: int = k) -> Tensor:
            return randomness.uniform(task.seed, purpose, [i], t, k, n=4 * n)[0].view(4, n)

        peer.masks = {
            name: (u(f"dropout {name}", n) >= 0.2) / 0.8 for name, n in (("3", 7), ("6", 5))
        }
        assert isinstance(objective, RepresentationObjective)
        h = peer.h(inputs)
        loss_g = whole = peer.loss_g(h, labels)
        terms: dict[tuple[str, ...], Tensor] = {("7.",): loss_g}
        if objective.auxiliary:
            kind = objective.auxiliary.name
            terms["auxiliary.",] = loss_a(peer, kind, inputs, labels, u(kind, 1)[:, 0])
            whole = whole + objective.auxiliary.weight * terms["auxiliary.",]
        if objective.adversary:
            assert task.examples.protected is not None
            whole = whole - objective.strength * peer.loss_r(h, task.examples.protected[index])
        peer.step({**terms, ("1.", "4."): whole})
        if objective.adversary:
            assert task.examples.protected is not None
            peer.step(
                {("adversary.",): peer.loss_r(peer.h(inputs), task.examples.protected[index])}
            )
    return peer.row()
