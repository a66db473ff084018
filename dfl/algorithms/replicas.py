"""Public copies of models that neighbours replicate, averaged with the errors of messages fed back.

CHOCO-SGD and quantized DFedAvgM exchange by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dfl.core.rows import rows_at, slices

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms.protocols import Net
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """The models, and the errors of the messages.

    Attributes:
        x: (p, m), the models.
        error: (p,) float64, ||Q(q) - q||^2 / ||q||^2 of the last message q, the worst of a peer's
            edges; NaN in rounds that are not measured.
    """

    x: Tensor
    error: Tensor


@dataclass(frozen=True)
class Replicas(State):
    """The same, and the public copies of the models that neighbours hold as well.

    Attributes:
        sent: copies of this rank's peers: y_i (p, m), or y_(i->k) per outgoing edge (e, m).
        received: of the copies of the neighbours, sum_j w_ij y_j (p, m) on a graph that does not
            change; else y_(j->i) per incoming edge (e', m).
    """

    sent: Tensor
    received: Tensor


def initial_replicas(x: Tensor, copies: Tensor, net: Net) -> Replicas:
    """Return models x (p, m) with public copies (p, m), per edge where the graph is not fixed."""
    error = torch.zeros(len(x), dtype=torch.float64)
    if net.fixed:
        return Replicas(x, error, copies, copies)
    sent, received = (rows_at(copies, at) for at in (net.union.out_owner, net.union.into_owner))
    return Replicas(x, error, sent, received)


def average_replicas(state: Replicas, z: Tensor, net: Net, gamma: float) -> Replicas:
    """Return the state after peers at z (p, m) send differences to their copies and average these.

        q_i = Q(z_i - y_i),   y_i <- y_i + q_i,   x_i <- z_i + γ (sum_j w_ij y_j - y_i)

    Each peer adds up sum_j w_ij y_j over the rounds, and the rounding errors of these sums stay:
    the mean moves by some γ ε max|y| a round, where ε is the precision of the floats.

    z may be overwritten.

    On a time-varying graph, or with link or peer faults, copies are kept per directed edge and
    change only when that edge delivers its message:

        x_i <- z_i + γ (sum_j w_ij y_(j->i) - sum_k v_ik y_(i->k))   over j, k != i
        v_ik = w_ki π_k / π_i   with   π W = π

    v is W reversed in time: w_ki where W is doubly stochastic, and w_ik for every mixing rule on an
    undirected graph. A round without π > 0 is refused: no v has both properties there, since
    together they imply π W = π.

    - sum_k v_ik = sum_j w_ij = 1 - w_ii, so consensus is a fixed point, and if no message is lost
      this is the first form, for any W.
    - π_i v_ik = π_k w_ki, so edge i -> k adds to sum_i π_i x_i at one end what it subtracts at the
      other: that sum equals the one of the z_i, for any losses and any Q. It is the mean where W is
      doubly stochastic. It is not preserved where a directed graph loses peers
      (`FaultEffects.on_edges`).
    """
    return _per_peer(state, z, net, gamma) if net.fixed else _per_edge(state, z, net, gamma)


def _per_peer(state: Replicas, z: Tensor, net: Net, gamma: float) -> Replicas:
    # In place: z and what an exchange returned belong to the method, and another row costs memory.
    received = net.exchange(z - state.sent)
    mean = received.average().add_(state.received)  # sum_j w_ij y_j
    y = received.own.add_(state.sent)  # y_i <- y_i + q_i
    x = _moved(z, gamma, mean, y)  # x_i <- z_i + γ (sum_j w_ij y_j - y_i)
    return Replicas(x, received.error, y, mean)


def _moved(z: Tensor, gamma: float, mean: Tensor, y: Tensor) -> Tensor:
    """Return z + γ (mean - y), (p, m), in the memory of z."""
    for some in slices(z):
        z[some] += (mean[some] - y[some]).mul_(gamma)
    return z


def _per_edge(state: Replicas, z: Tensor, net: Net, gamma: float) -> Replicas:
    edges = net.edges
    messages = rows_at(z, edges.owner) - rows_at(state.sent, edges.out)
    received = net.exchange(messages, per_edge=True)
    out, into = (torch.from_numpy(places).to(z.device) for places in (edges.out, edges.into))
    sent = state.sent.index_add(0, out, received.own)
    copies = state.received.index_add(0, into, received.messages)
    x = z + gamma * (net.pull(copies) - net.push(sent))
    return Replicas(x, received.error, sent, copies)
