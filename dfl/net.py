"""How do words travel? `share` speaks to neighbours; all that happens to a message happens in it.

A message is encoded, counted, sent and decoded here, in that order. What a method remembers about its messages
lives in the method's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_array

from dfl import keys
from dfl.layout import Layout
from dfl.plan import EdgePlan, PeerPlan, Union, edge_plan, peer_plan

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.compressors import Compressor
    from dfl.mpi import World
else:
    from dfl.lazy import torch


@dataclass(frozen=True)
class Heard:
    """What one `share` brought.

    Attributes:
        said: the words before they were encoded: (p, m), or (a, m) over the a edges that speak.
        own: the same words as those who hear them decode them.
        words: (q, m) what was heard: this rank's words, then those from elsewhere; or a row per edge heard.
        weights: (p, q) rows of W on `words`; empty for words over edges, which the method weighs itself.
    """

    said: Tensor
    own: Tensor
    words: Tensor
    weights: csr_array | None = None

    def average(self) -> Tensor:
        """sum_j w_ij word_j over the closed neighbourhood, (p, m), added up in ascending peer id."""
        return weigh(self.weights, self.words)

    @cached_property
    def error(self) -> Tensor:
        """||Q(x) - x||^2 / ||x||^2 of every word said here, float64; 0 for a word of zeros."""
        lost, whole = (_squares(words) for words in (self.own - self.said, self.said))
        return torch.from_numpy(lost / np.maximum(whole, 1e-300))


class Network:
    """A sequence of mixing matrices, a compressor, and two counts of bytes.

    Attributes:
        payload: (p,) int64, bytes that each of this rank's peers has sent over its edges, whatever the ranks.
        wire: bytes that this rank has handed to MPI.
    """

    def __init__(self, weights: Sequence[csr_array], world: World, compressor: Compressor, seed: int) -> None:
        self.weights, self.world, self.compressor, self.seed = weights, world, compressor, seed
        self.layout = Layout(weights[0].shape[0], world.size)
        self.payload = np.zeros(len(self.layout.block(world.rank)), np.int64)
        self.wire = 0
        self._links: dict[int, Any] = {}

    @cached_property
    def union(self) -> Union:
        """Every edge that any round uses."""
        return Union.of(self.weights, self.layout, self.world.rank)

    def at(self, t: int) -> Net:
        """The network as a method sees it in round t."""
        return Net(self, t)

    def peer_plan(self, t: int) -> PeerPlan:
        """The plan of round t for one word per peer."""
        return self._peer_plans[t % len(self.weights)]

    def edge_plan(self, t: int) -> EdgePlan:
        """The plan of round t for one word per edge."""
        return self._edge_plans[t % len(self.weights)]

    def link(self, plan: PeerPlan | EdgePlan) -> Any:
        """What joins the ranks of a plan, made at its first use."""
        if id(plan) not in self._links:
            self._links[id(plan)] = self.world.link(plan.sends, plan.receives)
        return self._links[id(plan)]

    def close(self) -> None:
        """Give the links between ranks back to MPI, on every rank at a time."""
        for link in self._links.values():
            if link is not None:
                link.Free()
        self._links.clear()

    @cached_property
    def _peer_plans(self) -> list[PeerPlan]:
        return [peer_plan(matrix, self.layout, self.world.rank) for matrix in self.weights]

    @cached_property
    def _edge_plans(self) -> list[EdgePlan]:
        return [edge_plan(matrix, self.layout, self.world.rank, self.union) for matrix in self.weights]


@dataclass(frozen=True)
class Net:
    """The network in round t."""

    network: Network
    t: int

    @property
    def fixed(self) -> bool:
        """Whether every round has the same graph."""
        return len(self.network.weights) == 1

    @property
    def union(self) -> Union:
        """Every edge that any round uses, which is what memory per edge is sorted by."""
        return self.network.union

    @property
    def edges(self) -> EdgePlan:
        """The edges that speak in this round."""
        return self.network.edge_plan(self.t)

    def pull(self, heard: Tensor) -> Tensor:
        """sum_j w_ij y_(j->i) over the edges that speak to peer i in this round; heard is (e', m), the sum (p, m)."""
        return weigh(self.edges.pull, heard)

    def push(self, said: Tensor) -> Tensor:
        """sum_k w_ki y_(i->k) over the edges that peer i speaks on in this round; said is (e, m), the sum (p, m)."""
        return weigh(self.edges.push, said)

    def share(self, words: Tensor, edges: EdgePlan | None = None, slot: str = "x") -> Heard:
        """Say something to the neighbours of this round and hear what they say.

        Args:
            words: (p, m), one row per peer of this rank; or (a, m), one row per edge that speaks.
            edges: `net.edges` where there is a row per edge.
            slot: names this share where a round has several; it is part of every random address.
        """
        network = self.network
        plan = edges or network.peer_plan(self.t)
        kind = "edges" if edges else "peers"

        def draw(rows: slice, places: slice) -> Tensor:
            n = places.stop - places.start
            return keys.bits(network.seed, f"quantize {kind}", plan.ids[rows], self.t, slot, n=n, start=places.start)

        messages = network.compressor.encode(words, draw)
        network.payload += plan.copies * messages.shape[1]
        leaving = messages[plan.send].numpy()
        network.wire += leaving.nbytes
        arriving = torch.from_numpy(network.world.exchange(network.link(plan), leaving, plan.sends, plan.receives))
        own = network.compressor.decode(messages, words.shape[1], words.dtype)
        heard = own
        if len(arriving):
            heard = torch.cat([own, network.compressor.decode(arriving, words.shape[1], words.dtype)])
        if isinstance(plan, EdgePlan):
            return Heard(words, own, heard[plan.arrange])
        return Heard(words, own, heard, plan.weights)


def _squares(words: Tensor) -> NDArray[np.float64]:
    """||word||^2 of every row, by numpy: torch splits a lone row among its threads, and rounds otherwise."""
    values: NDArray[np.float64] = np.square(words.numpy(), dtype=np.float64).sum(1)
    return values


def weigh(weights: csr_array, rows: Tensor) -> Tensor:
    """Weights (p, q) times rows (q, m), each row of the result added up in the order of its stored weights."""
    values = rows.numpy()
    # Not weights.astype(…): scipy sorts the columns there, and the order of a sum would depend on the ranks.
    parts = (weights.data.astype(values.dtype), weights.indices, weights.indptr)
    return torch.from_numpy(csr_array(parts, shape=weights.shape) @ values)
