"""What does a rank need before round 0? A problem, an exam, a starting point, and a device to compute on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dfl import keys
from dfl.batches import widths
from dfl.config import MOST, Run
from dfl.dealing import Arrays
from dfl.errors import InputError
from dfl.models import Spec
from dfl.task import Examples, Loss, Solver, Task, normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from dfl.attacks import Attack
    from dfl.checkpoint import Begun
    from dfl.mpi import World
    from dfl.objectives import Objective

    Models = Module | Sequence[Module]
    """A caller's own, of one kind or of several."""
else:
    from dfl.lazy import torch

Parts = dict[str, Any]

AFFORDABLE = 2**20
"""Parameters times examples of a batch up to which any model but a convolutional one gains from training together."""


@dataclass(frozen=True)
class Exam:
    """What this rank's peers are measured on.

    Attributes:
        inputs, labels: the common test set, or the fixed part of it that `--eval-examples` asks for.
        train: each peer's own training examples, or the fixed part of them that `--eval-examples` asks for.
        local: each peer's own part of the whole test set.
        held_out: each peer's validation examples.
        classes: number of labels; 0 where labels are no classes, and nothing is called accuracy.
        longest: the most examples that any peer anywhere has of its own, of one kind.
        longest_train: the most that any has in `train`, where that is a part.
        triggered: inputs and labels on which a backdoor would show; None where there is none.
    """

    inputs: Tensor
    labels: Tensor
    train: Examples
    local: Examples
    held_out: Examples
    classes: int
    longest: int
    longest_train: int
    triggered: tuple[Tensor, Tensor] | None


class Place(NamedTuple):
    """Which peers a rank hosts, and on which device."""

    peers: NDArray[np.int64]
    device: torch.device


@dataclass(frozen=True)
class Facts:
    """What rank 0 knows of a run before it starts, for the header, --dry-run and the report.

    Attributes:
        graph: edges, directed, degrees (P,), notes (`topologies.Network`); None where peers do not gossip.
        spectrum: second, smallest, gap, half_rounds (`topologies.Spectrum`); None likewise.
        label_counts: (P, classes) training examples; (P, 0) where labels are no classes.
        sizes: (P, 3) training, validation and own test examples.
        shape: shape of one example.
        n_test: examples of the common test set.
        notes: what to warn of, one line each.
        begun: what there is to go on from, and from which data.
    """

    graph: Any
    spectrum: Any
    label_counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    shape: tuple[int, ...]
    n_test: int
    notes: tuple[str, ...]
    begun: Begun


def make_module(parts: Parts, shape: tuple[int, ...], classes: int) -> Module:
    """Build the model without drawing its weights: rows take their place."""
    with torch.device("meta"):
        module: Module = parts["model"](shape, classes)
    return module


def make_modules(run: Run, parts: Parts, common: Arrays, model: Models | None) -> tuple[Module, ...]:
    """The kinds of model of a run, mostly one: those that a caller brings, or the one that is asked for.

    They come with the nets that only training has use for.

    Raises:
        InputError: a model that does not fit the data, or the objective; or, of several kinds, everything is to be
            shared, or they are to start where another run ended.
    """
    if model is None:
        model = make_module(parts, common["inputs"].shape[1:], int(common["classes"]))
    modules = tuple(model) if isinstance(model, Sequence) else (model,)
    if not modules:
        raise InputError("model: no module is given")
    objective: Objective | None = parts["objective"]
    if len(modules) > 1 and (run.share == "all" or run.pretrain or run.start):
        idle = f"--pretrain {run.pretrain}" if run.pretrain else f"--start {run.start}" if run.start else "--share all"
        raise InputError(f"{idle} with {len(modules)} kinds of model: they have a part in common, which --share names")
    return tuple(objective.around(each, common, run.seed) for each in modules) if objective else modules


def make_task(
    run: Run, parts: Parts, problem: tuple[Sequence[Module], Loss], arrays: tuple[Arrays, Arrays], place: Place
) -> Task:
    """Put a rank's learning problem together.

    Args:
        run: how to train.
        parts: the components of the run.
        problem: the kinds of model, mostly one, and the loss.
        arrays: what everyone was told, and what is this rank's own.
        place: whose problem it is, and where it is worked on.
    """
    (modules, loss), (common, own) = problem, arrays
    specs, sizes = specs_of(modules, run), common["sizes"][:, 0]
    spec, module = replace(specs[0], d=max(each.d for each in specs)), modules[0]
    dtype = next(module.parameters()).dtype
    scale, shift = (_tensor(common[name]).to(place.device, dtype) for name in ("scale", "shift"))
    inputs, labels = (_tensor(own[f"train {name}"]).to(place.device) for name in ("inputs", "labels"))
    mine, solver = place.peers, parts["algorithm"].solver(_solver(run, parts))
    padded = widths(sizes, solver.batch_size)
    train = Examples.of(_ready(inputs, scale, shift), labels, sizes[mine], _protected(own, "train ", place.device))
    task = Task(
        module, spec, loss, mine, train, padded[mine], int(common["classes"]), scale, shift, solver, run.seed,
        kinds=tuple(zip(modules, specs, strict=True)) if len(modules) > 1 else (),
        augment=parts["augment"], objective=parts["objective"],
    )  # fmt: skip
    return replace(task, solver=replace(task.solver, batched=_together(run, task, int(padded.max()))))


def specs_of(modules: Sequence[Module], run: Run) -> list[Spec]:
    """The layouts of models of several kinds, which must agree in what is shared.

    Raises:
        InputError: they do not, or are not of one dtype.
    """
    specs = [Spec.of(module, run.share, run.nets) for module in modules]
    common = [dict(zip(spec.common, spec.shapes, strict=False)) for spec in specs]
    for k, (module, shared) in enumerate(zip(modules, common, strict=True)):
        if list(shared.items()) != list(common[0].items()):
            raise InputError(
                f"--share {run.share}: models 0 and {k} do not agree in what is shared, {common[0]} and {shared}"
            )
        if (ours := next(module.parameters()).dtype) != (theirs := next(modules[0].parameters()).dtype):
            raise InputError(f"models 0 and {k} are of {theirs} and {ours}: peers must have one dtype")
    return specs


def with_server(task: Task, root: Arrays, sizes: NDArray[np.int64], pools: bool) -> Task:
    """Give the server its own problem, on rank 0.

    Args:
        task: the problem of this rank's peers.
        root: inputs and labels of the server's examples.
        sizes: (P,), training examples of every peer.
        pools: whether the server has the examples of all, and goes through them as often as a peer through its own;
            else it takes as many steps as the peer that takes most.
    """
    inputs, labels = (_tensor(root[name]).to(task.device) for name in ("inputs", "labels"))
    held, solver = np.array([len(labels)]), task.solver
    if not pools:
        most = solver.epochs * -(-sizes.max() // (solver.batch_size or MOST))
        solver = replace(solver, steps=int(solver.steps or most))
    protected = _protected(root, "", task.device)
    examples = Examples.of(_ready(inputs, task.scale, task.shift), labels, held, protected)
    server = np.array([len(sizes)])  # its address, behind all peers
    return replace(
        task,
        server=replace(task, peers=server, train=examples, padded=widths(held, solver.batch_size), solver=solver),
    )


def _solver(run: Run, parts: Parts) -> Solver:
    return Solver(
        lr=partial(_rate, run, parts["lr_schedule"]),
        momentum=run.momentum,
        weight_decay=run.weight_decay,
        batch_size=run.batch_size,
        epochs=run.local_epochs or 1,
        steps=run.local_steps or 0,
    )


def _together(run: Run, task: Task, widest: int) -> bool:
    """Whether a rank's peers train together; by the model and the batches, never by how many peers a rank has.

    Dense layers always gain from it, and on a GPU everything does. Another model gains while it is small, and
    convolutions do not; nor do large models on several threads, which one peer keeps busy.
    """
    if run.engine != "auto":
        return run.engine == "batched"
    small = task.spec.d * widest <= AFFORDABLE
    modules = [module for module, _ in task.kinds] or [task.module]
    convolves = any(isinstance(layer, torch.nn.modules.conv._ConvNd) for each in modules for layer in each.modules())
    return task.device.type != "cpu" or bool(task.dense and run.threads == 1) or (small and not convolves)


def make_exam(run: Run, task: Task, arrays: tuple[Arrays, Arrays], attack: Attack) -> Exam:
    """Put together what a rank's peers are measured on."""
    common, own = arrays
    sizes = common["sizes"][task.peers]
    inputs, held_inputs = (
        _ready(_tensor(each).to(task.device), task.scale, task.shift) for each in (common["inputs"], own["held inputs"])
    )
    labels, held_labels = (_tensor(each).to(task.device) for each in (common["labels"], own["held labels"]))
    local = Examples.of(inputs[own["test"]], labels[own["test"]], sizes[:, 2])
    held_out = Examples.of(held_inputs, held_labels, sizes[:, 1])
    if run.eval_examples:
        chosen = np.sort(keys.generator(run.seed, "eval-examples").permutation(len(labels))[: run.eval_examples])
        inputs, labels = inputs[chosen], labels[chosen]
    longest, bound = int(common["sizes"].max()), per_peer(run, len(common["sizes"]))
    longest_train = min(int(common["sizes"][:, 0].max()), bound) if run.eval_examples else longest
    shown = attack.triggered(common["inputs"], common["labels"])
    triggered = None
    if shown is not None:
        triggered = _ready(_tensor(shown[0]).to(task.device), task.scale, task.shift), _tensor(shown[1]).to(task.device)
    return Exam(
        inputs, labels, _bounded(task, bound, run) if run.eval_examples else task.train, local, held_out,
        int(common["classes"]), longest, longest_train, triggered,
    )  # fmt: skip


def per_peer(run: Run, peers: int) -> int:
    """Return the most training examples of a peer that `--eval-examples` allows: N in all, rounded up."""
    return -(-(run.eval_examples or MOST) // peers)


def _bounded(task: Task, bound: int, run: Run) -> Examples:
    """Return at most so many training examples of each peer, drawn by the seed and the peer."""
    drawn = (keys.generator(run.seed, "eval-train", int(peer)) for peer in task.peers)
    return task.train.subset(
        [np.sort(one.permutation(n)[:bound]) for one, n in zip(drawn, task.train.sizes, strict=True)]
    )


def device(asked: str, world: World) -> torch.device:
    """The device that `--device` means on this rank; ranks that share a machine take its GPUs in turn.

    Raises:
        InputError: on every rank, if a GPU is asked for that some rank does not have.
    """
    if asked == "cpu":
        return torch.device("cpu")
    _, colon, number = asked.partition(":")
    (found,) = world.smallest(torch.cuda.device_count())
    index = int(number) if colon else world.beside % max(found, 1)
    if index < found:
        torch.backends.cudnn.allow_tf32 = False  # float32 is meant where it is said
        return torch.device("cuda", index)
    if asked == "auto":
        return torch.device("cpu")
    raise InputError(f"--device {asked}: every rank can have {found} GPUs here; choose cpu or auto")


def _rate(run: Run, factor: Callable[..., float], t: int) -> float:
    return run.lr * factor(t, run.rounds)


def _ready(inputs: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Floats as the model sees them, once and for all; whole numbers stay what they are until they are used."""
    return normal(inputs, scale, shift) if inputs.is_floating_point() else inputs


def _protected(arrays: Arrays, which: str, device: torch.device) -> Tensor | None:
    """The protected attributes of some examples, where there are any."""
    name = f"{which}protected"
    return _tensor(arrays[name]).to(device) if name in arrays else None


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(values, order="C"))
