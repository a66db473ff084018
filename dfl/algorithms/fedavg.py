"""FedAvg: a server sends its model to some peers, who train, and adds up what they learned (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dfl import keys
from dfl.algorithms import Algorithm, algorithm
from dfl.errors import InputError
from dfl.local import sgd

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.layout import Group
    from dfl.net import Net
    from dfl.task import Task
else:
    from dfl.lazy import torch


@dataclass(frozen=True)
class State:
    """What the server has, the same on every rank.

    Attributes:
        x: (1, d), its model w.
        v: (1, d), its velocity.
        scores: (p,), what its rule thought of this rank's peers in the last round; NaN where it thought nothing.
    """

    x: Tensor
    v: Tensor
    scores: Tensor


@algorithm("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """Federated averaging (McMahan et al. 2017, Algorithm 1, with erratum 4), for C = 1, and B and E as the run says.

        S_t = max(round(C P), 1) peers (halves to even),   z_k = local steps from w for k in S_t
        v <- β v + sum_{k in S_t} n_k (z_k - w) / sum_{k in S_t} n_k,   w <- w + η_s v

    An aggregator other than the mean takes the place of the sum. With β > 0 it is FedAvgM (Hsu, Qi, Brown 2019).

    Attributes:
        fraction: C, the share of the peers that take part in a round, drawn for every round.
        weighting: examples, n_k as above; or uniform, every peer of S_t alike.
        server_lr: η_s.
        server_momentum: β, in [0, 1).
        stragglers: share of S_t that is too slow for the round, drawn with it; one peer at least is not.
        late: drop, what stragglers learned is not waited for; or fewer, they train for fewer epochs, or steps where the
            run counts steps, as many as a uniform draw from 1 to what the run says (Li et al. 2020, section 5.2); so of
            one epoch they do all.
    """

    fraction: float = 1.0
    weighting: str = "examples"
    server_lr: float = 1.0
    server_momentum: float = 0.0
    stragglers: float = 0.0
    late: str = "drop"

    serves: ClassVar[bool] = True
    gossips: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ("compressor", "aggregator")

    def __post_init__(self) -> None:
        for name, good, accepted in (
            ("fraction", 0 <= self.fraction <= 1, "from 0 to 1"),
            ("weighting", self.weighting in ("examples", "uniform"), "examples or uniform"),
            ("server_lr", self.server_lr > 0, "positive"),
            ("server_momentum", 0 <= self.server_momentum < 1, "at least 0 and below 1"),
            ("stragglers", 0 <= self.stragglers < 1, "at least 0 and below 1"),
            ("late", self.late in ("drop", "fewer"), "drop or fewer"),
        ):
            if not good:
                raise InputError(
                    f"--algorithm {type(self).__name__.lower()}: {name} must be {accepted}, not {getattr(self, name)!r}"
                )

    def init(self, x: Tensor, known: Tensor, net: Net) -> State:
        """Start at x."""
        return State(x, torch.zeros_like(x), torch.full((net.hosted,), float("nan"), dtype=torch.float64))

    def round(self, state: State, task: Task, net: Net, t: int) -> State:
        """Send the model out, let some peers train, and follow what they learned."""
        chosen, group, work = self._draw(task, net, t)
        w, own = net.tell(state.x, chosen), task.only(group.here, work)
        z = sgd(w.expand(len(group.here), -1), own, t)
        counts = own.train.sizes if self.weighting == "examples" else np.ones(len(z))
        heard = net.collect(z - w, group, counts, self.trusted(state, task, net, t))
        v = self.server_momentum * state.v + heard.row
        return State(w + self.server_lr * v, v, heard.scores)

    def trusted(self, state: State, task: Task, net: Net, t: int) -> Tensor:
        """The step (1, d) that the server would take if it heard nothing: its last one, at first none."""
        return state.v

    def traffic(self, peers: int, edges: float) -> tuple[float, int]:
        """One message from everyone who is on time, one row to everyone who is chosen."""
        m, slow = self._sizes(peers)
        return m - slow * (self.late == "drop"), m

    def _sizes(self, peers: int) -> tuple[int, int]:
        """How many of the peers are chosen, and how many of these are slow."""
        m = max(round(self.fraction * peers), 1)
        return m, min(round(self.stragglers * m), m - 1)

    def _draw(self, task: Task, net: Net, t: int) -> tuple[Group, Group, NDArray[np.int64] | None]:
        """Who is sent the model, who says something, and how long each of them that is here trains, if not as asked."""
        m, slow = self._sizes(net.peers)
        order = keys.generator(task.seed, "clients", t).permutation(net.peers)
        chosen = net.group(order[:m])
        if self.late == "drop" or not slow:
            return chosen, net.group(order[slow:m]), None
        most = int(np.max(task.solver.steps) or np.max(task.solver.epochs))
        work = np.full(net.peers, most)
        work[order[:slow]] = keys.generator(task.seed, "stragglers", t).integers(1, most + 1, slow)
        return chosen, chosen, work[task.peers[chosen.here]]
