"""What will a run cost: bytes said in a round, and memory for a method's state? Answered without training."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from dfl.net import Net

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms import Algorithm
    from dfl.network import Network
else:
    from dfl.lazy import torch


def payload_per_round(algorithm: Algorithm, network: Network, d: int, dtype: torch.dtype) -> float:
    """Bytes that all peers, and a server, say in a round, the mean over the sequence of graphs."""
    word = network.speech.compressor.encode(torch.zeros(1, d, dtype=dtype), _no_bits)
    edges = sum(int(np.count_nonzero(m.data)) - int(np.count_nonzero(m.diagonal())) for m in network.weights)
    messages, rows = algorithm.traffic(network.layout.peers, edges / max(1, len(network.weights)))
    return messages * word.shape[1] + rows * d * dtype.itemsize


def memory_of_state(algorithm: Algorithm, network: Network, x: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes of a method's state for (p, d) models, found by starting it on tensors without storage."""
    empty = torch.empty(x, dtype=dtype, device="meta")
    state = algorithm.init(empty[:1] if algorithm.serves else empty, empty, Net(network, 0))
    values = (getattr(state, each.name) for each in fields(state))
    return sum(math.prod(v.shape) * v.element_size() for v in values if isinstance(v, torch.Tensor))


def _no_bits(rows: slice, places: slice) -> Tensor:
    return torch.zeros(rows.stop - rows.start, places.stop - places.start, dtype=torch.int32)
