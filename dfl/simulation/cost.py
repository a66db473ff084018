"""The cost of a run, computed without training: bytes of a round, and memory of the state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.comm.exchange import Net
from dfl.core.errors import InputError, in_one_line
from dfl.simulation.run_state import tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms import Method, State
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

    graphs = network.schedule.matrices.sample
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


def numbers_of_state(state: State) -> tuple[int, int]:
    """Return the numbers of a state that are in rows, and those of its models."""
    numbers = sum(math.prod(v.shape) for v in tensors(state).values() if v.dim() > 1)
    return numbers, math.prod(state.x.shape)


def memory_of_state(state: State, p: int, parameter_layout: ParameterLayout) -> int:
    """Return the bytes of a method's state and of the personal parameters.

    Args:
        state: with values or without.
        p: the peers.
        parameter_layout: of their models.
    """
    personal = p * (parameter_layout.d - parameter_layout.shared) * state.x.dtype.itemsize
    held = tensors(state).values()
    return personal + sum(math.prod(v.shape) * v.element_size() for v in held)


def blank_models(algorithm: Method, network: Network, shared: int, dtype: torch.dtype) -> Tensor:
    """Return models without values, (p, m); (1, m) of a server."""
    rows = 1 if algorithm.has_server else len(network.traffic.payload)
    return torch.empty(rows, shared, dtype=dtype, device="meta")


def blank_state(algorithm: Method, network: Network, x: Tensor) -> Any:
    """Return the state before round 0 of models without values; of zeros for a method that reads
    them.

    Args:
        algorithm: the method.
        network: the network.
        x: as `blank_models` returns them.

    Raises:
        InputError: the method fails, or sends messages.
    """
    try:
        state = algorithm.init(x, x, Net(network, 0))
    except Exception:  # as of x.norm().item()
        zeros = torch.zeros(x.shape, dtype=x.dtype)
        with in_one_line("--algorithm: init fails"):
            state = algorithm.init(zeros, zeros, Net(network, 0))
    if network.traffic.payload.any():
        raise InputError("--algorithm: init sends messages, which round alone may")
    return state


def _no_bits(rows: slice, places: slice) -> Tensor:
    return torch.zeros(rows.stop - rows.start, places.stop - places.start, dtype=torch.int32)
