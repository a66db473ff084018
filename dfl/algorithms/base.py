"""The methods, one file each. `ALGORITHMS` is the registry that the command line reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dfl.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net
    from dfl.datasets.server_data import ServerDataRule
    from dfl.training.solver import Solver
    from dfl.training.task import Task

ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm", "dfl.algorithms")
"""Name -> frozen dataclass whose fields are the method's options."""


class State(Protocol):
    """What the loop asks of a method's state."""

    @property
    def x(self) -> Tensor:
        """(p, d), the models of this rank's peers; or (1, d), the one that all have."""

    @property
    def is_global(self) -> bool:
        """Which of the two."""

    @property
    def replicated(self) -> tuple[str, ...]:
        """The fields that are a server's, the same on every rank; the others have a row for every peer or edge."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What x is put together from, a row for every peer or one for all, where that takes work; else x."""


class Algorithm(ABC):
    """A method is `init` and `round`; its state is a frozen dataclass of its own, a `State`."""

    serves: ClassVar[bool] = False
    """Whether there is a server, at which everybody starts."""
    splits: ClassVar[bool] = True
    """Whether peers can keep a part of their models to themselves."""
    gossips: ClassVar[bool] = True
    """Whether peers speak to their neighbours on a graph."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Which of compressor and aggregator have a part in it."""
    rule: ClassVar[str] = "mean"
    """The aggregator where none is asked for."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns that the method adds to metrics.csv: the largest value over the peers."""

    @abstractmethod
    def init(self, x: Tensor, known: Tensor, net: Net) -> Any:
        """The state before round 0.

        Args:
            x: (p, d), where each peer starts; (1, d), where the server does.
            known: (p, s), what neighbours know of what a peer shares before it has spoken: that of x where all start
                at the same point, zeros where they do not.
            net: the network of round 0.
        """

    @abstractmethod
    def round(self, state: Any, task: Task, net: Net) -> Any:
        """The state after round `net.t`."""

    def part(self, state: Any, shared: int) -> Any:
        """The same state, from where on peers share only the first `shared` coordinates of their models."""
        return state

    @property
    def server_data_rule(self) -> ServerDataRule | None:
        """Which training examples the server has of its own; None for none."""
        return None

    @property
    def step(self) -> float | None:
        """The step size of averaging public copies, which may be old; None where the method keeps none."""
        return None

    def solver(self, asked: Solver) -> Solver:
        """How a peer trains, where the method has its own way."""
        return asked

    def traffic(self, peers: int, edges: float) -> tuple[float, int]:
        """Messages of all peers in a round, and rows of the server, for `edges` directed edges."""
        return edges, 0

    def observe(self, state: Any) -> dict[str, Tensor]:
        """Values (p,) of the peers, for peers.csv; those behind `columns` among them."""
        return {}

    def notes(self, smallest: float) -> tuple[str, ...]:
        """What to warn of before a run on a mixing matrix whose smallest eigenvalue is `smallest`."""
        return ()
