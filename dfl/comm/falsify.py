"""Falsified messages: what attackers send in place of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array, diags_array

from dfl.comm.network import Network
from dfl.core.layout import Group
from dfl.core.rows import rows_at
from dfl.robust.aggregators import Rows, Updates
from dfl.robust.attacks import AttackView

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    Ints = NDArray[np.int64]
else:
    from dfl.core.lazy import torch


def falsified(
    network: Network,
    t: int,
    slot: str,
    messages: Tensor,
    group: Group,
    start: Tensor | None = None,
    reference: Tensor | None = None,
) -> Tensor:
    """Return the messages of a group, (a, m), with those of attackers falsified.

    What attackers learn from others is not counted as payload.

    Args:
        network: has the attack and the attackers.
        t, slot: the round, and the name of the exchange within it.
        messages: (a, m), those of the members on this rank.
        group: the senders, peers or edges; none of a peer that is down.
        start: (a, m), the models from which the peers moved; None where messages are differences.
        reference: (1, m), the server's own update, where it has one.
    """
    attack = network.threat_model.attack
    falsifying = np.flatnonzero(np.isin(group.owners, network.threat_model.attackers))
    if not len(falsifying):
        return messages
    n = len(group.ids)
    steps = messages if start is None else messages - start
    updates = network.transport.to_columns(steps, group, np.full(n, 1 / n), reference)
    view = _view(network, t, slot, updates, falsifying, group.owners)
    return _replaced(network, messages, attack.falsify(view), falsifying, group, start)


def falsified_per_edge(
    network: Network, t: int, slot: str, messages: Tensor, owner: Ints
) -> Tensor:
    """Return the messages over edges, (a, m), where attackers send each neighbour another one.

    A peer that is down has no neighbours.

    Args:
        network: has the attack and the attackers.
        t, slot: the round, and the name of the exchange within it.
        messages: (p, m), one per peer.
        owner: (a,) the position on this rank of the sender on each edge.
    """
    attack = network.threat_model.attack
    attackers = network.threat_model.attackers
    peers = network.layout.peers
    edges = network.schedule.senders_on_edges(t)
    matrix = network.schedule.matrix(t)
    effects = network.fault_effects(t)
    if effects is not None:
        attackers = attackers[effects.up[attackers]]
        up = diags_array(effects.up.astype(np.float64))
        matrix = csr_array(up @ matrix @ up)
    falsifying = np.flatnonzero(np.isin(edges.owners, attackers))
    if not len(falsifying):
        return rows_at(messages, owner)
    pairs = np.stack(np.divmod(edges.ids[falsifying], peers), axis=1)
    everyone = network.schedule.everyone
    updates = network.transport.to_columns(messages, everyone, np.full(peers, 1 / peers))
    view = _view(network, t, slot, updates, attackers, everyone.owners)
    columns = attack.falsify_edges(view, matrix, pairs)
    return _replaced(network, rows_at(messages, owner), columns, falsifying, edges)


def _view(
    network: Network, t: int, slot: str, updates: Updates, attackers: Ints, owners: Ints
) -> AttackView:
    world = network.transport.world
    width = updates.rows.shape[1]
    first = int(world.all_gather(np.array([width]))[: world.rank].sum())
    return AttackView(
        updates=updates,
        attackers=attackers,
        owners=owners,
        coordinates=slice(first, first + width),
        seed=network.seed,
        t=t,
        slot=slot,
    )


def _replaced(
    network: Network,
    messages: Tensor,
    columns: Rows,
    falsifying: Ints,
    group: Group,
    start: Tensor | None = None,
) -> Tensor:
    """Return messages (a, m) in which some members of a group send falsified ones.

    Args:
        network: moves the columns.
        messages: (a, m), those of the members on this rank.
        columns: (f, c), the falsified messages, in the coordinates of this rank.
        falsifying: (f,), positions of their senders in the group, ascending.
        group: the senders.
        start: (a, m), added to what is sent.
    """
    world = network.transport.world
    ranks = network.layout.ranks_of(group.owners[falsifying])
    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks, minlength=world.size).tolist()
    rows = network.transport.to_rows(columns[order], messages, counts)
    members = np.arange(len(group.ids))[group.mine]
    places = np.searchsorted(members, falsifying[ranks == world.rank])
    here = torch.from_numpy(places).to(messages.device)
    return messages.index_copy(0, here, rows if start is None else rows + start[here])
