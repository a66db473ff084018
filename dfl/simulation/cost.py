"""The cost of a run, computed without training: bytes of a round, and memory of the state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.comm.exchange import Net
from dfl.comm.schedule import examples
from dfl.simulation.run_state import tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms import Method
    from dfl.comm.network import Network
    from dfl.models.parameter_layout import ParameterLayout
else:
    from dfl.core.lazy import torch


def payload_per_round(
    algorithm: Method, network: Network, shared: int, dtype: torch.dtype
) -> float:
    """Return the bytes that all peers and the server send in a round, the mean over the graphs
    and rounds.

    Args:
        algorithm: the method.
        network: the graphs and the compressor.
        shared: coordinates of a message.
        dtype: of the parameters.
    """
    compressor = network.threat_model.compressor

    def size(coordinates: int) -> float:
        """Return the bytes of a message, the mean over the rounds of a period."""
        lengths = algorithm.lengths(coordinates, network.shapes)
        blanks = [torch.zeros(1, n, dtype=dtype) for n in lengths]
        return sum(compressor.encode(blank, _no_bits).shape[1] for blank in blanks) / len(blanks)

    graphs = examples(network.schedule.weights)
    edges = [int(np.count_nonzero(m.data)) - int(np.count_nonzero(m.diagonal())) for m in graphs]
    parts: list[tuple[float, int]] = [(sum(edges) / max(1, len(edges)), shared)]
    if algorithm.on_every_graph:
        parts = [(n, len(range(k, shared, len(edges)))) for k, n in enumerate(edges)]
    if algorithm.within_clusters:
        parts = [(n, shared) for n in edges]
    peers = network.layout.peers
    rows = algorithm.traffic(peers, 0)[1]
    sent = sum(algorithm.traffic(peers, n)[0] * size(m) for n, m in parts)
    return sent + rows * shared * dtype.itemsize


def parameters_k_plus_m(
    algorithm: Method,
    peers: int,
    parameter_layout: ParameterLayout,
    rounds: tuple[int, int],
) -> int:
    """Return the parameters that a server and K peers send in all, as Table 1 of LG-FedAvg counts:
    the server sends to all K peers, and m of them send to it.

    Args:
        algorithm: a method with a server.
        peers: K.
        parameter_layout: the numbers of all and of shared parameters.
        rounds: the rounds that share all parameters, and those that share a part.
    """
    first, then = rounds
    answers, _ = algorithm.traffic(peers, 0)
    whole = parameter_layout.all_shared.shared
    return int(peers + answers) * (first * whole + then * parameter_layout.shared)


def rows_of_state(algorithm: Method, network: Network, shared: int) -> float:
    """Return the rows of m numbers that a peer remembers besides its model, the mean over this
    rank's peers.

    Args:
        algorithm: the method.
        network: the network.
        shared: m.
    """
    rows = len(network.traffic.payload)
    if not rows * shared:
        return 0.0
    state = blank_state(algorithm, network, torch.empty(rows, shared, device="meta"))
    numbers = sum(math.prod(v.shape) for v in tensors(state).values() if v.dim() > 1)
    return numbers / (rows * shared) - 1


def memory_of_state(
    algorithm: Method,
    network: Network,
    models: tuple[int, ParameterLayout],
    dtype: torch.dtype,
) -> int:
    """Return the bytes of a method's state, found on tensors without storage where it can be.

    Args:
        algorithm: the method.
        network: the network.
        models: p, and the layout of their parameters.
        dtype: of the parameters.
    """
    p, parameter_layout = models
    shared = parameter_layout.shared
    x = torch.empty(1 if algorithm.has_server else p, shared, dtype=dtype, device="meta")
    state = tensors(blank_state(algorithm, network, x)).values()
    personal = p * (parameter_layout.d - shared) * dtype.itemsize
    return personal + sum(math.prod(v.shape) * v.element_size() for v in state)


def blank_state(algorithm: Method, network: Network, x: Tensor) -> Any:
    """Return the state before round 0 of models without values; of zeros for a method that reads
    them.

    Args:
        algorithm: the method.
        network: the network.
        x: (p, m), or (1, m) of a server, on the device meta.
    """
    try:
        return algorithm.init(x, x, Net(network, 0))
    except Exception:  # as of x.norm().item()
        zeros = torch.zeros(x.shape, dtype=x.dtype)
        return algorithm.init(zeros, zeros, Net(network, 0))


def _no_bits(rows: slice, places: slice) -> Tensor:
    return torch.zeros(rows.stop - rows.start, places.stop - places.start, dtype=torch.int32)
