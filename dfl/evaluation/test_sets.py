"""Data sets on which the peers of a rank are evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dfl.core import randomness
from dfl.core.arrays import Array
from dfl.core.options import MOST
from dfl.core.parts import Parts, joined, map_parts
from dfl.core.ragged import Ragged
from dfl.evaluation.fairness import cells
from dfl.training.examples import Examples, as_tensor, loaded
from dfl.training.task import Task

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from dfl.robust.attacks import Attack


@dataclass(frozen=True)
class TestSets:
    """Data sets on which the peers of this rank are evaluated.

    Attributes:
        inputs, labels: the common test set; a fixed subset of it with `--eval-examples`.
        train: each peer's own training examples; a fixed subset of them with `--eval-examples`.
        local: each peer's own part of the whole test set.
        held_out: each peer's validation examples.
        classes: number of labels; 0 where labels are no classes, and there is a test loss in place
            of accuracy.
        longest: the most examples of its own, of one kind, that any peer on any rank has.
        longest_train: the most examples that any peer has in `train`.
        validates: whether validation examples are set aside.
        tokens: whether labels are tokens, which have a perplexity.
        triggered: inputs with the trigger of a backdoor, and the labels that it aims at; None
            without a backdoor.
        groups: (n, k * 2 * 2), the cells of `fairness.cells` of each common test example; None
            without protected attributes, and where there are not two labels.
        protected: (n, k), the protected attributes of each common test example; None where no
            adversary predicts them.
    """

    inputs: Parts
    labels: Tensor
    train: Examples
    local: Examples
    held_out: Examples
    classes: int
    longest: int
    longest_train: int
    validates: bool
    tokens: bool
    triggered: tuple[Parts, Tensor] | None
    groups: Tensor | None
    protected: Array | None


def make_test_sets(
    task: Task,
    common: Mapping[str, Array],
    own: Mapping[str, Array],
    *,
    attack: Attack,
    eval_examples: int | None,
    validates: bool,
    tokens: bool,
    seed: int,
) -> TestSets:
    """Return the data sets on which the peers of a rank are evaluated.

    Args:
        task: the learning problem of this rank.
        common: arrays that all ranks have: inputs, labels, sizes (P, 3), classes; protected, where
            the data have such attributes.
        own: arrays of this rank's peers: held inputs, held labels, test (indices into the common
            test set).
        attack: gives the examples with a trigger, where it is a backdoor.
        eval_examples: N: evaluate on N common test examples, and on ceil(N / P) training examples
            per peer; None for all.
        validates: whether validation examples are set aside.
        tokens: whether labels are tokens, which have a perplexity.
        seed: the run's seed.
    """
    everyone = common["sizes"]
    sizes = everyone[task.peers]
    raw = joined(common, "inputs")
    on_device = partial(loaded, scale=task.scale, shift=task.shift, device=task.device)
    inputs, labels = on_device(raw, common["labels"])
    held_inputs, held_labels = on_device(joined(own, "held inputs"), own["held labels"])
    of_peers = map_parts(lambda part: part[own["test"]], inputs)
    local = Examples.of(of_peers, labels[own["test"]], sizes[:, 2])
    held_out = Examples.of(held_inputs, held_labels, sizes[:, 1])
    train = task.examples
    longest = longest_train = int(everyone.max())
    decides = common["classes"] == 2 and labels.dim() == 1 and "protected" in common
    groups = as_tensor(cells(common["labels"], common["protected"])) if decides else None
    protected = common["protected"] if has_adversary(task.module) else None
    if eval_examples:
        order = randomness.generator(seed, "eval-examples").permutation(len(labels))
        chosen = np.sort(order[:eval_examples])
        inputs, labels = map_parts(lambda part: part[chosen], inputs), labels[chosen]
        groups = None if groups is None else groups[chosen]
        protected = None if protected is None else protected[chosen]
        bound = per_peer(eval_examples, len(everyone))
        train = _bounded(task, bound, seed)
        longest_train = min(int(everyone[:, 0].max()), bound)
    shown = attack.triggered(raw, common["labels"])
    triggered = None if shown is None else on_device(*shown)
    return TestSets(
        inputs=inputs,
        labels=labels,
        train=train,
        local=local,
        held_out=held_out,
        classes=int(common["classes"]),
        longest=longest,
        longest_train=longest_train,
        validates=validates,
        tokens=tokens,
        triggered=triggered,
        groups=None if groups is None else groups.to(task.device),
        protected=protected,
    )


def has_adversary(module: Module) -> bool:
    """Return whether a model has an adversary beside it, as `--fairness-adversary` adds it."""
    from dfl.models.layers import SplitModel

    return isinstance(module, SplitModel) and "adversary" in module.parts


def per_peer(eval_examples: int | None, peers: int) -> int:
    """Return the most training examples of a peer that are evaluated, ceil(N / P)."""
    return -(-(eval_examples or MOST) // peers)


def _bounded(task: Task, bound: int, seed: int) -> Examples:
    """Return at most `bound` training examples of each peer, drawn by seed and peer."""
    sizes = task.examples.sizes
    chosen = Ragged(np.empty(np.minimum(sizes, bound).sum(), np.int64), np.minimum(sizes, bound))
    generators = randomness.generators(seed, "eval-train", task.peers)
    for own, generator, n in zip(chosen, generators, sizes.tolist(), strict=True):
        own[:] = generator.permutation(n)[:bound]
    return task.examples.subset(chosen.sorted())
