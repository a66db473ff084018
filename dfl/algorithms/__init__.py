"""The methods, one file each. `ALGORITHMS` is the registry that the command line reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.net import Net
    from dfl.task import Task

ALGORITHMS: dict[str, type[Algorithm]] = {}
"""Name -> frozen dataclass whose fields are the method's options."""

A = TypeVar("A", bound="type[Algorithm]")


class Algorithm(ABC):
    """A method is `init` and `round`; its state is a frozen dataclass of its own, whose `x` (p, d) are the models."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns that the method adds to metrics.csv: the largest value over the peers."""

    @abstractmethod
    def init(self, x: Tensor, known: Tensor, net: Net) -> Any:
        """The state before round 0.

        Args:
            x: (p, d), where each peer starts.
            known: (p, d), what neighbours know of a peer before it has spoken: x where all start at the same
                point, zeros where they do not.
            net: the network of round 0.
        """

    @abstractmethod
    def round(self, state: Any, task: Task, net: Net, t: int) -> Any:
        """The state after round t."""

    def observe(self, state: Any) -> dict[str, Tensor]:
        """The values (p,) behind `columns`."""
        return {}

    def notes(self, smallest: float) -> tuple[str, ...]:
        """What to warn of before a run on a mixing matrix whose smallest eigenvalue is `smallest`."""
        return ()


def algorithm(name: str) -> Callable[[A], A]:
    """Register a method under `name`."""

    def register(method: A) -> A:
        ALGORITHMS[name] = method
        return method

    return register


from dfl.algorithms import dfedavgm, qdfedavgm  # noqa: E402, F401  registers the methods
