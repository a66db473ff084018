"""Exchange with faults agrees with the recursions of the methods on dense matrices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import Tensor

from dfl import Data, InputError, Run
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.robust.aggregators import Rows
from dfl.robust.attacks import AttackView
from dfl.robust.attacks.omniscient import LittleIsEnough
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from tests.algorithms.test_oracle import dense, sgd
from tests.support.quadratic import Point, centres, final, half_square, quadratic, spread, states
from topologies import TOPOLOGIES

GRAPHS = ("ring", "star", "exponential", "one_peer_exponential", "small_world:k=4,p=0.3")
SOME = "link_loss:p=0.3+outage:p=0.15,length=2"


def fate(setting: Prepared, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which peers are up (P,), the edges with both ends up, and the messages that arrive.

    Entry [i, j] is about the message from j to i.
    """
    effects = setting.network.fault_effects(t)
    P = setting.layout.peers
    assert effects is not None
    up = torch.from_numpy(effects.up)
    receiver, sender = (each.reshape(-1) for each in np.indices((P, P)))
    arrive = torch.from_numpy(effects.arrive(sender, receiver)).view(P, P)
    both = up[:, None] & up[None, :]
    return up, both, both & arrive


def trained(setting: Prepared, x: Tensor, up: Tensor) -> Tensor:
    """Return the models after local steps of the peers that are up."""
    return torch.where(up[:, None], sgd(x, centres(setting), 0.1, 0.0, 3), x)


@pytest.mark.parametrize("topology", GRAPHS)
@pytest.mark.parametrize(
    "faults", [SOME, "burst:p=0.4,length=3", "leave:peers=2,at=3+join:peers=5+6,at=4"]
)
def test_a_lost_neighbours_weight_goes_to_self(topology: str, faults: str) -> None:
    setting = quadratic(topology=topology, faults=faults)
    X = start(setting.run, setting.task, True) + 1.0
    for t, state in enumerate(list(states(setting, 9))[1:]):
        up, _, arrive = fate(setting, t)
        A = dense(setting, t) * arrive * (1 - torch.eye(8))
        X = (A + torch.diag(1 - A.sum(1))) @ trained(setting, X if t else X - 1.0, up)
        assert torch.allclose(state.x, X, rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", GRAPHS)
@pytest.mark.parametrize(
    ("gamma", "bits"),
    [
        (1.0, 2),
        (0.6, 8),
        pytest.param(1.0, 8, marks=pytest.mark.slow),
        pytest.param(0.6, 2, marks=pytest.mark.slow),
    ],
)
def test_copies_move_only_when_messages_arrive(topology: str, gamma: float, bits: int) -> None:
    """x_i <- z_i + gamma (sum_j w_ij y_(j->i) - sum_k w_ki y_(i->k)) over edges with both ends up.

    Q is that of a run without losses. The larger of the two sums of weights of a peer is scaled to
    the smaller.
    """
    common: dict[str, Any] = {
        "topology": topology,
        "algorithm": f"qdfedavgm:gamma={gamma}",
        "d": 40,
    }
    setting = quadratic(**common, compressor=f"quantize:bits={bits}", faults=SOME)
    calm = quadratic(**common, compressor=f"quantize:bits={bits}")
    X = start(setting.run, setting.task, True)
    copies = X[None].expand(8, -1, -1).clone()  # [k, i]: the copy of i at k, and at i itself
    for t, state in enumerate(list(states(setting, 9))[1:]):
        up, both, arrive = fate(setting, t)
        Z = trained(setting, X, up)
        edges = Net(calm.network, t).edges
        sent = (
            Net(calm.network, t)
            .exchange(Z[edges.owner] - copies[edges.ids % 8, edges.owner], per_edge=True)
            .own
        )
        copies[edges.ids % 8, edges.owner] += sent * arrive[edges.ids % 8, edges.owner][:, None]
        W = dense(setting, t) * both * (1 - torch.eye(8))
        less = torch.minimum(W.sum(1), W.sum(0))
        pull = torch.nan_to_num(less / W.sum(1))
        push = torch.nan_to_num(less / W.sum(0))
        X = Z + gamma * (
            torch.einsum("ij,ijd->id", pull[:, None] * W, copies)
            - torch.einsum("ki,kid->id", push[None] * W, copies)
        )
        assert torch.allclose(state.x, X, rtol=0, atol=1e-12)


KEEPING = [
    (topology, faults)
    for topology in ("ring", "one_peer_exponential", "exponential")
    for faults in ("link_loss:p=0.5", "burst:p=0.4,length=9+outage:p=0.1", "link_loss:p=0.9")
    if topology == "ring" or "outage" not in faults
]


@pytest.mark.parametrize(
    ("topology", "faults", "bits"),
    [
        pytest.param(*each, bits, marks=() if bits == (1, 8)[k % 2] else pytest.mark.slow)
        for k, each in enumerate(KEEPING)
        for bits in (1, 3, 8)
    ],
)
def test_the_mean_is_kept_whatever_is_lost(topology: str, faults: str, bits: int) -> None:
    setting = quadratic(topology=topology, bits=bits, d=300, faults=faults)
    x = start(setting.run, setting.task, True)
    for t, state in enumerate(list(states(setting, 25))[1:]):
        z = trained(setting, x, fate(setting, t)[0])
        assert torch.allclose(state.x.mean(0), z.mean(0), rtol=0, atol=1e-12)
        x = state.x


def row_stochastic(topology: str, folder: Path, **settings: Any) -> Prepared:
    """Return a run with weights that are not doubly stochastic.

    `directed` is a file of weights on a graph many edges of which have no reverse edge.
    """
    if topology == "directed":
        receives = np.eye(8) + np.eye(8, k=1) + np.eye(8, k=-7) + np.eye(8, k=3)
        path = folder / "weights.npz"
        np.savez(path, receives / receives.sum(1, keepdims=True))
        return quadratic(topology=f"edges:path={path}", **settings)
    return quadratic(topology=topology, mixing="uniform", **settings)


@pytest.mark.parametrize(
    ("topology", "gamma"), [("star", 1.0), ("barabasi_albert:m=2", 0.6), ("directed", 0.6)]
)
def test_copies_per_edge_are_copies_per_peer_where_nothing_is_lost(
    topology: str, gamma: float, tmp_path: Path
) -> None:
    method = f"qdfedavgm:gamma={gamma}"
    peers, edges = (
        final(row_stochastic(topology, tmp_path, algorithm=method, faults=faults), 60)
        for faults in ("none", "link_loss:p=0")
    )
    assert torch.allclose(peers, edges, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("topology", "bits"), [("star", 2), ("barabasi_albert:m=2", 8), ("directed", 2)]
)
def test_the_average_by_the_stationary_distribution_is_kept(
    topology: str, bits: int, tmp_path: Path
) -> None:
    setting = row_stochastic(topology, tmp_path, bits=bits, d=300, faults="link_loss:p=0.4")
    pi = torch.linalg.matrix_power(dense(setting, 0), 2**20)[0]
    x = start(setting.run, setting.task, True)
    distances = []
    for state in list(states(setting, 120))[1:]:
        z = trained(setting, x, torch.ones(8, dtype=torch.bool))
        assert torch.allclose(pi @ state.x, pi @ z, rtol=0, atol=1e-10)
        x = state.x
        distances.append(spread(x))
    assert max(distances[100:]) < 1.2 * max(distances[20:60])


@pytest.mark.parametrize("topology", ["exponential", "one_peer_exponential", "star"])
@pytest.mark.parametrize("faults", ["outage:p=0.2,length=2", "leave:peers=2,at=3", SOME])
def test_peers_that_agree_go_on_agreeing(topology: str, faults: str) -> None:
    """Peers that agree go on agreeing where in- or out-neighbours of a directed graph are down."""
    same = Data(
        np.full((8, 5), 3.0),
        np.zeros(8, np.int64),
        np.zeros((1, 5)),
        np.zeros(1, np.int64),
        classes=0,
    )
    run = Run(
        peers=8, topology=topology, algorithm="qdfedavgm", momentum=0.0, lr=0.1, faults=faults
    )
    setting = prepare(replace(run, model=Point(5), dataset=same, loss=half_square), World())
    # Peers that are down do not move, so all begin at the optimum.
    rows = setting.task.examples.inputs
    state = setting.algorithm.init(rows, rows, Net(setting.network, 0))
    for t in range(12):
        state = setting.algorithm.round(state, setting.task, Net(setting.network, t))
    assert torch.allclose(state.x, rows, rtol=0, atol=1e-12)


def rounds_of(senders: list[list[list[int]]]) -> Any:
    """Return a topology of so many rounds, in which peer i of 8 receives from senders[t][i]."""

    def graph(peers: int, rng: Any) -> list[csr_array]:
        found = np.zeros((len(senders), peers, peers), bool)
        for t, rows in enumerate(senders):
            for i, others in enumerate(rows):
                found[t, i, others] = True
        return [csr_array(each) for each in found]

    return graph


def test_copies_change_nothing_where_rounds_are_not_doubly_stochastic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a star on half of the peers and a ring on the rest, in turn with a star on all."""
    halves = [[1, 2, 3], [0], [0], [0], [5, 7], [4, 6], [5, 7], [6, 4]]
    changing = rounds_of([halves, [list(range(1, 8))] + 7 * [[0]]])
    monkeypatch.setitem(TOPOLOGIES, "halves", changing)
    settings: dict[str, Any] = {"topology": "halves", "mixing": "uniform"}
    plain, edges = (
        final(quadratic(**settings, algorithm=name), 60) for name in ("dfedavgm", "qdfedavgm")
    )
    assert torch.allclose(plain, edges, rtol=0, atol=1e-12)


def test_a_round_in_which_some_peers_only_receive_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone = [[j for j in range(8) if j != i] for i in range(8)]
    monkeypatch.setitem(TOPOLOGIES, "chain", rounds_of([[[], *([i] for i in range(7))], everyone]))
    settings: dict[str, Any] = {"topology": "chain", "mixing": "uniform"}
    assert final(quadratic(**settings), 2).isfinite().all()
    with pytest.raises(InputError, match="--topology chain with --algorithm qdfedavgm"):
        quadratic(**settings, algorithm="qdfedavgm")


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ({"faults": "link_loss:p=0.3"}, False),
        ({"faults": "link_loss:p=0.9"}, True),
        ({"faults": "link_loss:p=0.9", "algorithm": "qdfedavgm:gamma=0.1"}, False),
        ({"faults": "link_loss:p=0.9", "algorithm": "dfedavgm"}, False),
        ({"faults": "outage:p=0.2", "topology": "exponential"}, False),
        ({"faults": "leave:fraction=0.5,at=3"}, False),
    ],
    ids=str,
)
def test_faults_that_make_copies_too_old_are_warned_of(more: dict[str, Any], warned: bool) -> None:
    setting = quadratic(**{"algorithm": "qdfedavgm", "peers": 16, "rounds": 200, **more})
    assert setting.info is not None
    assert any(f"--faults {more['faults']}" in note for note in setting.info.notes) == warned


@pytest.mark.parametrize(
    "bits", [1, None, *(pytest.param(b, marks=pytest.mark.slow) for b in (3, 8))]
)
def test_the_consensus_distance_stays_bounded(bits: int | None) -> None:
    """At 30 % losses it does not grow from round 120 on, and is not much larger than in float32."""
    settings: dict[str, Any] = {"d": 300, "faults": "link_loss:p=0.3"}
    setting = (
        quadratic(**settings, bits=bits) if bits else quadratic(**settings, algorithm="qdfedavgm")
    )
    distances = [spread(state.x) for state in states(setting, 160)]
    exact = [spread(state.x) for state in states(quadratic(d=300), 60)]
    assert max(distances[120:]) < 1.1 * max(distances[40:120])
    assert max(distances[40:]) < 1.6 * exact[-1]


@pytest.mark.parametrize(
    ("topology", "more"),
    [
        ("one_peer_exponential", {}),
        ("star", {"mixing": "neighbors"}),
        ("ring", {"aggregator": "median"}),
    ],
)
def test_faults_that_never_occur_change_nothing(topology: str, more: dict[str, Any]) -> None:
    calm = final(quadratic(topology=topology, **more), 9)
    for never in (
        "link_loss:p=0",
        "burst:p=0",
        "outage:p=0",
        "leave:at=99",
        "join:at=0",
        "stragglers:work=1",
    ):
        assert torch.equal(calm, final(quadratic(topology=topology, faults=never, **more), 9))


def test_a_copy_per_edge_changes_nothing_where_nothing_is_lost() -> None:
    """To 1e-12 where nothing is quantized, and to the bit where the graph changes anyway."""
    plain = quadratic()
    edges = quadratic(algorithm="qdfedavgm", faults="link_loss:p=0")
    assert not Net(edges.network, 0).fixed
    assert Net(quadratic(faults="stragglers").network, 0).fixed
    assert torch.allclose(final(plain, 12), final(edges, 12), rtol=0, atol=1e-12)
    changing: dict[str, Any] = {"topology": "one_peer_exponential", "bits": 3}
    assert torch.equal(
        final(quadratic(**changing), 9), final(quadratic(**changing, faults="link_loss:p=0"), 9)
    )


@pytest.mark.parametrize("faults", ["link_loss:p=1", "outage:p=1", "join:fraction=1,at=99"])
@pytest.mark.parametrize("topology", ["ring", "star", "exponential", "regular:k=7"])
def test_a_peer_that_receives_nothing_trains_alone(faults: str, topology: str) -> None:
    alone = quadratic(algorithm="local_only", faults="none" if "link" in faults else faults)
    assert torch.equal(final(quadratic(topology=topology, faults=faults), 6), final(alone, 6))
    setting = quadratic(topology=topology, faults=faults, bits=8)
    assert torch.allclose(final(setting, 6), final(alone, 6), rtol=0, atol=1e-15)  # copies cancel
    lost = setting.network.traffic.lost
    assert lost == (6 * int(setting.network.edge_plan(0).copies.sum()) if "link" in faults else 0)


METHODS: list[dict[str, Any]] = [
    {},
    {"bits": 3},
    {"bits": 3, "topology": "one_peer_exponential"},
    {"aggregator": "median"},
    {"algorithm": "qdfedavgm:exchange=paper,alpha=0.5", "compressor": "quantize:bits=6"},
    {"attack": "ipm:eps=1e9,peers=3"},
    {"attack": "dissensus:peers=3", "aggregator": "clipping"},
    {"attack": "alie:peers=3", "bits": 3},
    {"algorithm": "local_only"},
    {"algorithm": "qg_dsgdm"},
]


@pytest.mark.parametrize("more", METHODS, ids=str)
def test_a_peer_that_is_down_keeps_its_state_to_the_bit(more: dict[str, Any]) -> None:
    """Peer 3, an attacker or not, is down in rounds 2 to 5 and sends nothing in them."""
    if "clipping" in more.get("aggregator", ""):
        more = {**more, "aggregator": "clipping:tau=1"}
    setting = quadratic(**more, momentum=0.5, faults="leave:peers=3,at=2+join:peers=0,at=4")
    seen = []
    momentum = []
    payload = []
    for state in states(setting, 6):
        seen.append(state.x.clone())
        momentum.append(getattr(state, "m", state.x).clone())
        payload.append(setting.network.traffic.payload.copy())
    for before, after in pairwise(seen[2:]):
        assert torch.equal(before[3], after[3])
        assert not torch.equal(before[5], after[5])
    for before, after in pairwise(momentum[2:]):
        assert torch.equal(before[3], after[3])
    assert all(torch.equal(seen[0][0], x[0]) for x in seen[1:5])
    assert not torch.equal(seen[5][0], seen[4][0])
    assert payload[2][3] == payload[-1][3]
    assert payload[4][0] == 0


@pytest.mark.parametrize("algorithm", ["dfedavgm", "qdfedavgm:exchange=paper,alpha=0.5", "choco"])
def test_attackers_know_only_what_is_sent(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 peers 1, an attacker, and 3 are down; over edges there is a message for every edge."""
    setting = quadratic(
        algorithm=algorithm, topology="complete", attack="alie:peers=0+1",
        faults="leave:peers=1+3,at=0",
    )  # fmt: skip
    server = quadratic(algorithm="fedavg", attack="alie:peers=0+1", faults="leave:peers=1+3,at=0")
    views: list[AttackView] = []

    def falsify(attack: LittleIsEnough, view: AttackView) -> Rows:
        views.append(view)
        return true(attack, view)

    true = LittleIsEnough.falsify
    monkeypatch.setattr(LittleIsEnough, "falsify", falsify)
    final(setting, 1)
    final(server, 1)
    of_graph, of_server = views
    edges = 5 if algorithm == "choco" else 1
    assert np.allclose(of_graph.updates.rows[::edges], of_server.updates.rows, rtol=0, atol=1e-12)
    assert len(of_graph.updates.rows) == 6 * edges
    assert of_graph.attackers.tolist() == [*range(edges)]
    assert of_graph.imitated.tolist() == [*range(edges, 6 * edges)]


def test_falsified_messages_are_sent_by_the_attackers_that_are_up() -> None:
    """An attacker keeps what it trained itself, and sends x - (z - x)."""
    setting = quadratic(
        topology="complete", attack="sign_flip:peers=1+4", faults="outage:p=0.4,length=2"
    )
    X = start(setting.run, setting.task, True)
    for t, state in enumerate(list(states(setting, 8))[1:]):
        up, both, _ = fate(setting, t)
        Z = trained(setting, X, up)
        sent = Z.clone()
        sent[[1, 4]] = 2 * X[[1, 4]] - Z[[1, 4]]
        W = dense(setting, t) * both * (1 - torch.eye(8))
        X = Z + W @ sent - W.sum(1, keepdim=True) * Z
        assert torch.allclose(state.x, X, rtol=0, atol=1e-12)


def test_dissensus_is_between_the_peers_that_are_up() -> None:
    """With eps = 1 its receivers end where they trained to."""
    setting = quadratic(
        topology="complete", attack="dissensus:peers=0+1,eps=1", faults="leave:peers=1+3,at=0"
    )
    alone = final(quadratic(algorithm="local_only"), 1)
    honest = [2, 4, 5, 6, 7]
    assert torch.allclose(final(setting, 1)[honest], alone[honest], rtol=0, atol=1e-12)


def test_only_messages_that_are_sent_are_counted() -> None:
    """On a ring of 8 without peer 3, its neighbours send over one edge. Lost messages count."""
    setting = quadratic(faults="leave:peers=3,at=0+link_loss:p=1", d=5)
    final(setting, 2)
    edges = np.array([2, 2, 1, 0, 1, 2, 2, 2])
    assert setting.network.traffic.payload.tolist() == (2 * 5 * 8 * edges).tolist()
    assert setting.network.traffic.lost == 2 * edges.sum()


def test_a_rule_is_given_only_messages_that_arrive() -> None:
    """A peer of a ring aggregates its own message and those of its neighbours that arrive."""
    from dfl.robust.aggregators import AGGREGATORS, Aggregate, Updates

    shown: list[int] = []

    def count(updates: Updates) -> Aggregate:
        shown.append(len(updates.rows))
        assert updates.weights.sum() == pytest.approx(1)
        return Aggregate(updates.mix(updates.weights))

    with AGGREGATORS.replaced(count=count):
        setting = quadratic(faults=SOME, aggregator="count")
        del shown[:]  # of the preflight
        x = final(setting, 5)
    expected = [
        1 + int(fate(setting, t)[2][i, [i - 1, (i + 1) % 8]].sum())
        for t in range(5)
        for i in range(8)
    ]
    assert shown == expected
    assert torch.allclose(x, final(quadratic(faults=SOME), 5), rtol=0, atol=1e-12)


def test_plans_of_rounds_share_links_and_routes() -> None:
    network = quadratic(faults=SOME).network
    assert network.peer_plan(0) is not network.peer_plan(1)
    assert network.transport.lane(network.peer_plan(0)) is network.transport.lane(
        network.peer_plan(7)
    )
    assert len(network.transport._lanes) == 1
    network.transport.lane(network.edge_plan(3))
    network.transport.lane(network.edge_plan(4))
    assert len(network.transport._lanes) == 2
