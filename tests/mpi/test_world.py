"""The operations of `dfl.comm.mpi` move the right bytes; run under mpirun on any ranks."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import dfl
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.schedule import MixingMatrices
from dfl.comm.threat_model import ThreatModel
from dfl.comm.transport import RUNS
from dfl.compression import Exact, Quantize
from dfl.core.errors import InputError
from dfl.core.layout import Layout, columns
from dfl.simulation.prepare import prepare
from tests.support.quadratic import states
from tests.support.standin import DEVICE, Standin
from topologies import MIXINGS, TOPOLOGIES, build

pytestmark = pytest.mark.mpi


@pytest.fixture
def world() -> World:
    return World(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.COMM_WORLD)


def test_from_root_returns_the_bytes_of_rank_0_everywhere(world: World) -> None:
    made = world.from_root(lambda: json.dumps({"rank": world.rank, "long": "x" * 100_000}).encode())
    assert json.loads(made) == {"rank": 0, "long": "x" * 100_000}
    assert world.from_root(lambda: b"") == b""


def test_an_error_of_rank_0_is_raised_everywhere(world: World) -> None:
    def refuse() -> bytes:
        raise InputError(f"raised by rank {world.rank}")

    with pytest.raises(InputError, match="raised by rank 0"):
        world.from_root(refuse)


def test_an_error_of_some_ranks_is_raised_everywhere(world: World) -> None:
    first = 1 if world.size > 1 else 0

    def refuse() -> None:
        with world.agreed():
            if world.rank >= first:
                raise InputError(f"é of rank {world.rank}")

    with pytest.raises(InputError, match=f"^é of rank {first}$"):
        refuse()
    with world.agreed():
        ran = True
    assert ran


def test_scatter_returns_each_ranks_own_bytes(world: World) -> None:
    assert world.scatter(lambda rank: b"r" * (rank + 1)) == b"r" * (world.rank + 1)


def test_gather_keeps_the_order_of_ranks(world: World) -> None:
    for p in (0, 1, world.rank, 3):
        mine = np.full((p, 2), world.rank, np.float32)
        whole = world.gather(mine)
        counts = [{0: 0, 1: 1, 3: 3}[p] if p != world.rank else r for r in range(world.size)]
        if p in (0, 1, 3) and p != world.rank and world.rank == 0:
            assert whole is not None
            np.testing.assert_array_equal(whole[:, 0], np.repeat(np.arange(world.size), counts))
        MPI.COMM_WORLD.Barrier()


@pytest.mark.parametrize("shape", [(2,), (0,), (2, 0), ()])
def test_all_gather_keeps_the_order_of_ranks_and_rows_without_numbers(
    world: World, shape: tuple[int, ...]
) -> None:
    mine = np.full((world.rank + 1, *shape), world.rank, np.float32)
    whole = world.all_gather(mine)
    every = [np.full((rank + 1, *shape), rank, np.float32) for rank in range(world.size)]
    np.testing.assert_array_equal(whole, np.concatenate(every))
    assert world.all_gather(mine[:0]).shape == (0, *shape)


@pytest.mark.parametrize(("peers", "d"), [(16, 9000), (7, 100), (33, 4096 * 3), (1, 5)])
def test_columns_are_those_of_all_peers(world: World, peers: int, d: int) -> None:
    layout = Layout(peers, world.size)
    cut = columns(d, world.size)
    whole = np.arange(peers * d, dtype=np.float32).reshape(peers, d)
    mine = layout.hosted(world.rank)
    counts = layout.counts
    got = world.columns(whole[mine], cut, counts)
    here = cut[world.rank]
    np.testing.assert_array_equal(got, whole[:, here.start : here.stop])


def test_minimum_returns_the_smallest_of_each_number(world: World) -> None:
    assert world.minimum(100 - world.rank, world.rank) == (100 - (world.size - 1), 0)


@pytest.mark.parametrize("topology", ["ring", "complete", "star", "exponential"])
@pytest.mark.parametrize("peers", [5, 16, 23])
@pytest.mark.parametrize("runs", [0, RUNS])
def test_neighbours_receive_the_messages_of_the_mixing_matrix(
    world: World, monkeypatch: pytest.MonkeyPatch, topology: str, peers: int, runs: int
) -> None:
    """Put together before they leave, or taken from where they lie."""
    monkeypatch.setattr("dfl.comm.transport.RUNS", runs)
    weights = build(
        TOPOLOGIES[topology], MIXINGS["uniform"], peers, np.random.default_rng(0)
    ).weights
    layout = Layout(peers, world.size)
    network = Network(layout, MixingMatrices(weights), world, ThreatModel(Exact()), 0)
    mine = layout.hosted(world.rank)
    values = torch.from_numpy(mine).double()
    rows = values[:, None].expand(-1, 3).contiguous()
    got = Net(network, 0).exchange(rows).average()
    expected = weights[0][mine] @ np.arange(peers)
    np.testing.assert_allclose(got, np.tile(expected[:, None], 3), atol=1e-9)
    elsewhere = np.setdiff1d(weights[0][mine].nonzero()[1], mine)
    assert network.traffic.wire == 24 * len(elsewhere)


def test_device_memory_is_staged_unless_mpi_reads_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.reads("cpu")
    assert not world.reads("cuda")
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert world.reads("cuda")


def test_ranks_of_one_machine_are_counted(world: World) -> None:
    assert world.local_rank == world.rank


@pytest.mark.parametrize("topology", ["ring", "star", "one_peer_exponential"])
def test_messages_are_staged_from_another_device(world: World, topology: str) -> None:
    """Average and bytes are those of messages in the processor's memory."""
    weights = build(
        TOPOLOGIES[topology], MIXINGS["metropolis"], 7, np.random.default_rng(0)
    ).weights
    layout = Layout(7, world.size)
    mine = layout.hosted(world.rank)
    rows = torch.linspace(-1, 1, 7 * 5).view(7, 5)[mine]
    here, there = (
        Network(layout, MixingMatrices(weights), world, ThreatModel(Quantize(bits=6)), 0)
        for _ in range(2)
    )
    expected = Net(here, 1).exchange(rows).average()
    with Standin() as standin:
        got = Net(there, 1).exchange(rows.to(DEVICE)).average().cpu()
    assert torch.equal(got, expected)
    assert there.traffic.wire == here.traffic.wire
    assert {file for file, _ in standin.moved} <= {"comm/transport.py", "elsewhere"}


def test_mpi_reads_tensors_without_a_copy(world: World) -> None:
    """As it reads device memory: without a copy through numpy."""
    link = world.link({(world.rank + 1) % world.size: 1}, {(world.rank - 1) % world.size: 1})
    sent = torch.full((7,), world.rank, dtype=torch.uint8)
    received = torch.empty(7, dtype=torch.uint8)
    whole = [world.rows_type([range(1)], 7)] * (world.size > 1)
    world.exchange(link, (sent, whole), (received, whole))
    assert world.size == 1 or received.tolist() == [(world.rank - 1) % world.size] * 7


def test_messages_of_another_form_on_one_rank_are_refused_on_all(world: World) -> None:
    """The form of later messages of the same name is not looked at."""
    weights = build(TOPOLOGIES["ring"], MIXINGS["uniform"], 8, np.random.default_rng(0)).weights
    layout = Layout(8, world.size)
    rows = torch.ones(len(layout.hosted(world.rank)), 3)
    net = Net(Network(layout, MixingMatrices(weights), world, ThreatModel(Exact()), 0), 0)
    net.exchange(rows)
    bad = torch.ones(len(rows) + 1, 3) if world.rank == world.size - 1 else rows
    with pytest.raises(InputError, match=r"must be Tensor \(\d+, m\), not Tensor of float32"):
        net.exchange(bad, slot="other")


def test_messages_stay_while_others_arrive(world: World) -> None:
    """Memory is used again only where nothing refers to the messages in it."""
    weights = build(TOPOLOGIES["ring"], MIXINGS["uniform"], 16, np.random.default_rng(0)).weights
    layout = Layout(16, world.size)
    mine = layout.hosted(world.rank)
    net = Net(Network(layout, MixingMatrices(weights), world, ThreatModel(Exact()), 0), 0)
    rows = torch.from_numpy(mine).float()[:, None].expand(-1, 3)
    first = net.exchange(rows.contiguous())
    part = first.far[:, :1]
    place = first.far.data_ptr()
    before = first.far.clone()
    del first
    second = net.exchange(rows + 100)
    assert torch.equal(part, before[:, :1])
    assert torch.equal(second.far, before + 100)
    del part, second
    third = net.exchange(rows + 200)
    assert torch.equal(third.far, before + 200)
    assert world.size == 1 or third.far.data_ptr() == place


class Counting:
    """A communicator that counts the bytes from other ranks, at the calls into mpi4py."""

    def __init__(self, comm: Any, arrived: list[int]) -> None:
        self.comm = comm
        self.arrived = arrived

    def __getattr__(self, name: str) -> object:
        return getattr(self.comm, name)

    def Ineighbor_alltoallw(self, send: object, receive: Any) -> object:  # noqa: N802  as MPI's
        self.arrived[0] += sum(each.size for each in receive[1])
        return self.comm.Ineighbor_alltoallw(send, receive)

    def Iallgatherv(self, send: Any, receive: Any) -> object:  # noqa: N802
        self.arrived[0] += sum(receive[1]) - send[0].size
        return self.comm.Iallgatherv(send, receive)

    def Ialltoallv(self, send: object, receive: Any) -> object:  # noqa: N802
        self.arrived[0] += sum(receive[1]) - receive[1][self.comm.rank]
        return self.comm.Ialltoallv(send, receive)

    def Ibcast(self, buffer: Any, root: int) -> object:  # noqa: N802
        if buffer.dtype == np.uint8 and self.comm.rank != root:  # and not a length
            self.arrived[0] += buffer.size
        return self.comm.Ibcast(buffer, root=root)

    def Create_dist_graph_adjacent(self, *args: object, **more: object) -> object:  # noqa: N802
        return Counting(self.comm.Create_dist_graph_adjacent(*args, **more), self.arrived)


@pytest.mark.parametrize(
    "settings",
    [
        {"topology": "torus", "bits": 3},
        {"topology": "one_peer_exponential", "bits": 3},
        {"algorithm": "choco", "attack": "ipm:peers=2"},
        {"algorithm": "epidemic"},
        {"algorithm": "fedavg:fraction=0.5", "bits": 8},
        {"algorithm": "fedavg", "aggregator": "krum", "attack": "alie:peers=2"},
        {"algorithm": "fltrust"},
        {"algorithm": "pooled"},
        {"algorithm": "local_only"},
    ],
    ids=str,
)
def test_wire_bytes_are_those_that_arrive_from_other_ranks(
    world: World, settings: dict[str, Any]
) -> None:
    arrived = [0]
    counted = World(world.rank, world.size, Counting(world.comm, arrived))
    prepared = prepare(dfl.Run(peers=16, **settings), counted)
    list(states(prepared, 1))  # the first exchange of each slot is checked, which is not counted
    before = arrived[0], prepared.network.traffic.wire
    list(states(prepared, 2))
    assert prepared.network.traffic.wire - before[1] == arrived[0] - before[0]
    moved = world.all_gather(np.array([prepared.network.traffic.wire])).sum()
    assert (moved > 0) == (world.size > 1 and settings.get("algorithm") != "local_only")


def test_wire_bytes_of_fedavg(world: World) -> None:
    """Updates to the ranks that aggregate their coordinates; weights and aggregate to all ranks."""
    prepared = prepare(dfl.Run(peers=5, algorithm="fedavg"), world)
    list(states(prepared, 3))
    d, hosted = 4810, Layout(5, world.size).counts
    cut = [len(part) for part in columns(d, world.size)]
    updates = sum(p * (d - c) for p, c in zip(hosted, cut, strict=True)) * 4
    moved = world.all_gather(np.array([prepared.network.traffic.wire])).sum()
    assert moved == 3 * (updates + (world.size - 1) * (4 * d + 8 * 5))


def test_wire_bytes_of_what_a_server_computes(world: World) -> None:
    """A row, behind one byte by which rank 0 shows that it has no error, to every other rank."""
    prepared = prepare(dfl.Run(peers=5, algorithm="pooled"), world)
    list(states(prepared, 3))
    moved = world.all_gather(np.array([prepared.network.traffic.wire])).sum()
    assert moved == 3 * (world.size - 1) * (4 * 4810 + 1)
