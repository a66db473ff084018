"""The base class of methods, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

from dfl.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.assumptions import Assumption
    from dfl.algorithms.protocols import Net, Task
    from dfl.datasets.server_data import ServerDataRule
    from dfl.training.solver import Solver

ALGORITHMS: Registry[type[Method]] = Registry("algorithm", "dfl.algorithms")
"""Name -> frozen dataclass whose fields are the method's options."""


class State(Protocol):
    """The state of a method: a frozen dataclass.

    Axis 0 of a tensor is the peers of this rank, its directed edges sorted by (owner, other), or
    one row of a server. Axis 1, where there is one, is the m coordinates of a message.
    """

    @property
    def x(self) -> Tensor:
        """The parameters of this rank's peers, (p, m); or those of the server, (1, m)."""


S = TypeVar("S", bound=State)


class Algorithm(ABC, Generic[S]):
    """Base class of methods: the state before round 0, and a round.

    A method works on m coordinates of a model, all that it sees and sends. Further parameters of a
    peer stay in its task.
    """

    name: ClassVar[str] = "own"
    """Its name on the command line."""
    has_server: ClassVar[bool] = False
    """Whether there is a server, from whose model all peers start."""
    gossips: ClassVar[bool] = True
    """Whether peers send messages to their neighbours on a graph."""
    sends: ClassVar[bool] = True
    """Whether messages are sent at all."""
    peers_train: ClassVar[bool] = True
    """Whether peers train on their own examples."""
    mixing_sums: ClassVar[Literal["rows", "columns"]] = "rows"
    """Which sums of the mixing matrix must be 1; those of columns for push-sum."""
    default_topology: ClassVar[str] = "ring"
    """The graph of a run that gives neither a graph nor a matrix as an object."""
    default_mixing: ClassVar[str] = "metropolis"
    """The mixing matrix of a run that gives none."""
    extra_numbers: ClassVar[int] = 0
    """Numbers that a message has besides its m coordinates."""
    applies: ClassVar[tuple[str, ...]] = ()
    """Which of `compressor` and `aggregator` the method applies."""
    default_aggregator: ClassVar[str] = "mean"
    """The aggregator of a run that gives none."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns that the method adds to metrics.csv, with the largest value over the honest peers."""
    replicated: ClassVar[tuple[str, ...]] = ()
    """Fields of the state that belong to the server and are the same on every rank."""
    incoming: ClassVar[tuple[str, ...]] = ()
    """Fields of the state with a row for each incoming edge; others that have a row for each edge
    have one for each outgoing edge.
    """
    messages: ClassVar[int] = 1
    """Messages to each neighbour in a round, where peers gossip."""
    mixes: ClassVar[bool] = True
    """Whether the weights of the mixing matrix have a part, where peers gossip."""
    on_every_graph: ClassVar[bool] = False
    """Whether every round uses all graphs of a sequence, graph k of T for the coordinates k, k + T,
    k + 2T, ..., and not only that of the round for all of them.
    """
    within_clusters: ClassVar[bool] = False
    """Whether `net.graphs` are the graph, and that of the edges within its clusters, on which
    messages are sent too; for a method that requires `CLUSTERS`.
    """
    requires: ClassVar[Mapping[Assumption, str]] = {}
    """Assumptions without which a run is refused -> what would happen without them."""
    expects: ClassVar[Mapping[Assumption, str]] = {}
    """Assumptions -> what happens without them; a run is warned where one does not hold."""

    @abstractmethod
    def init(self, x: Tensor, copies: Tensor, net: Net) -> S:
        """Return the state before round 0; it sends nothing.

        It is called once more before a run, with tensors on the meta device, to count the memory of
        the state. `x.new_zeros(x.shape)` is quick there; for `torch.zeros_like(x)` torch imports
        sympy, which takes half a second.

        Args:
            x: (p, m), the initial models of the peers; or (1, m), that of the server.
            copies: of the same shape, the public copies of x before the first message: x where all
                peers start at the same point, else zeros.
            net: the network of round 0.
        """

    @abstractmethod
    def round(self, state: S, task: Task, net: Net) -> S:
        """Return the state after round `net.t`."""

    @property
    def topology(self) -> str | None:
        """The graph that the method brings; None where that of the run is used."""
        return None

    @property
    def server_data_rule(self) -> ServerDataRule | None:
        """The rule that selects the server's own training examples; None for none."""
        return None

    @property
    def weighting_option(self) -> str | None:
        """The option that gives senders other weights than the default ones, key=value; None
        without. It is refused with aggregation rules that ignore weights.
        """
        return None

    @property
    def averaging_step(self) -> float | None:
        """The step size with which public copies are averaged; None without public copies."""
        return None

    @property
    def averages(self) -> bool:
        """Whether the models after a round are means of models after local training, so that no
        coordinate leaves the range that it has among the peers.

        A method that adds a change of its own outside local training does not. Within it, momentum
        and corrections move no running statistics. Where this is False, `--norm-stats share` is
        refused: a variance might fall below 0.
        """
        return True

    def solver(self, solver: Solver) -> Solver:
        """Return the solver of local training, given that of the run."""
        return solver

    def server_solver(self, solver: Solver) -> Solver:
        """Return the solver of the server's training on its own examples, given that of peers."""
        return solver

    def training_peers(self, peers: int) -> int:
        """Return the largest number of peers, of P, that train in a round; at least 1."""
        return peers

    def traffic(self, peers: int, edges: float) -> tuple[float, int]:
        """Return the number of messages of all peers in a round, and of rows that the server sends.

        Args:
            peers: P.
            edges: the number of directed edges of the graph.
        """
        return self.messages * edges, 0

    def lengths(self, m: int, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the numbers of a message, in each round of a period.

        Args:
            m: the coordinates of a model that peers share.
            shapes: the shapes of its parameters, the first of which are the m coordinates.
        """
        return (m + self.extra_numbers,)

    def observe(self, state: S) -> dict[str, Tensor]:
        """Return values (p,) of the peers by column, those of `columns` included.

        Those of the last evaluation are in peers.csv, those of every evaluation in the history.
        """
        return {}

    def notes(self, smallest: float) -> tuple[str, ...]:
        """Return the warnings of the method, which are printed before a run.

        Args:
            smallest: λ_min, the smallest eigenvalue of the mixing matrix.
        """
        return ()


Method: TypeAlias = Algorithm[Any]
"""A method, whatever its state."""
