"""The task of a rank: the problem of its peers, and the server's own."""

from __future__ import annotations

from dataclasses import dataclass

from dfl.training.problem import Problem


@dataclass(frozen=True)
class Task(Problem):
    """The problem of this rank's peers, and the server's own.

    Attributes:
        server: on rank 0, the server's own problem, where it has examples of its own.
    """

    server: Task | None = None

    @property
    def of_server(self) -> Task:
        """The server's own problem, on rank 0."""
        assert self.server is not None, "the method has named no examples for the server"
        return self.server
