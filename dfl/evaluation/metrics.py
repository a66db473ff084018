"""Metrics: loss, accuracy and perplexity of every peer's model, and consensus distance.

Each peer is evaluated on its own rank. Rank 0 gathers one row of numbers per peer and takes means
in peer order, so that no figure depends on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core.layout import Layout, blocks, columns
from dfl.core.parts import Parts, map_parts
from dfl.evaluation.fairness import ADVERSARY, ODDS, PARITY, auc, gaps
from dfl.evaluation.goals import slack
from dfl.training.losses import cross_entropy, losses

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.comm.mpi import World
    from dfl.evaluation.ensembles import Ensemble
    from dfl.evaluation.test_sets import TestSets
    from dfl.training.examples import Examples
    from dfl.training.task import Task
else:
    from dfl.core.lazy import torch

CHUNK = 512
"""Examples that are evaluated at a time; fixed, since the last bits of the results depend on it."""
MODELS = 256
"""Models that are evaluated at a time."""
MOST_OUTPUTS = 2**27
"""The most outputs at a time; fewer models are evaluated at once where these would be more."""

Floats = NDArray[np.float64]
Figures = dict[str, Floats]
"""Figures of peers by name, (p,) or (P,) each."""


def common_figures(
    x: Tensor, task: Task, test_sets: TestSets, ensemble: Ensemble | None = None
) -> Figures:
    """Return the accuracy of models on the common test set, (p,), by name; and their mean loss
    where labels are no classes, their perplexity where labels are tokens, their gaps between groups
    where there are protected attributes, and the AUC of an adversary that predicts these.

    Of sequences, accuracy is the share of the places with a label that are predicted correctly.
    Perplexity is exp of the mean cross-entropy of the same labels. Accuracy is NaN where labels are
    no classes, and all are NaN for a model that returns NaN. If all rows are the same, as before
    round 0, one is evaluated.

    Args:
        x: (p, d), the models.
        task: the learning problem of this rank.
        test_sets: the test sets.
        ensemble: an ensemble to which the outputs are added; then every rank must call this
            function, also one without peers.
    """
    if not test_sets.classes or not len(test_sets.labels):
        return _without_accuracy(x, task, test_sets)
    rows = _distinct(x, task)
    correct = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
    has_nan = torch.zeros(len(rows), dtype=torch.bool, device=x.device)
    loss = torch.zeros(len(rows), dtype=torch.float64, device=x.device)
    groups = test_sets.groups
    positive = loss[:, None].repeat(1, 0 if groups is None else groups.shape[1])
    models, chunk = _models(task), _examples_at_a_time(test_sets.labels, task)
    predicted = 0
    for first_example in range(0, len(test_sets.labels), chunk):
        some = slice(first_example, first_example + chunk)
        labels = test_sets.labels[some]
        outputs = _outputs(rows, task, map_parts(itemgetter(some), test_sets.inputs))
        if labels.dim() > 1:
            counts = labels >= 0
            outputs, labels = _at(counts, outputs), labels[counts]
        if ensemble is not None:
            outputs = iter(ensemble.add(outputs, labels))
        for first, out in zip(range(0, len(rows), models), outputs, strict=True):
            largest, label = out.max(2)
            correct[first : first + models] += (label == labels).sum(1)
            has_nan[first : first + models] |= largest.isnan().any(1)
            if groups is not None:
                positive[first : first + models] += (label == 1).double() @ groups[some]
            if test_sets.tokens:  # model by model, since the loss takes as much memory as outputs
                sums = [cross_entropy(each, labels).double().sum() for each in out]
                loss[first : first + models] += torch.stack(sums)
        predicted += len(labels)
    accuracy = np.where(has_nan.cpu().numpy(), np.nan, correct.cpu().numpy() / predicted)
    with np.errstate(over="ignore"):
        found = {"accuracy": accuracy, "perplexity": np.exp(loss.cpu().numpy() / predicted)}
    if groups is not None:
        between = gaps(positive.cpu().numpy(), groups.sum(0).cpu().numpy())
        found |= {name: np.where(np.isnan(accuracy), np.nan, gap) for name, gap in between.items()}
    if test_sets.protected is not None:
        found[ADVERSARY] = adversary_auc(rows, task, test_sets)
    return {name: np.broadcast_to(found[name], len(x)) for name in _common_names(test_sets)}


def quality(test_sets: TestSets) -> tuple[str, ...]:
    """Return the names of the figures on the common test set that the mean model has, too."""
    return ("accuracy",) if test_sets.classes else ("accuracy", "test_loss")


def _common_names(test_sets: TestSets) -> tuple[str, ...]:
    """Return the names of the figures on the common test set."""
    more = ("perplexity",) * test_sets.tokens
    more += (PARITY, ODDS) if test_sets.groups is not None else ()
    more += (ADVERSARY,) if test_sets.protected is not None else ()
    return (*quality(test_sets), *more)


def _distinct(x: Tensor, task: Task) -> Tensor:
    """Return models (p, d), or one row of them where all are the same."""
    same = len(x) > 1 and not task.kinds and bool((x == x[:1]).all())
    return x[:1] if same else x


def _without_accuracy(x: Tensor, task: Task, test_sets: TestSets) -> Figures:
    """Return `common_figures` where labels are no classes, or there are none."""
    found = dict.fromkeys(_common_names(test_sets), np.full(len(x), np.nan))
    if not len(test_sets.labels):
        return found
    loss = _test_loss(_distinct(x, task), task, test_sets)
    return found | {"test_loss": np.broadcast_to(loss, len(x))}


def _test_loss(x: Tensor, task: Task, test_sets: TestSets) -> Floats:
    """Return the mean loss of models (p, d) on the common test set, (p,)."""
    total = np.zeros(len(x))
    models, chunk = _models(task), _examples_at_a_time(test_sets.labels, task)
    for first_example in range(0, len(test_sets.labels), chunk):
        some = slice(first_example, first_example + chunk)
        labels = test_sets.labels[some]
        outputs = _outputs(x, task, map_parts(itemgetter(some), test_sets.inputs))
        for first, out in zip(range(0, len(x), models), outputs, strict=True):
            same = labels.expand(len(out), *labels.shape)
            found = losses(out, same, task.loss, task.loss_by_model)
            total[first : first + models] += found.double().cpu().numpy().sum(1)
    return total / len(test_sets.labels)


def adversary_auc(x: Tensor, task: Task, test_sets: TestSets) -> Floats:
    """Return the AUC with which the adversary of each model predicts the protected attributes of
    the common test set, (p,), mean over the attributes; NaN for outputs that are NaN.

    Args:
        x: (p, d), the models and their adversaries.
        task: the learning problem of this rank.
        test_sets: the test sets.
    """
    assert test_sets.protected is not None
    if task.kinds:
        of_peers = np.full(len(x), np.nan)
        for here, same in task.by_kind():
            of_peers[here] = adversary_auc(x[here], same, test_sets)
        return of_peers
    models, chunk = _models(task), _examples_at_a_time(test_sets.labels, task)
    found = []
    for first in range(0, len(x), models):
        parameters = task.parameter_layout.views(x[first : first + models])
        outputs = []
        for start in range(0, len(test_sets.labels), chunk):
            some = slice(start, start + chunk)
            inputs = task.inputs(map_parts(itemgetter(some), test_sets.inputs))
            h = task.outputs(parameters, inputs, each=False, part="f")
            outputs.append(task.outputs(parameters, h, part="adversary").double())
        scores = torch.cat(outputs, 1).cpu().numpy()
        areas = auc(scores, test_sets.protected).mean(-1)
        found.append(np.where(np.isnan(scores).any((1, 2)), np.nan, areas))
    return np.concatenate(found) if found else np.zeros(0)


def _models(task: Task) -> int:
    """Return how many models are evaluated at a time.

    On a GPU the number is fixed. Recurrent layers have four gates at every step, and as many inputs
    of them. Of a layer that states its numbers, some four tensors exist at a time.
    """
    if task.models_at_once:
        return task.models_at_once
    examples = _examples_at_a_time(task.examples.labels, task)
    layers = max(8 * task.recurrent_states, 4 * task.layer_numbers)
    numbers = max(CHUNK * task.classes, examples * layers, 1)
    return max(2, min(MODELS, MOST_OUTPUTS // numbers))


def _examples_at_a_time(labels: Tensor, task: Task) -> int:
    """Return how many examples are evaluated at a time: CHUNK, or as many as have CHUNK labels, or
    fewer where a layer computes many numbers for each.
    """
    places = math.prod(labels.shape[1:]) if task.is_sequence else 1
    return max(1, min(CHUNK // places, MOST_OUTPUTS // max(1, 4 * task.layer_numbers)))


def _at(counts: Tensor, outputs: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the outputs (a, k, classes) at the k places (n, *places) that count."""
    return (out[:, counts] for out in outputs)


def _outputs(rows: Tensor, task: Task, inputs: Parts) -> Iterator[Tensor]:
    """Yield the outputs of models (a, d) for inputs, `_models` models at a time."""
    if task.kinds:
        yield from _outputs_by_kind(rows, task, inputs)
        return
    normalized = task.inputs(inputs)
    most = _models(task)
    for first in range(0, len(rows), most):
        models = task.parameter_layout.views(rows[first : first + most])
        yield task.outputs(models, normalized, each=False)


def _outputs_by_kind(x: Tensor, task: Task, inputs: Parts) -> Iterator[Tensor]:
    """Yield the outputs for all peers of this rank, whose models are of several kinds."""
    by_peer: dict[int, Tensor] = {}
    for here, same_kind in task.by_kind():
        outputs = (each for some in _outputs(x[here], same_kind, inputs) for each in some)
        by_peer |= dict(zip(here.tolist(), outputs, strict=True))
    most = _models(task)
    for first in range(0, len(x), most):
        yield torch.stack([by_peer[i] for i in range(first, min(first + most, len(x)))])


def own_loss_and_accuracy(
    x: Tensor, task: Task, examples: Examples, longest: int, shared: bool = False
) -> tuple[Floats, Floats]:
    """Return mean loss and accuracy of every peer's model on its own examples, (p,) each.

    Of sequences, they are means over all places of a peer that have a label. Both are NaN for a
    peer without examples. Accuracy is NaN where the loss is.

    Args:
        x: (p, d), the models; or (1, d), the one that all have.
        task: the learning problem of this rank.
        examples: the examples of its peers to evaluate on.
        longest: the most examples that any peer on any rank may have there; the last bits of the
            results depend on it.
        shared: whether x is one model for all.
    """
    starts = examples.starts
    loss, correct, predicted = np.zeros((3, len(starts)))
    if task.kinds:
        for here, same_kind in task.by_kind():
            loss[here], correct[here] = own_loss_and_accuracy(
                x[here], same_kind, examples.only(here), longest
            )
        return loss, correct
    chunk = _chunk(longest, _examples_at_a_time(examples.labels, task))
    models = 1 if shared else _models(task)
    row = task.parameter_layout.views(x[0]) if shared else {}
    for first in range(0, int(examples.sizes.max(initial=0)), chunk):
        counts = np.clip(examples.sizes - first, 0, chunk)
        some = np.flatnonzero(counts)
        for here in np.split(some, range(models, len(some), models)):
            real = np.arange(chunk) < counts[here, None]
            index = starts[here, None] + (first + np.arange(chunk)) * real
            inputs, labels = examples.at(torch.from_numpy(index).to(task.device))
            inputs = task.inputs(inputs)
            if shared:
                out = task.output(row, map_parts(itemgetter(0), inputs))[None]
            else:
                out = task.outputs(task.parameter_layout.take(x, here), inputs)
            if task.is_sequence:
                out, labels, real = _flat(out, labels, real)
            found = losses(out, labels, task.loss, task.loss_by_model)
            loss[here] += np.where(real, found.double().cpu().numpy(), 0.0).sum(1)
            predicted[here] += real.sum(1)
            if task.classes:
                correct[here] += ((out.argmax(2) == labels).cpu().numpy() & real).sum(1)
            else:
                correct[here] = np.nan
    correct[np.isnan(loss)] = np.nan
    with np.errstate(invalid="ignore"):
        return loss / predicted, correct / predicted


def _flat(
    out: Tensor, labels: Tensor, real: NDArray[np.bool_]
) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
    """Return sequences as so many examples, of which those are real that have a label.

    Args:
        out: (a, n, *places, classes).
        labels: (a, n, *places).
        real: (a, n), whether an example is no padding.

    Returns:
        (a, k, classes), (a, k) and (a, k).
    """
    last = labels.dim() - 1
    counts = (labels.flatten(2) >= 0).cpu().numpy() & real[..., None]
    return (
        out.flatten(1, last),
        labels.flatten(1).clamp_min(0),
        counts.reshape(len(real), -1),
    )


def _chunk(longest: int, most: int) -> int:
    """Return the number of examples to evaluate at a time, at most `most`.

    It splits `longest` examples into chunks of about equal size.
    """
    return -(-longest // -(-longest // most))


def not_finite_rows(x: Tensor) -> NDArray[np.int64]:
    """Return the indices of the rows of x (p, d) that are not finite."""
    if not x.numel():
        return np.zeros(0, np.int64)
    # NaN if a row has one. This reads x twice and allocates nothing of its size.
    ends = torch.stack([x.amin(1), x.amax(1)])
    return np.flatnonzero(~torch.isfinite(ends).all(0).cpu().numpy())


def mean_model_figures(mean: Tensor, task: Task, test_sets: TestSets) -> dict[str, float]:
    """Return the figures named by `quality` of a mean model (d,); NaN for several kinds of
    model.
    """
    names = quality(test_sets)
    if task.kinds:
        return dict.fromkeys(names, np.nan)
    alone = replace(test_sets, tokens=False, groups=None, protected=None)
    found = common_figures(mean[None], task, alone)
    return {name: float(found[name][0]) for name in names}


def consensus_distance(
    x: Tensor,
    world: World,
    layout: Layout,
    attackers: Sequence[int] | NDArray[np.int64] = (),
    counted: NDArray[np.bool_] | None = None,
) -> tuple[float, Tensor | None]:
    """Return the consensus distance sqrt(mean_i ||x_i - mean x||^2), and the mean model (d,).

    Both are on rank 0; other ranks get (0, None). The means are over all peers but attackers. Every
    rank adds up its own coordinates over all peers, in float64, in peer order and in fixed blocks.

    Args:
        x: (p, d), the models of this rank's peers.
        world: the ranks; all of them call this.
        layout: peers and ranks.
        attackers: the peers to leave out.
        counted: (d,), whether a coordinate counts in the distance; None for all.
    """
    parts = columns(x.shape[1], world.size)
    everyone = layout.ascending(world.columns(x.cpu().numpy(), parts, layout.counts))
    kept = np.ones(x.shape[1], bool) if counted is None else counted
    kept = kept[parts[world.rank].start : parts[world.rank].stop]
    everyone = np.delete(everyone, attackers, axis=0) if len(attackers) else everyone
    peers = len(everyone)
    mean = np.zeros(everyone.shape[1])
    squares = []
    for block in blocks(everyone.shape[1]):
        values = everyone[:, block]
        mean[block] = np.add.reduce(values, axis=0, dtype=np.float64) / peers
        rows = (values[first : first + MODELS] - mean[block] for first in range(0, peers, MODELS))
        here = slice(None) if kept[block].all() else kept[block].nonzero()[0]
        squares.append(np.concatenate([(row[:, here] ** 2).sum(1) for row in rows]))
    means = world.gather(mean)
    squared = world.gather(np.array(squares).reshape(-1, peers))
    if means is None or squared is None:
        return 0.0, None
    distance = float(np.sqrt(squared.sum(0).sum() / peers))
    return distance, torch.from_numpy(means).to(x.device, x.dtype)


def peer_figures(
    x: Tensor,
    task: Task,
    test_sets: TestSets,
    world: World,
    *,
    is_global: bool,
    ensemble: Ensemble | None = None,
) -> dict[str, Floats]:
    """Return the figures of this rank's peers, (p,) each, by name.

    Args:
        x: (p, d), the peers' models; or (1, d), the one that all have.
        task: the learning problem of this rank.
        test_sets: the test sets.
        world: the ranks; all of them call this.
        is_global: whether all peers have one model.
        ensemble: an ensemble to which the outputs on the common test set are added.
    """
    own = _common_figures(x, task, test_sets, world, is_global, ensemble)
    own["train_loss"], _ = own_loss_and_accuracy(
        x, task, test_sets.train, test_sets.longest_train, is_global
    )
    _, own["local_accuracy"] = own_loss_and_accuracy(
        x, task, test_sets.local, test_sets.longest, is_global
    )
    if test_sets.validates:
        held_out = own_loss_and_accuracy(x, task, test_sets.held_out, test_sets.longest, is_global)
        _, own["validation_accuracy"] = held_out
    if test_sets.triggered:
        inputs, labels = test_sets.triggered
        backdoor = replace(
            test_sets, inputs=inputs, labels=labels, tokens=False, groups=None, protected=None
        )
        found = _common_figures(x, task, backdoor, world, is_global)
        own["backdoor_success"] = found["accuracy"]
    return own


def not_finite(
    peers: dict[str, Floats], sizes: NDArray[np.int64], n_test: int, classes: int
) -> str:
    """Return a description of a figure of an honest peer that is not finite, or "".

    A figure is NaN without error where the peer, or every peer, has no examples for it.

    Args:
        peers: every peer's figures (P,), by name.
        sizes: (P, 3) training, validation and own test examples.
        n_test: examples of the common test set.
        classes: number of labels; 0 where there is no accuracy.
    """
    counts = {"train_loss": sizes[:, 0]}
    if classes:
        counts |= {
            "accuracy": np.ones(len(sizes), np.int64),
            "validation_accuracy": sizes[:, 1],
            "local_accuracy": sizes[:, 2],
        }
    else:
        counts["test_loss"] = np.full(len(sizes), n_test)
    for name in (name for name in counts if name in peers):
        bad = ~np.isfinite(peers[name]) & (counts[name] > 0) & (peers["is_attacker"] == 0)
        if bad.any():
            peer = int(bad.argmax())
            return f"{name} of peer {peer} is {peers[name][peer]}"
    return ""


def summary(peers: dict[str, Floats], declared: tuple[str, ...]) -> dict[str, float]:
    """Return the columns of metrics.csv that summarize peers.

    They are over honest peers, but for the mean trust in attackers.

    Args:
        peers: every peer's figures (P,), by name.
        declared: the columns of the method, which are maxima.
    """
    trust = _mean(peers["trust"][peers["is_attacker"] == 1]) if "trust" in peers else np.nan
    peers = {name: values[peers["is_attacker"] == 0] for name, values in peers.items()}
    accuracy = peers["accuracy"]
    row = {
        "train_loss": _mean(peers["train_loss"]),
        "accuracy_mean": _mean(accuracy),
        "accuracy_min": float(accuracy.min()),
        "accuracy_max": float(accuracy.max()),
        "accuracy_std": float(accuracy.std()),
        "local_accuracy_mean": _mean(peers["local_accuracy"]),
    }
    fair = (PARITY, ODDS, ADVERSARY)
    means = ("test_loss", "perplexity", *fair, "validation_accuracy", "backdoor_success", "trust")
    row |= {f"{name}_mean": _mean(peers[name]) for name in means if name in peers}
    row |= {"test_loss_max": float(peers["test_loss"].max())} if "test_loss" in peers else {}
    row |= {"trust_mean_attackers": trust} if "trust" in peers else {}
    return row | {name: float(peers[name].max()) for name in declared}


def rounds_to(rounds: Sequence[float], accuracy: Sequence[float], target: float) -> float:
    """Return the number of rounds until an accuracy is reached; NaN if it never is.

    It is interpolated linearly between evaluations of the best accuracy so far. Evaluations whose
    accuracy is NaN are left out. One that misses the target by at most `slack` reaches it.

    Args:
        rounds: the rounds of the evaluations.
        accuracy: their accuracies.
        target: the accuracy to reach.

    Source:
        McMahan et al. 2017, section 3.
    """
    known = ~np.isnan(accuracy)
    at = np.asarray(rounds)[known]
    best = np.maximum.accumulate(np.asarray(accuracy)[known])
    k = int(np.searchsorted(best, target - slack(target)))
    if k == len(best):  # also if there is no evaluation
        return float("nan")
    return float(at[0] if k == 0 else np.interp(target, best[k - 1 : k + 1], at[k - 1 : k + 1]))


def _common_figures(
    x: Tensor,
    task: Task,
    test_sets: TestSets,
    world: World,
    is_global: bool,
    ensemble: Ensemble | None = None,
) -> Figures:
    """Return `common_figures`, (p,) each by name; rank 0 evaluates a model that all have."""
    if not is_global:
        return common_figures(x, task, test_sets, ensemble)

    def of_all() -> bytes:
        found = common_figures(x, task, test_sets)
        return np.array([*found.values()], np.float64).tobytes()

    names = _common_names(test_sets)
    figures = np.frombuffer(world.from_root(of_all)).reshape(len(names), 1)
    return dict(zip(names, figures.repeat(len(task.peers), axis=1), strict=True))


def _mean(values: Floats) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
