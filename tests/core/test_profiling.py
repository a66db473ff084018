"""Phases are measured where a profile is active; an outer phase does not count its inner ones."""

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dfl.comm.mpi import World
from dfl.core.profiling import MOST_EVENTS, PHASES, Profile, active, each, in_phase, phase, profiled


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nanoseconds that pass only where a test lets them."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    return now


def test_an_inner_phase_is_not_counted_for_the_outer_one(clock: list[int]) -> None:
    profile = Profile()
    with profiled(profile):
        clock[0] += 1
        with phase("evaluate"):
            clock[0] += 10
            with phase("wait"):
                clock[0] += 100
                with phase("write"):
                    clock[0] += 1000
            clock[0] += 20
    table = dict(zip(PHASES, profile.table().tolist(), strict=True))
    assert table["evaluate"] == [1, 30]
    assert table["wait"] == [1, 100]
    assert table["write"] == [1, 1000]
    assert table["other"] == [1, 1]
    assert profile.table()[:, 1].sum() == 1131
    assert [PHASES[k] for k in profile.events()[:, 0]] == ["write", "wait", "evaluate"]
    assert profile.events()[:, 1:].tolist() == [[111, 1111], [11, 1111], [1, 1131]]


def test_the_work_of_rank_0_for_all_is_not_waiting(clock: list[int]) -> None:
    def work() -> bytes:
        clock[0] += 10
        return b"done"

    profile = Profile()
    with profiled(profile), phase("evaluate"):
        assert World().from_root(work) == b"done"
    table = dict(zip(PHASES, profile.table().tolist(), strict=True))
    assert table["evaluate"] == [1, 10]
    assert table["wait"] == [1, 0]


def test_items_and_functions_are_measured(clock: list[int]) -> None:
    @in_phase("mix")
    def mixed(amount: int, *, twice: bool) -> int:
        clock[0] += amount * (2 if twice else 1)
        return amount

    def items() -> Iterator[int]:
        for k in range(3):
            clock[0] += 5
            yield k
        clock[0] += 7

    profile = Profile()
    with profiled(profile):
        found = []
        for k in each("batches", items()):
            clock[0] += 1000
            found.append(mixed(k, twice=True))
    table = dict(zip(PHASES, profile.table().tolist(), strict=True))
    assert found == [0, 1, 2]
    assert table["batches"] == [4, 22]  # the last one finds the end
    assert table["mix"] == [3, 6]
    assert table["other"] == [1, 3000]


def test_a_phase_that_fails_is_closed(clock: list[int]) -> None:
    profile = Profile()
    with profiled(profile):
        with suppress(KeyError), phase("send"):
            clock[0] += 3
            raise KeyError
        with phase("mix"):
            clock[0] += 4
    table = dict(zip(PHASES, profile.table().tolist(), strict=True))
    assert table["send"] == [1, 3]
    assert table["mix"] == [1, 4]
    assert active() is None


def test_nothing_is_measured_without_a_profile() -> None:
    profile = Profile()
    items = [1, 2]
    with profiled(profile), profiled(None):
        assert each("batches", items) is items
        with phase("mix"):
            pass
    assert not profile.calls.any()


def test_the_device_is_waited_for_at_both_ends_of_a_phase(clock: list[int]) -> None:
    pending = [0]

    def synchronize() -> None:
        clock[0] += pending[0]
        pending[0] = 0

    profile = Profile(synchronize)
    with profiled(profile):
        pending[0] = 50  # launched before the phase
        with phase("mix"):
            pending[0] = 8
    table = dict(zip(PHASES, profile.table().tolist(), strict=True))
    assert table["mix"] == [1, 8]
    assert table["other"] == [1, 50]


def test_the_events_of_a_trace_are_bounded() -> None:
    profile = Profile()
    with profiled(profile):
        for _ in range(MOST_EVENTS + 5):
            with phase("mix"):
                pass
    assert len(profile.events()) == MOST_EVENTS
    assert profile.calls[PHASES.index("mix")] == MOST_EVENTS + 5


def test_a_phase_has_one_of_the_names() -> None:
    with profiled(Profile()), pytest.raises(ValueError, match="tuple"), phase("sleep"):
        pass
