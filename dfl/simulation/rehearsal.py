"""Rehearsals of the exchange before round 0: the error of messages, and the growth of disagreement.

Errors of the compressor are measured on normal numbers. Where public copies are kept, and faults,
the graph or coarse messages may make them old, averaging is rehearsed without training, with the
compressor of the run, to see whether consensus distance still shrinks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dfl.algorithms.replicas import average_replicas, initial_replicas
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.schedule import MixingMatrices
from dfl.comm.threat_model import ThreatModel
from dfl.compression import Exact, fitted
from dfl.config import Run
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.forms import called, require_form
from dfl.core.isolation import isolated
from dfl.core.layout import Layout

if TYPE_CHECKING:
    import torch

    from dfl.simulation.components import Components
else:
    from dfl.core.lazy import torch

ROUNDS = 200
"""Most rounds of averaging that are rehearsed."""
WORK = 2**21
"""Most coordinates of messages in a rehearsal, beyond its first 20 rounds."""
COORDINATES = (64, 512)
"""Fewest and most coordinates of compressed messages in a rehearsal."""
MESSAGE = 4096
"""Coordinates of the one message whose compression error is measured."""
DRAWS = 8
"""How often it is sent, with other random numbers."""
COARSE = 0.05
"""Squared error of a message, relative to it, from which averaging is rehearsed on any graph."""
BIASED = 0.25
"""Squared error of the mean of messages, relative to them, from which on a run is warned."""


def check_copies(
    run: Run,
    components: Components,
    matrices: MixingMatrices,
    lossy: bool,
    error: float,
) -> tuple[str, ...]:
    """Return warnings where public copies do not move in every round, or by coarse messages.

    Args:
        run: the settled run.
        components: its components.
        matrices: the mixing matrices.
        lossy: whether faults take messages away.
        error: the relative squared error of a message.

    Raises:
        InputError: the mixing matrices have no form in which copies are kept per edge.
    """
    assert run.peers is not None
    algorithm, weights = components.algorithm, matrices.sample
    if run.peers == 1 or not weights or algorithm.averaging_step is None:
        return ()
    per_edge = lossy or len(weights) > 1
    reversible = all(pi is not None for pi in matrices.stationary[: len(weights)])
    if not per_edge and (error < COARSE or not reversible):
        return ()
    if not reversible:
        raise InputError(
            f"--topology {run.topology} with --algorithm {run.algorithm}: in some round no way "
            "leads back over an edge, so that no average of all peers is kept, which copies per "
            "edge need: choose --algorithm dfedavgm"
        )
    exact = isinstance(components.compressor, Exact)
    if exact and not lossy:
        return ()
    messages = max(1, max(matrix.nnz for matrix in weights))
    fewest, most = COORDINATES
    coordinates = 1 if exact else min(max(fewest, WORK // (ROUNDS * messages)), most)
    rounds = min(run.rounds, ROUNDS, 20 + WORK // (messages * coordinates))
    network = Network(
        Layout(run.peers, 1),
        matrices,
        World(),
        ThreatModel(components.compressor, faults=components.faults),
        run.seed,
        shapes=((8, coordinates // 8),),
    )
    with isolated(run.threads):
        growth = _growth(network, algorithm.averaging_step, rounds, coordinates) if rounds else 0.0
    if growth < 2:
        return ()
    causes = [f"--faults {run.faults}"] * lossy
    causes += [f"--topology {run.topology}"] * (per_edge and not lossy)
    causes += [f"--compressor {run.compressor}"] * (not exact)
    return (
        f"with {' and '.join(causes)} peers average copies so old that consensus distance, without "
        f"training, grows {growth:.2g}-fold in {rounds} rounds: choose a gamma below "
        f"{algorithm.averaging_step:g}, "
        f"{'' if exact else 'finer messages, '}or --algorithm dfedavgm",
    )


def check_compressor(
    run: Run, components: Components, error: float, bias: float
) -> tuple[str, ...]:
    """Return warnings of errors of messages that grow as copies feed them back, or that stay as
    nothing does.
    """
    if components.algorithm.averaging_step is None:
        if bias < BIASED:
            return ()
        known = type(components.algorithm).__module__.startswith("dfl.")
        return (
            f"messages of --compressor {run.compressor} are biased (their mean differs from normal "
            f"numbers by {math.sqrt(bias):.2g} of their norm), and --algorithm {run.algorithm} "
            + (
                "feeds no errors back: models may stay away from the optimum"
                if known
                else "states no `averaging_step`: unless it feeds errors back, models may stay "
                "away from the optimum"
            )
            + "; choose finer messages or an unbiased compressor",
        )
    if error < 1:
        return ()
    return (
        f"messages of --compressor {run.compressor} do not contract (their squared error on normal "
        f"numbers is {error:.2g} times the numbers'), and the copies feed it back: consensus "
        "distance may grow; choose more bits, a smaller block or rounding=auto",
    )


def compression_error(run: Run, components: Components) -> tuple[float, float]:
    """Return ||Q(x) - x||^2 / ||x||^2 and ||E Q(x) - x||^2 / ||x||^2 of normal numbers x.

    The first is that of one message. The second is estimated without bias, by products of errors
    of several messages.

    Raises:
        InputError: the compressor returns no bytes (q, B), or decodes them to something else than
            the messages (q, m).
    """
    generator = randomness.generator(run.seed, "rehearsed message")
    message = torch.from_numpy(generator.standard_normal((1, MESSAGE), np.float32))
    side = math.isqrt(MESSAGE)
    compressor = fitted(components.compressor, ((side, side),))
    draw = randomness.draws(run.seed, "rehearsed rounding", range(DRAWS))
    name, messages = f"--compressor {run.compressor}", message.expand(DRAWS, -1).contiguous()
    encoded = called(name, lambda: compressor.encode(messages, draw))
    what = f"{name}: {DRAWS} encoded messages"
    require_form(what, encoded, torch.Tensor, (DRAWS, "B"), torch.uint8)
    decoded = called(name, lambda: compressor.decode(encoded, MESSAGE, message.dtype))
    what = f"{name}: {DRAWS} decoded messages"
    require_form(what, decoded, torch.Tensor, (DRAWS, MESSAGE), message.dtype)
    errors = decoded - message
    squares = float(errors.square().sum())
    products = float(errors.sum(0).square().sum()) - squares
    norm = float(message.square().sum())
    return float(errors[0].square().sum()) / norm, products / (DRAWS * (DRAWS - 1)) / norm


def _growth(network: Network, step: float, rounds: int, coordinates: int) -> float:
    """Return the growth of consensus distance without training: its maximum over the last tenth of
    the rounds.

    Peers start from random models of so many coordinates, with public copies of zeros. The error of
    a compressor is proportional to the message, so the growth does not depend on the size of the
    differences.
    """
    start = randomness.generator(network.seed, "rehearsal").standard_normal(
        (network.layout.peers, coordinates)
    )
    x = torch.from_numpy(start)
    state = initial_replicas(x, torch.zeros_like(x), Net(network, 0))
    spread = [float(x.std(0).square().mean())]
    for t in range(rounds):
        state = average_replicas(state, state.x.clone(), Net(network, t, measured=False), step)
        spread.append(float(state.x.std(0).square().mean()))
    return math.sqrt(max(spread[-(1 + rounds // 10) :]) / spread[0])
