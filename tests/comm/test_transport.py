"""Messages: counted to the byte, random by address, decoded alike at both ends."""

from typing import Any

import numpy as np
import pytest
import torch

import dfl
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.weighting import weighted_sum
from dfl.compression import COMPRESSORS
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from tests.support.quadratic import info, quadratic, states


def size(bits: int | None, d: int, block: int = 0) -> int:
    """Return the bytes of a message of d coordinates: packed codes and four bytes per scale."""
    if bits is None:
        return 4 * d
    return -(-bits * d // 8) + 4 * (-(-d // block) if block else 1)


@pytest.mark.parametrize(
    ("bits", "block"), [(None, 0), (1, 256), (2, 256), (3, 256), (4, 0), (7, 0), (8, 0), (16, 0)]
)
@pytest.mark.parametrize(
    ("topology", "edges"), [("ring", 24), ("star", 22), ("complete", 132), ("exponential", 48)]
)
def test_payload_is_messages_times_edges_times_rounds(
    bits: int, block: int, topology: str, edges: int
) -> None:
    rounds = 3
    run = dfl.Run(
        peers=12, topology=topology, bits=bits, rounds=rounds, eval_every=rounds, model="softmax"
    )
    *_, last = dfl.simulate(run)
    assert last["payload_bytes"] == size(bits, 650, block) * edges * rounds
    assert last["wire_bytes"] == 0


@pytest.mark.parametrize("algorithm", ["dfedavgm", "qdfedavgm"])
def test_payload_on_a_changing_graph(algorithm: str) -> None:
    """One edge per peer is used in a round, by a message per edge or per peer."""
    run = dfl.Run(
        peers=8, topology="one_peer_exponential", algorithm=algorithm, rounds=5, model="softmax"
    )
    *_, last = dfl.simulate(run)
    assert last["payload_bytes"] == size(None, 650) * 8 * 5


def test_the_payload_is_the_predicted_one() -> None:
    for topology in ("star", "one_peer_exponential"):
        setting = prepare(dfl.Run(peers=8, topology=topology, bits=3, rounds=3), World())
        predicted = info(setting).payload_shared
        list(states(setting, 3))
        assert setting.network.traffic.payload.sum() == 3 * predicted


def sent(network: Network, t: int, slot: str = "x", **more: Any) -> torch.Tensor:
    messages = torch.linspace(-1, 1, 40).expand(4, -1).contiguous()
    return Net(network, t).exchange(messages, slot=slot, **more).own


@pytest.fixture
def coarse() -> Prepared:
    return prepare(dfl.Run(peers=4, compressor="quantize:bits=4", algorithm="qdfedavgm"), World())


def test_random_bits_depend_on_round_slot_peer_and_seed(coarse: Prepared) -> None:
    network = coarse.network
    once = sent(network, 0)
    assert torch.equal(once, sent(network, 0))
    assert not torch.equal(once, sent(network, 1))
    assert not torch.equal(once, sent(network, 0, slot="second"))
    # Four peers send the same message, each with its own random bits.
    assert len({tuple(row) for row in once.tolist()}) == 4
    other = prepare(
        dfl.Run(peers=4, compressor="quantize:bits=4", algorithm="qdfedavgm", seed=1), World()
    )
    assert not torch.equal(once, sent(other.network, 0))


def test_messages_over_edges_have_their_own_addresses(coarse: Prepared) -> None:
    net = Net(coarse.network, 0)
    messages = torch.linspace(-1, 1, 40).expand(8, -1).contiguous()
    received = net.exchange(messages, per_edge=True)
    assert len({tuple(row) for row in received.own.tolist()}) == 8
    assert received.messages.shape == (8, 40)


def test_the_average_is_of_decoded_messages(coarse: Prepared) -> None:
    messages = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    received = Net(coarse.network, 0).exchange(messages)
    expected = torch.from_numpy(coarse.network.schedule.weights[0].toarray()).float() @ received.own
    assert torch.allclose(received.average(), expected, atol=1e-6)
    lost = (received.own - messages).square().sum(1) / messages.square().sum(1)
    assert torch.allclose(received.error.float(), lost, rtol=1e-5)
    assert (received.error > 0).all()


def test_the_error_of_a_message_of_zeros_is_zero(coarse: Prepared) -> None:
    assert Net(coarse.network, 0).exchange(torch.zeros(4, 9)).error.tolist() == [0.0] * 4


def test_both_ends_hold_the_same_copies() -> None:
    """y_(i->k) is the same bits at both ends after rounds in which not all edges were used."""
    setting = quadratic(topology="one_peer_exponential", bits=2, d=50)
    *_, last = states(setting, 7)
    union = setting.network.schedule.union
    P = setting.layout.peers
    sent = dict(zip(union.out.tolist(), last.sent, strict=True))
    for edge, received in zip(union.into.tolist(), last.received, strict=True):
        receiver, sender = divmod(edge, P)
        assert torch.equal(received, sent[sender * P + receiver])


def test_the_received_row_is_the_weighted_sum_of_the_copies() -> None:
    setting = quadratic(bits=3, d=50)
    *_, last = states(setting, 9)
    around = torch.from_numpy(setting.network.schedule.weights[0].toarray()) @ last.sent
    assert torch.allclose(last.received, around, rtol=0, atol=1e-12)


def test_a_weighted_sum_keeps_the_stored_order() -> None:
    """1e8 + 1 - 1e8 in float32 depends on the order; columns are stored as 2, 0, 1."""
    from scipy.sparse import csr_array

    stored = csr_array((np.ones(3), np.array([2, 0, 1]), np.array([0, 3])), shape=(1, 3))
    rows = torch.tensor([[-1e8], [1.0], [1e8]])
    assert weighted_sum(stored, rows).item() == 1.0
    assert stored.indices.tolist() == [2, 0, 1]


@pytest.mark.parametrize("spec", ["none", "quantize:bits=3", "quantize:bits=8"])
def test_a_rank_without_peers_encodes_no_rows(spec: str) -> None:
    from dfl.core.registry import choose

    compressor = choose("--compressor", spec, COMPRESSORS)()
    none = compressor.encode(torch.zeros(0, 9), lambda *_: torch.zeros(0, 9, dtype=torch.int32))
    one = compressor.encode(torch.ones(1, 9), lambda *_: torch.zeros(1, 9, dtype=torch.int32))
    assert none.dtype == torch.uint8
    assert none.shape == (0, one.shape[1])
    assert compressor.decode(none, 9, torch.float32).shape == (0, 9)
