"""Callbacks of a run: the base class, and the plain data that callbacks receive.

Terminal, figures, TensorBoard, the run directory and a user's own callback watch the round loop
through `Callback`. All methods are called on rank 0 only.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.layout import Layout
from dfl.core.parse import shown
from dfl.core.parts import Shape
from dfl.core.profiling import Profiles

Peers = Mapping[str, NDArray[np.float64]]
"""Figures of all peers, (P,) each, by name."""


COLUMNS = (
    "round", "seconds", "train_loss", "accuracy_mean", "accuracy_min", "accuracy_max",
    "accuracy_std", "accuracy_mean_model", "local_accuracy_mean", "consensus_distance",
    "payload_bytes", "wire_bytes",
)  # fmt: skip
"""First columns of metrics.csv; then follow sim_seconds, where links are simulated, and those that
only some runs have.
"""

FURTHER = (
    "sim_seconds", "upload_bytes", "download_bytes", "parameters_k_plus_m", "messages_lost",
    "peers_up", "test_loss_mean", "test_loss_max", "test_loss_mean_model", "perplexity_mean",
    "parity_gap_mean", "odds_gap_mean", "adversary_auc_mean", "validation_accuracy_mean",
    "validation_accuracy", "accuracy_ensemble", "accuracy_vote", "backdoor_success_mean",
    "backdoor_success", "trust_mean", "trust_mean_attackers",
)  # fmt: skip
"""Columns of metrics.csv and peers.csv that some runs have, which no method observes."""


class Row(dict[str, float]):
    """The figures of one evaluation, by column of metrics.csv.

    Columns that every run has are attributes as well; `row[name]` reads any column, as those that a
    method, a link model or an ensemble adds.
    """

    @property
    def round(self) -> int:
        """Rounds done, t."""
        return int(self["round"])

    @property
    def seconds(self) -> float:
        """Seconds since the run began, launches before a resume included."""
        return self["seconds"]

    @property
    def train_loss(self) -> float:
        """The mean over the honest peers of the loss on their own training data, after mixing."""
        return self["train_loss"]

    @property
    def accuracy_mean(self) -> float:
        """The mean over the honest peers of the accuracy on the common test set, in [0, 1]."""
        return self["accuracy_mean"]

    @property
    def accuracy_min(self) -> float:
        """The lowest of these accuracies."""
        return self["accuracy_min"]

    @property
    def accuracy_max(self) -> float:
        """The highest of these accuracies."""
        return self["accuracy_max"]

    @property
    def accuracy_std(self) -> float:
        """The standard deviation of these accuracies."""
        return self["accuracy_std"]

    @property
    def accuracy_mean_model(self) -> float:
        """The accuracy of the mean of the honest peers' models on the common test set."""
        return self["accuracy_mean_model"]

    @property
    def local_accuracy_mean(self) -> float:
        """The mean over the honest peers of the accuracy on their own test examples."""
        return self["local_accuracy_mean"]

    @property
    def consensus_distance(self) -> float:
        """sqrt(mean_i ||x_i - mean x||^2) over the honest peers."""
        return self["consensus_distance"]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all messages so far, independent of the number of ranks."""
        return int(self["payload_bytes"])

    @property
    def wire_bytes(self) -> int:
        """Bytes that MPI moved between ranks so far, as `dfl.comm.traffic.Traffic` has them."""
        return int(self["wire_bytes"])


def rows_of(table: str) -> tuple[Row, ...]:
    """Return the rows of a metrics.csv."""
    lines = csv.DictReader(StringIO(table))
    return tuple(Row({name: float(value) for name, value in line.items()}) for line in lines)


@dataclass(frozen=True)
class GraphInfo:
    """The graph of the peers.

    Attributes:
        edges: number of edges.
        directed: whether they are directed.
        degrees: (P,), neighbours of each peer.
        weights: the mixing matrices, (P, P) each; round t uses the one numbered t modulo their
            number. Those of the first rounds where every round draws a new graph.
        endless: whether every round draws a new graph; edges and degrees are those of round 0 then.
        own_weights: whether the graph came with its weights, so that no mixing rule is applied.
        gap: spectral gap.
        smallest: smallest eigenvalue of the mixing matrix.
        half_rounds: rounds in which plain averaging halves disagreement; NaN where not computed.
    """

    edges: int
    directed: bool
    degrees: NDArray[np.int64]
    weights: Sequence[csr_array]
    endless: bool
    own_weights: bool
    gap: float
    smallest: float
    half_rounds: float


class Memory(NamedTuple):
    """Estimated bytes on the fullest rank: models and work, examples of its peers, test set."""

    models: int
    examples: int
    test_set: int


@dataclass(frozen=True)
class MethodInfo:
    """What a method needs.

    Attributes:
        rows: rows of m numbers that a peer remembers besides its model, the mean over the peers.
        messages: messages to each neighbour in a round.
        within_clusters: whether there is one more to each neighbour in the peer's cluster.
        assumes: what it assumes of the run.
    """

    rows: float
    messages: int
    within_clusters: bool
    assumes: tuple[str, ...]


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run before round 0.

    Attributes:
        run: the settled run.
        layout: peers and ranks.
        device: where rank 0 trains.
        own_module: whether the caller gave the model.
        parameters: d.
        shared: m, the parameters that peers share.
        frozen: further parameters, which are neither trained nor sent; every rank has them once.
        dtype: of the parameters, as "float32".
        attackers: ids of the attackers.
        local_steps: (P,), local steps of every peer in a round.
        batch_size: examples per local step; 0 is all that a peer has.
        classes: number of labels; 0 where labels are no classes.
        shape: shape of one example; a tuple of shapes where it has several parts.
        places: shape of an example's labels where they are several; else ().
        label_counts: (P, classes) training examples; (P, 0) where labels are no classes.
        sizes: (P, 3) training, validation and own test examples.
        n_test: examples of the common test set.
        evaluated_train: most training examples of a peer that are evaluated.
        graph: None where peers have no neighbours.
        has_server: whether the method has a server.
        broadcasts: models that the server sends in a round.
        payload_shared: bytes of a round, by all peers and the server.
        payload_whole: the same while all parameters are shared.
        method: what the method needs.
        memory: estimate for the fullest rank.
        notes: warnings, one line each.
        resumed: round and path of the checkpoint at which the run goes on; None where it begins.
        earlier: the rows of evaluations before that checkpoint. `Callback.row` is called for later
            ones only.
    """

    run: Run
    layout: Layout
    device: str
    own_module: bool
    parameters: int
    shared: int
    frozen: int
    dtype: str
    attackers: NDArray[np.int64]
    local_steps: NDArray[np.int64]
    batch_size: int
    classes: int
    shape: Shape
    places: tuple[int, ...]
    label_counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    n_test: int
    evaluated_train: int
    graph: GraphInfo | None
    has_server: bool
    broadcasts: int
    payload_shared: float
    payload_whole: float
    method: MethodInfo
    memory: Memory
    notes: tuple[str, ...]
    resumed: tuple[int, Path] | None
    earlier: tuple[Row, ...]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        peers: figures of all peers.
        state: the models by parameter name, axis 0 = peers, or one row where all have the same.
        profile: what the ranks have spent in each phase; None without `--profile`.
    """

    peers: Peers
    state: Mapping[str, NDArray[np.floating]]
    profile: Profiles | None = None


class Callback:
    """Watches a run. A subclass overrides the methods that it needs; all of them do nothing
    here.
    """

    needs_models: bool = False
    """Whether `evaluated_models` is called. The models of all peers are then gathered at every
    evaluation.
    """

    def start(self, info: RunInfo) -> None:
        """Called before the first round of this launch."""

    def round(self, t: int) -> None:
        """Called after t rounds where no evaluation is due. An InputError ends the run after the
        next round.
        """

    def row(self, row: Row) -> None:
        """Called after each evaluation."""

    def evaluated(self, t: int, peers: Peers) -> None:
        """Called after `row`.

        Args:
            t: the rounds that are done.
            peers: the figures of all peers.
        """

    def evaluated_models(self, t: int, state: Mapping[str, NDArray[np.floating]]) -> None:
        """Called after `evaluated`, if `needs_models` is true.

        Args:
            t: the rounds that are done.
            state: the models by parameter name, as `Outcome.state`.
        """

    def finish(self, outcome: Outcome) -> None:
        """Called after the last round."""

    def close(self, error: BaseException | None) -> None:
        """Called at the end, with the error that ended the run or None."""


def as_callbacks(given: object) -> tuple[Callback, ...]:
    """Return the callbacks that a caller gives.

    Raises:
        InputError: something else than a list or a tuple of them.
    """
    if not isinstance(given, list | tuple):
        raise InputError(f"callbacks must be a list of dfl.Callback objects, not {shown(given)}")
    for each in given:
        if not isinstance(each, Callback):
            raise InputError(f"callbacks must be objects of dfl.Callback, not {shown(each)}")
    return tuple(given)


class Callbacks(Callback):
    """Several callbacks as one: they start and finish in order, and close in reverse order."""

    def __init__(self, callbacks: tuple[Callback, ...]) -> None:
        self.callbacks = callbacks
        self.needs_models = any(each.needs_models for each in callbacks)

    def start(self, info: RunInfo) -> None:
        """Start each; where one fails, close those that were started."""
        started: list[Callback] = []
        try:
            for each in self.callbacks:
                each.start(info)
                started.append(each)
        except BaseException as error:
            for each in reversed(started):
                with suppress(Exception):  # the first error is the one to mend
                    each.close(error)
            raise

    def round(self, t: int) -> None:
        """Pass on a round without an evaluation."""
        for each in self.callbacks:
            each.round(t)

    def row(self, row: Row) -> None:
        """Pass on an evaluation."""
        for each in self.callbacks:
            each.row(row)

    def evaluated(self, t: int, peers: Peers) -> None:
        """Pass on the figures of the peers, of which each gets its own copies."""
        for each in self.callbacks:
            each.evaluated(t, {name: values.copy() for name, values in peers.items()})

    def evaluated_models(self, t: int, state: Mapping[str, NDArray[np.floating]]) -> None:
        """Pass on the models to those that need them, each of which gets its own copies."""
        for each in self.callbacks:
            if each.needs_models:
                copies = {name: np.array(rows, order="C") for name, rows in state.items()}
                each.evaluated_models(t, copies)

    def finish(self, outcome: Outcome) -> None:
        """Pass on the outcome."""
        for each in self.callbacks:
            each.finish(outcome)

    def close(self, error: BaseException | None) -> None:
        """Close each once, the last one first, and then raise an error of closing, if any.

        A terminal is left tidy whatever the disk does, and a run is recorded as ended whatever a
        callback of the user's does.
        """
        closing, self.callbacks = self.callbacks, ()
        with ExitStack() as stack:
            for each in closing:
                stack.callback(each.close, error)
