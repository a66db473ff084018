"""Faults: how often and how long they occur, and that they are a function of seed and round."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.environment.fault_effects import FaultEffects
from dfl.environment.faults import (
    FAULTS,
    Burst,
    Fault,
    Join,
    Leave,
    LinkLoss,
    Outage,
    RoundKey,
    Stragglers,
)

P = 400
ROUNDS = 300
LINKS = np.arange(5, 5 + 7 * P, 7)


def lost(fault: Fault, seed: int = 0, rounds: int = ROUNDS) -> NDArray[np.bool_]:
    """Return which links lose their message in every round, (rounds, links)."""
    return np.array([fault.loses(LINKS, RoundKey(P, seed, t)) for t in range(rounds)])


def down(fault: Fault, peers: int = P, rounds: int = ROUNDS) -> NDArray[np.bool_]:
    """Return which peers are down in every round, (rounds, P)."""
    return np.array([fault.down(RoundKey(peers, 0, t)) for t in range(rounds)])


def run_lengths(of: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the lengths of the runs of True in all columns.

    Runs that touch the first or the last row are left out.
    """
    found = []
    for column in of.T:
        ends = np.flatnonzero(np.diff(column.astype(int)))
        cut = np.split(np.arange(len(column)), ends + 1)[1:-1]
        found += [len(run) for run in cut if column[run[0]]]
    return np.array(found)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_links_lose_independently_with_probability_p(p: float) -> None:
    seen = lost(LinkLoss(p=p))
    assert seen.mean() == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / seen.size))
    # Neither rounds nor links are correlated.
    for one, other in ((seen[1:], seen[:-1]), (seen[:, 1:], seen[:, :-1])):
        assert (one & other).mean() == pytest.approx(p * p, abs=0.01)


@pytest.mark.parametrize(("p", "length"), [(0.1, 5.0), (0.3, 10.0), (0.5, 2.0), (0.2, 1.25)])
def test_bursts_have_their_frequency_and_their_length(p: float, length: float) -> None:
    """A burst ends with probability 1 / length and begins with p / (length (1 - p))."""
    seen = lost(Burst(p=p, length=length))
    tolerance = 4 * np.sqrt(2 * length * p / seen.size)
    assert seen.mean() == pytest.approx(p, abs=tolerance)
    assert lost(Burst(p=p, length=length), rounds=1).mean() == pytest.approx(
        p, abs=4 * np.sqrt(p / P)
    )
    ended = (~seen[1:])[seen[:-1]].mean()
    begun = seen[1:][~seen[:-1]].mean()
    assert ended == pytest.approx(1 / length, rel=0.1)
    assert begun == pytest.approx(p / (length * (1 - p)), rel=0.1)
    assert run_lengths(seen).mean() == pytest.approx(length, rel=0.12)
    assert (run_lengths(seen) == 1).mean() == pytest.approx(1 / length, rel=0.15)  # geometric


def test_rare_bursts_that_are_long_keep_their_share() -> None:
    """A link is redrawn in one of 3,000 rounds and then bad 3 times in 100,000, which is finer than
    the 24 bits of one number.
    """
    n, p = 60_000, 3e-5
    burst = Burst(p=p, length=3000)
    bad = np.flatnonzero(burst.is_bad(np.arange(n), RoundKey(n, 2, 0)))
    assert 0 < len(bad) < n * p + 4 * np.sqrt(n * p)
    for t in range(1, 40, 3):  # the bursts go on
        assert burst.is_bad(bad, RoundKey(n, 2, t)).all()


def test_bursts_lose_with_the_probability_of_each_state() -> None:
    gentle = Burst(p=0.3, length=10, bad=0.6, good=0.1)
    seen = lost(gentle)
    bad = np.array([gentle.is_bad(LINKS, RoundKey(P, 0, t)) for t in range(ROUNDS)])
    assert np.array_equal(bad, lost(Burst(p=0.3, length=10)))
    assert seen[bad].mean() == pytest.approx(0.6, abs=0.01)
    assert seen[~bad].mean() == pytest.approx(0.1, abs=0.01)


def test_bursts_of_the_shortest_length_are_independent_losses() -> None:
    seen = lost(Burst(p=0.25, length=4 / 3))
    assert (seen[1:] & seen[:-1]).mean() == pytest.approx(0.25**2, abs=0.005)


@pytest.mark.parametrize(("p", "length"), [(0.01, 5), (0.2, 1), (0.05, 40), (0.0, 9), (1.0, 2)])
def test_outages_have_their_frequency_and_their_length(p: float, length: int) -> None:
    seen = down(Outage(p=p, length=length))
    assert seen.mean() == pytest.approx(1 - (1 - p) ** length, abs=0.02)
    assert seen[0].mean() == pytest.approx(1 - (1 - p) ** length, abs=0.1)
    assert not len(run_lengths(seen)) or run_lengths(seen).min() == length or p == 1


def test_an_outage_during_an_outage_prolongs_it() -> None:
    once = down(Outage(p=0.1, length=1))
    thrice = down(Outage(p=0.1, length=3))
    recent = once[2:] | once[1:-1] | once[:-2]
    assert np.array_equal(thrice[2:], recent)


def test_peers_that_leave_are_down_after_and_those_that_join_before() -> None:
    assert np.array_equal(down(Leave(peers=(3, 9), at=4), 12, 8).sum(1), [0, 0, 0, 0, 2, 2, 2, 2])
    assert down(Leave(peers=(3, 9), at=4), 12, 8)[-1].nonzero()[0].tolist() == [3, 9]
    assert np.array_equal(down(Join(peers=(0,), at=2), 12, 4)[:, 0], [True, True, False, False])
    gone = down(Leave(fraction=0.25, at=0), 40, 3)
    late = down(Join(fraction=0.25, at=3), 40, 3)
    assert (gone.sum(1) == 10).all()
    assert (gone[0] == gone[2]).all()
    assert not np.array_equal(gone, late)  # drawn separately


def test_stragglers_are_redrawn_in_every_round_unless_fixed() -> None:
    paces = np.array(
        [Stragglers(fraction=0.25, work=0.3).pace(RoundKey(40, 0, t)) for t in range(9)]
    )
    assert ((paces == 0.3).sum(1) == 10).all()
    assert len({row.tobytes() for row in paces}) == 9
    fixed = [
        Stragglers(fraction=0.25, fixed=True).pace(RoundKey(40, 0, t)).tolist() for t in range(9)
    ]
    assert fixed == fixed[:1] * 9
    assert Stragglers(peers=(1,), work=0.1).pace(RoundKey(3, 0, 5)).tolist() == [1, 0.1, 1]


MANY: list[Any] = [
    LinkLoss(p=0.3),
    Burst(p=0.3, length=20),
    Burst(bad=0.5, good=0.2),
    Outage(p=0.01, length=70),
    Leave(at=50),
    Join(at=100),
    Stragglers(),
]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(MANY),
    st.integers(0, 5),
    st.lists(st.integers(0, P - 1), max_size=9),
    st.integers(0, 200),
)
def test_faults_do_not_depend_on_the_order_of_links_and_rounds(
    fault: Fault, seed: int, some: list[int], t: int
) -> None:
    """Some links give the same as all, whatever was drawn before, as on another rank or resumed."""
    round_key = RoundKey(P, seed, t)
    assert np.array_equal(fault.loses(LINKS[some], round_key), fault.loses(LINKS, round_key)[some])
    once = fault.down(round_key), fault.pace(round_key)
    fault.down(RoundKey(P, seed, t + 1))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(once, (fault.down(round_key), fault.pace(round_key)), strict=True)
    )


@pytest.mark.parametrize("fault", MANY, ids=lambda fault: fault.name)
def test_faults_differ_between_seeds(fault: Fault) -> None:
    first, second = (
        np.concatenate(
            [fault.loses(LINKS, round_key), fault.down(round_key), fault.pace(round_key)]
        )
        for round_key in (RoundKey(P, 0, 60), RoundKey(P, 1, 60))
    )
    assert not np.array_equal(first, second)


def test_the_effects_of_several_faults_are_combined() -> None:
    effects = FaultEffects(
        (Leave(peers=(1,), at=0), Outage(p=1, length=1), Stragglers(peers=(2,), work=0.5)),
        RoundKey(4, 0, 3),
    )
    assert not effects.up.any()
    assert not effects.work.any()
    effects = FaultEffects(
        (Leave(peers=(1,), at=0), Stragglers(peers=(1, 2), work=0.5), Stragglers(peers=(2,))),
        RoundKey(4, 0, 3),
    )
    assert effects.up.tolist() == [True, False, True, True]
    assert effects.work.tolist() == [1, 0, 0.5, 1]
    both = FaultEffects((LinkLoss(p=0.2), Burst(p=0.2)), RoundKey(P, 0, 3))
    arrive = np.mean(
        [
            FaultEffects(both.faults, RoundKey(P, 0, t)).arrive(7, np.arange(P)).mean()
            for t in range(50)
        ]
    )
    assert arrive == pytest.approx(0.8**2, abs=0.02)


def test_links_of_a_server_are_independent_of_links_of_peers() -> None:
    peers = np.arange(9)
    effects = FaultEffects((LinkLoss(p=0.5),), RoundKey(9, 0, 0))
    everyone = {
        (s, r): bool(effects.arrive(s, r)[0]) for s in range(10) for r in range(10) if s != r
    }
    assert effects.arrive(9, peers).tolist() == [everyone[9, i] for i in range(9)]
    assert effects.arrive(peers, 9).tolist() == [everyone[i, 9] for i in range(9)]
    rounds = [FaultEffects((LinkLoss(p=0.5),), RoundKey(9, 0, t)) for t in range(40)]
    histories = {
        link: tuple(bool(effects.arrive(*link)[0]) for effects in rounds) for link in everyone
    }
    assert len(set(histories.values())) == len(histories) == 90


@pytest.mark.parametrize(
    "fault", [LinkLoss(), Burst(), Outage(), Leave(), Stragglers()], ids=lambda fault: fault.name
)
def test_ten_thousand_peers_take_milliseconds(fault: Fault) -> None:
    """1 ms on a free core, 8 with bursts; the limit leaves room for a busy one."""
    links = np.arange(40_000) * 7
    took = []
    for t in range(5):
        begun = time.process_time()
        fault.loses(links, RoundKey(10_000, 0, t))
        fault.down(RoundKey(10_000, 0, t))
        fault.pace(RoundKey(10_000, 0, t))
        took.append(time.process_time() - begun)
    assert min(took) < 0.1


BAD: list[tuple[type[Fault], str, Any]] = [
    (LinkLoss, "p", 1.1),
    (Burst, "p", 1.0),
    (Burst, "length", 1.0),
    (Burst, "bad", -0.1),
    (Outage, "length", 0),
    (Leave, "at", -1),
    (Join, "fraction", 2.0),
    (Stragglers, "work", 0.0),
]


@pytest.mark.parametrize(("kind", "option", "value"), BAD)
def test_options_out_of_range_are_refused(kind: type[Fault], option: str, value: Any) -> None:
    with pytest.raises(InputError) as refused:
        kind(**{option: value})
    assert str(refused.value).startswith(f"--faults {kind.name}: {option} must be ")
    assert str(refused.value).endswith(f", not {value}")


def test_peers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match=r"--faults leave: peers must be from 0 to 8, not 3\+9"):
        Leave(peers=(3, 9)).down(RoundKey(9, 0, 0))
    with pytest.raises(
        InputError, match="--faults stragglers: fraction must be 0 or enough for one of 9 peers"
    ):
        Stragglers(fraction=0.01).pace(RoundKey(9, 0, 0))
    assert not Leave(fraction=0.0).down(RoundKey(9, 0, 50)).any()
    with pytest.raises(InputError, match="--faults leave: peers must be at least one peer, not "):
        Leave(peers=())


def test_every_fault_states_what_it_touches() -> None:
    assert {name: kind.name for name, kind in FAULTS.items()} == {name: name for name in FAULTS}
    assert {kind.touches for name, kind in FAULTS.items() if name != "none"} == {
        "links",
        "peers",
        "work",
    }
