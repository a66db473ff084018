"""The arguments of a method's round, a task and the network, as protocols.

`dfl.training` and `dfl.comm` implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.core.layout import Group
    from dfl.robust.aggregators import Aggregate

    Ints = NDArray[np.int64]


class Task(Protocol):
    """The learning problem of this rank's peers."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    @property
    def peers(self) -> Ints:
        """The numbers of the peers, (p,), ascending."""

    @property
    def sizes(self) -> Ints:
        """The training examples of each peer, (p,)."""

    @property
    def local_work(self) -> int:
        """Local epochs of a round, or local steps where the run counts steps."""

    @property
    def of_server(self) -> Task:
        """The server's own task, on rank 0, for a method with a `server_data_rule`."""

    def only(self, here: Ints, work: Ints | None = None, /) -> Task:
        """Return the task of some of the peers.

        Args:
            here: (a,) their positions on this rank, ascending.
            work: (a,) their local epochs, or steps; None for those of the run.
        """

    @property
    def momentum(self) -> float:
        """The run's momentum, of the local steps; or of the method, if its solver sets it so."""

    def rate(self, t: int, /) -> float:
        """Return η, the learning rate of round t."""

    def reach(self, t: int, /, momentum: float = 0.0) -> Tensor:
        """Return how far each peer moves in round t by a constant gradient of 1, (p, 1): K η
        without momentum.

        Args:
            t: the round.
            momentum: θ, which begins at zero.
        """

    def train(self, x: Tensor, t: int, /, correction: Tensor | None = None) -> Tensor:
        """Return the parameters of each peer after its local steps from x, (p, m).

        The result is in new memory, which the method may overwrite.

        Args:
            x: (p, m), where each peer starts; or (1, m), where all start.
            t: the round.
            correction: (p, m), added to every gradient; None for 0.
        """

    def train_with_momentum(
        self, x: Tensor, momentum: Tensor, t: int, /, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the parameters after the local steps, and their momentum, (p, m) each.

        Args:
            x: (p, m), where each peer starts.
            momentum: (p, m), with which it starts, in the unit of a gradient.
            t: the round.
            correction: (p, m), added to every gradient; None for 0.
        """


class Received(Protocol):
    """The messages that an exchange delivered."""

    @property
    def own(self) -> Tensor:
        """This rank's messages as their receivers decode them, (p, m) or (a, m) over a edges.

        Zeros where an edge lost the message. For an attacker it is the message that it would have
        sent as an honest peer.
        """

    @property
    def messages(self) -> Tensor:
        """The messages received over each of a' edges, (a', m); zeros where nothing arrived."""

    @property
    def error(self) -> Tensor:
        """||Q(x) - x||^2 / ||x||^2 of each peer's message, (p,), the worst over its edges."""

    def average(self) -> Tensor:
        """Return sum_j w_ij message_j over the closed neighbourhood, (p, m).

        The weight of a message that does not arrive goes to the receiver's own.
        """

    def total(self) -> Tensor:
        """Return sum_j w_ij message_j over the closed neighbourhood, (p, m).

        A sender keeps the weight of a message that does not arrive, and learns of it.
        """

    def aggregate(self, rule: partial[Aggregate]) -> Tensor:
        """Return the aggregate of each closed neighbourhood by an aggregation rule, (p, m)."""


class ServerAggregate(Protocol):
    """The aggregate of updates at a server."""

    @property
    def row(self) -> Tensor:
        """The aggregate, (1, m)."""

    @property
    def scores(self) -> Tensor:
        """The rule's score of each peer, (p,); NaN for a peer without one."""


class Edges(Protocol):
    """The directed edges that this rank's peers use in a round.

    The union graph is that of all edges that any round uses.
    """

    @property
    def owner(self) -> Ints:
        """The position on this rank of the sender of each of the a outgoing edges, (a,)."""

    @property
    def out(self) -> Ints:
        """The positions of these edges among the outgoing edges of the union graph, (a,)."""

    @property
    def into(self) -> Ints:
        """The positions of the a' incoming edges among those of the union graph, (a',)."""


class Union(Protocol):
    """The directed edges that any round uses."""

    @property
    def out(self) -> Ints:
        """owner * P + other of each outgoing edge, ascending, (e,)."""

    @property
    def out_owner(self) -> Ints:
        """The position on this rank of the sender of each outgoing edge, (e,)."""

    @property
    def into_owner(self) -> Ints:
        """The position on this rank of the receiver of each incoming edge, (e',)."""


class Net(Protocol):
    """The network in round t."""

    @property
    def t(self) -> int:
        """The round."""

    @property
    def peers(self) -> int:
        """P, the number of peers."""

    @property
    def hosted(self) -> int:
        """p, the number of peers on this rank."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the parameters of a model; the first of them are those that are sent."""

    @property
    def everyone(self) -> Group:
        """All peers."""

    @property
    def fixed(self) -> bool:
        """Whether the graph is the same in every round, and no fault takes edges or peers away."""

    @property
    def aggregator(self) -> partial[Aggregate]:
        """The aggregation rule of the run."""

    @property
    def graphs(self) -> Sequence[Net]:
        """The network of this round on each graph of a sequence, for a method that uses all; or on
        the graph and on the edges within its clusters, where the method is `within_clusters`.
        """

    @property
    def union(self) -> Union:
        """Every edge that any round uses, by which memory per edge is sorted."""

    @property
    def edges(self) -> Edges:
        """The edges of this round."""

    def exchange(
        self,
        messages: Tensor,
        /,
        start: Tensor | None = None,
        per_edge: bool = False,
        slot: str = "x",
    ) -> Received:
        """Send messages to the neighbours of this round and return what was received.

        Args:
            messages: (p, m), one row per peer; or (a, m), one row per edge.
            start: (p, m), x_i from which each peer moved to its message z_i. Attacks work on the
                sender's step z_j - x_j, aggregation rules on z_j - x_i, with the receiver's x_i.
                None, as 0, where messages are differences.
            per_edge: whether there is a row per edge of `edges`, and not per peer.
            slot: names this exchange where a round has several; it is part of the address of random
                numbers.
        """

    def pull(self, received: Tensor, /) -> Tensor:
        """Return sum_j w_ij y_(j->i), (p, m), over the incoming edges of this round.

        Args:
            received: (e', m), y_(j->i) for every incoming edge of the union graph.
        """

    def push(self, sent: Tensor, /) -> Tensor:
        """Return sum_k v_ik y_(i->k), (p, m), over the outgoing edges; v is W reversed in time.

        Args:
            sent: (e, m), y_(i->k) for every outgoing edge of the union graph.
        """

    def sum_incoming(self, messages: Tensor, /) -> Tensor:
        """Return sum_j y_(j->i), (p, m), over the messages that peers receive in this round.

        Args:
            messages: (a', m), y_(j->i) for every incoming edge in use, as `Received.messages`.
        """

    def group(self, ids: Ints, /) -> Group:
        """Return some peers, by their numbers."""

    def present(self, ids: Ints, /) -> Ints:
        """Return those of some peers that are up in this round, in their order."""

    def reached(self, group: Group, /) -> Group:
        """Return those of a group that receive the server's message in this round."""

    def broadcast(self, row: Tensor, to: Group, /) -> Tensor:
        """Send the server's row to a group and return the row that it receives.

        Args:
            row: (1, m), the same on every rank.
            to: the peers that download it, whose bytes are counted.
        """

    def aggregate(
        self,
        updates: Tensor,
        group: Group,
        weights: NDArray[np.float64],
        reference: Tensor | None = None,
        /,
        slot: str = "x",
    ) -> ServerAggregate:
        """Send updates to the server and return their aggregate.

        Args:
            updates: (a, m), one row per member of the group on this rank: differences, not models.
            group: the senders.
            weights: (a,), the weight of each of them.
            reference: (1, m), the server's own update, or the one that it expects.
            slot: names this aggregation where a round has several.
        """

    def at_server(self, compute: Callable[[], Tensor], like: Tensor, /) -> Tensor:
        """Return a row (1, m) that the server computes by itself, on every rank.

        Args:
            compute: returns the row; called on rank 0 only.
            like: a tensor of the row's dtype and device.
        """
