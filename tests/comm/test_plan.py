"""Exchange plans bring every message to its receivers for any layout of peers on ranks.

The ranks are computed one after another here, without MPI.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.comm.plan import Arcs, EdgePlan, PeerPlan, Union, edge_plan, peer_plan
from dfl.core.layout import BLOCK, Layout, blocks, columns

Floats = NDArray[np.float64]


@st.composite
def matrices(draw: st.DrawFn) -> csr_array:
    """Draw weights (P, P), neither symmetric nor connected; some rows have no diagonal."""
    peers = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    used = rng.random((peers, peers)) < draw(st.floats(0.05, 0.9))
    return csr_array(np.where(used, rng.random((peers, peers)), 0.0))


@st.composite
def layouts(draw: st.DrawFn, peers: int) -> Layout:
    """Draw a layout of peers on up to 16 ranks, which are consecutive or at random places."""
    ranks, order = draw(st.integers(1, 16)), None
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        parts = np.split(rng.permutation(peers), Layout(peers, ranks).starts[1:-1])
        order = np.concatenate([np.sort(part) for part in parts])
    return Layout(peers, ranks, order)


def route(plans: list[PeerPlan] | list[EdgePlan], sent: list[Floats]) -> list[Floats]:
    """Return what every rank receives, as MPI moves the sends and receives of all plans."""
    leaving = [rows[plan.send] for plan, rows in zip(plans, sent, strict=True)]
    parcels: dict[tuple[int, int], Floats] = {}
    for rank, (plan, rows) in enumerate(zip(plans, leaving, strict=True)):
        ends = np.cumsum([0, *plan.sends.values()])
        parcels |= {
            (rank, to): rows[a:b] for to, (a, b) in zip(plan.sends, pairwise(ends), strict=True)
        }
    assert {pair: len(rows) for pair, rows in parcels.items()} == {
        (source, rank): n for rank, plan in enumerate(plans) for source, n in plan.receives.items()
    }
    empty = sent[0][:0]
    return [
        np.concatenate([empty, *(parcels[s, rank] for s in plan.receives)])
        for rank, plan in enumerate(plans)
    ]


@settings(max_examples=60, deadline=None)
@given(matrices(), st.data())
def test_weights_times_received_messages_is_the_mixing_matrix_times_all(
    matrix: csr_array, data: st.DataObject
) -> None:
    layout = data.draw(layouts(matrix.shape[0]))
    plans = [peer_plan(matrix, layout, rank) for rank in range(layout.ranks)]
    x = np.random.default_rng(1).normal(size=(layout.peers, 3))
    sent = [x[layout.hosted(r)] for r in range(layout.ranks)]
    received = route(plans, sent)
    got = []
    for plan, own, far in zip(plans, sent, received, strict=True):
        rows = np.concatenate([far[: plan.before], own, far[plan.before :]])
        np.testing.assert_array_equal(rows, x[plan.senders])
        got.append(plan.near @ rows)
        sums = pairwise(plan.near.indptr)
        assert all((np.diff(plan.senders[plan.near.indices[a:b]]) > 0).all() for a, b in sums)
    np.testing.assert_allclose(layout.ascending(np.concatenate(got)), matrix @ x, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(matrices(), matrices(), st.data())
def test_every_edge_carries_its_own_message(
    first: csr_array, second: csr_array, data: st.DataObject
) -> None:
    """On two graphs in turn, j's message to i arrives at i, with the weight of the round."""
    peers = min(first.shape[0], second.shape[0])
    sequence = [csr_array(m.toarray()[:peers, :peers]) for m in (first, second)]
    layout = data.draw(layouts(peers))
    ranks = layout.ranks
    unions = [Union.of(sequence, layout, r) for r in range(ranks)]
    for matrix in sequence:
        plans = [edge_plan(matrix, layout, r, unions[r], np.ones(peers)) for r in range(ranks)]
        sent = [plan.ids[:, None].astype(float) for plan in plans]  # an edge sends its number
        weights = matrix.toarray() * (1 - np.eye(peers))
        names = np.arange(peers)[None, :] * peers + np.arange(peers)[:, None]  # [i, j] = j * P + i
        for r, (plan, far) in enumerate(zip(plans, route(plans, sent), strict=True)):
            mine = layout.hosted(r)
            received = np.zeros((len(unions[r].into), 1))
            received[plan.into] = np.concatenate([sent[r], far])[plan.arrange]
            np.testing.assert_allclose(
                plan.pull @ received, (weights * names).sum(1, keepdims=True)[mine]
            )
            sent_by_edge = np.zeros((len(unions[r].out), 1))
            sent_by_edge[plan.out] = sent[r]
            assert plan.push is not None
            np.testing.assert_allclose(
                plan.push @ sent_by_edge, (weights * names).sum(0)[mine][:, None]
            )


@settings(max_examples=40, deadline=None)
@given(matrices(), matrices(), st.data())
def test_the_two_ways_of_an_edge_have_the_same_place(
    first: csr_array, second: csr_array, data: st.DataObject
) -> None:
    """Edge j -> i lies among the incoming edges where i -> j lies among the outgoing ones."""
    peers = min(first.shape[0], second.shape[0])
    cut = [m.toarray()[:peers, :peers] for m in (first, second)]
    sequence = [csr_array(m + m.T) for m in cut]
    layout = data.draw(layouts(peers))
    for rank in range(layout.ranks):
        union = Union.of(sequence, layout, rank)
        assert union.out.tolist() == union.into.tolist()
        for matrix in sequence:
            plan = edge_plan(matrix, layout, rank, union)
            assert plan.out.tolist() == plan.into.tolist()
            sender, receiver = np.divmod(plan.received, peers)
            assert (receiver * peers + sender).tolist() == plan.ids.tolist()


@settings(max_examples=40, deadline=None)
@given(matrices(), st.data())
def test_copies_count_the_edges_that_carry_a_row(matrix: csr_array, data: st.DataObject) -> None:
    layout = data.draw(layouts(matrix.shape[0]))
    off = (matrix.toarray() != 0) & ~np.eye(layout.peers, dtype=bool)
    copies = np.concatenate([peer_plan(matrix, layout, r).copies for r in range(layout.ranks)])
    np.testing.assert_array_equal(layout.ascending(copies), off.sum(0))


def test_a_row_crosses_to_a_rank_once() -> None:
    complete = csr_array(np.full((8, 8), 1 / 8))
    plan = peer_plan(complete, Layout(8, 2), 0)
    assert plan.sends == {1: 4}
    assert plan.receives == {1: 4}
    assert sorted(plan.send) == [0, 1, 2, 3]


def test_weights_come_in_ascending_peer_id_on_every_rank() -> None:
    ring = csr_array(np.roll(np.eye(6), 1, axis=1) + np.roll(np.eye(6), -1, axis=1) + np.eye(6))
    layout = Layout(6, 3)
    for rank in range(3):
        plan = peer_plan(ring, layout, rank)
        mine = layout.hosted(rank)
        near = {j % 6 for i in mine for j in (i - 1, i, i + 1)}
        assert plan.senders.tolist() == sorted(near)
        assert plan.senders[plan.before : plan.before + len(mine)].tolist() == list(mine)
        ends = pairwise(plan.near.indptr)
        assert all((np.diff(plan.near.indices[a:b]) > 0).all() for a, b in ends)


def test_arcs_leave_the_diagonal_and_stored_zeros_out() -> None:
    arcs = Arcs.of(csr_array(([0.5, 0.5, 0.0, 1.0], ([0, 0, 1, 1], [0, 1, 0, 1])), shape=(2, 2)))
    assert (arcs.sender.tolist(), arcs.receiver.tolist(), arcs.weight.tolist()) == ([1], [0], [0.5])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.data())
def test_rows_of_a_group_return_to_the_order_of_its_members(
    peers: int, data: st.DataObject
) -> None:
    layout = data.draw(layouts(peers))
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, peers - 1)))), np.int64)
    groups = [layout.group(ids[::-1], rank) for rank in range(layout.ranks)]
    for rank, group in enumerate(groups):
        np.testing.assert_array_equal(layout.hosted(rank)[group.here], group.ids[group.mine])
        assert group.counts == [len(each.here) for each in groups]
    by_rank = np.concatenate([group.ids[group.mine] for group in groups])
    np.testing.assert_array_equal(groups[0].ascending(by_rank), ids)
    everyone = np.concatenate([layout.hosted(rank) for rank in range(layout.ranks)])
    np.testing.assert_array_equal(layout.by_rank(np.arange(peers)), everyone)
    for rank in range(layout.ranks):
        assert (layout.ranks_of(layout.hosted(rank)) == rank).all()


@given(st.integers(1, 200), st.integers(1, 40))
def test_every_peer_is_on_one_rank_and_ranks_are_balanced(peers: int, ranks: int) -> None:
    layout = Layout(peers, ranks)
    blocks_of_ranks = [list(layout.hosted(r)) for r in range(ranks)]
    assert sum(blocks_of_ranks, []) == list(range(peers))  # noqa: RUF017
    assert max(map(len, blocks_of_ranks)) - min(map(len, blocks_of_ranks)) <= 1
    ranks_of_peers = layout.ranks_of(np.arange(peers)).tolist()
    assert all(i in blocks_of_ranks[rank] for i, rank in enumerate(ranks_of_peers))


@pytest.mark.parametrize("d", [1, BLOCK - 1, BLOCK, BLOCK + 1, 199_210])
@pytest.mark.parametrize("ranks", [1, 2, 3, 16, 60])
def test_columns_of_a_rank_are_whole_blocks(d: int, ranks: int) -> None:
    cut = columns(d, ranks)
    assert [c for part in cut for c in part] == list(range(d))
    assert all(part.start % BLOCK == 0 for part in cut if len(part))
    assert [b for part in cut for b in blocks(len(part))] or d == 0
    assert sum(b.stop - b.start for b in blocks(d)) == d
