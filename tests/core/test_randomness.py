"""Random numbers are fixed by their address, uniform and independent."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from dfl import Run, simulate
from dfl.core import randomness

PEERS = range(40)
N = 5000


def sample(seed: int = 0, purpose: str = "test", *address: randomness.Part) -> np.ndarray:
    """Return a (40, 5000) table of uniform numbers in [0, 1) with all 32 bits."""
    return (
        randomness.bits(seed, purpose, PEERS, *address, n=N).numpy().view(np.uint32) + 0.5
    ) / 2**32


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation of two tables, in standard deviations."""
    return float(abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) * np.sqrt(x.size))


# The address


def test_the_numbers_of_a_peer_do_not_depend_on_the_other_peers_of_the_call() -> None:
    table = randomness.bits(7, "order", range(9), 3, n=50)
    assert torch.equal(randomness.bits(7, "order", [4], 3, n=50)[0], table[4])
    assert torch.equal(randomness.bits(7, "order", [8, 0], 3, n=50), table[[8, 0]])


@pytest.mark.parametrize(("start", "n"), [(0, 0), (0, 1), (0, 49), (13, 20), (99, 1)])
def test_the_number_at_a_place_does_not_depend_on_the_other_places_of_the_call(
    start: int, n: int
) -> None:
    table = randomness.bits(7, "order", range(3), n=100)
    assert torch.equal(
        randomness.bits(7, "order", range(3), n=slice(start, start + n)),
        table[:, start : start + n],
    )


def test_a_change_of_the_result_does_not_change_the_next_result() -> None:
    first = randomness.bits(7, "order", [1], n=100)
    kept = first.clone()
    first.zero_()
    assert torch.equal(randomness.bits(7, "order", [1], n=100), kept)


def test_the_numbers_are_the_same_on_every_machine() -> None:
    """Runs are replayed from addresses: a change of these numbers belongs in the change log."""
    assert randomness.bits(0, "test", [0, 1], 2, "x", n=2).tolist() == [
        [-978720118, 1511467760],
        [-1023412846, 413992215],
    ]
    assert randomness.generator(0, "test").integers(1000, size=3).tolist() == [541, 582, 342]


def triple32(counter: int, first: int, second: int) -> int:
    """Return the hash of one number, in unbounded integers."""
    x = (counter + first) % 2**32
    x = (x ^ x >> 17) * 0xED5AD4BB % 2**32
    x = (x ^ x >> 11) * 0xAC4C1B51 % 2**32 ^ second
    x = (x ^ x >> 15) * 0x31848BAB % 2**32
    return x ^ x >> 14


def test_a_table_equals_the_hash_of_one_number_at_a_time() -> None:
    key = randomness._key(3, "test", np.arange(4, dtype=np.uint64), "slot", 5)
    table = randomness.bits(3, "test", range(4), "slot", 5, n=60).numpy().view(np.uint32)
    for row, peer in zip(table, key.tolist(), strict=True):
        assert row.tolist() == [triple32(k, peer % 2**32, peer >> 32) for k in range(60)]


def test_every_part_of_the_address_matters() -> None:
    tables = [
        sample(),
        sample(seed=1),
        sample(0, "other"),
        sample(0, "test", 0),
        sample(0, "test", 1),
        sample(0, "test", -1),
        sample(0, "test", 0, 0),
        sample(0, "test", 1, 0),
        sample(0, "test", 0, 1),
        sample(0, "test", "x"),
        sample(0, "test", "y"),
        sample(0, "test", 0, "x"),
    ]
    for i, one in enumerate(tables):
        assert all(correlation(one, other) < 5 for other in tables[:i])


def test_keys_do_not_collide() -> None:
    peers = np.arange(10_000, dtype=np.uint64)
    made = np.concatenate(
        [randomness._key(seed, "test", peers, t) for seed in range(3) for t in range(3)]
    )
    assert len(np.unique(made)) == made.size


# Uniformity: the statistics of 200,000 numbers within five standard deviations


def test_numbers_have_the_mean_and_variance_of_a_uniform_distribution() -> None:
    x = sample()
    assert abs(x.mean() - 1 / 2) < 5 * (1 / 12 / x.size) ** 0.5
    assert abs(x.var() - 1 / 12) < 5 * (1 / 180 / x.size) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 1024])
def test_neighbouring_places_are_not_correlated(lag: int) -> None:
    x = sample()
    assert correlation(x[:, :-lag], x[:, lag:]) < 5


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_peers_are_not_correlated(lag: int) -> None:
    x = sample()
    assert correlation(x[:-lag], x[lag:]) < 5
    assert correlation(x[:-lag, 1:], x[lag:, :-1]) < 5


def test_every_bit_is_fair_and_independent_of_the_next_place() -> None:
    numbers = randomness.bits(0, "test", PEERS, n=N).numpy().view(np.uint32)
    for bit in range(32):
        ones = (numbers >> np.uint32(bit)) & 1
        assert abs(ones.mean() - 1 / 2) < 5 / 2 / ones.size**0.5
        assert abs((ones[:, 1:] ^ ones[:, :-1]).mean() - 1 / 2) < 5 / 2 / ones.size**0.5


@pytest.mark.parametrize("low", [False, True])
def test_chi_square_of_bytes(low: bool) -> None:
    """The highest and the lowest byte, and pairs of half bytes, have 255 degrees of freedom."""
    numbers = randomness.bits(0, "test", PEERS, n=N).numpy().view(np.uint32)
    byte = numbers & 0xFF if low else numbers >> np.uint32(24)
    pairs = byte[:, ::2] // 16 * 16 + byte[:, 1::2] // 16
    for cells in (byte, pairs):
        expected = cells.size / 256
        chi_square = float(
            ((np.bincount(cells.ravel(), minlength=256) - expected) ** 2 / expected).sum()
        )
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


def test_uniform_is_below_one_and_fair() -> None:
    x = randomness.uniform(0, "test", PEERS, n=N)
    assert x.dtype == torch.float32
    assert 0 <= float(x.min()) < 1e-4
    assert 1 - 1e-4 < float(x.max()) < 1
    assert abs(float(x.double().mean()) - 1 / 2) < 5 * (1 / 12 / x.numel()) ** 0.5


# Permutations and generators


def test_permutations_are_of_the_peers_own_examples() -> None:
    sizes = np.array([5, 0, 12, 1])
    order = randomness.permutations(0, "order", [3, 4, 5, 6], 1, sizes=sizes)
    assert order.shape == (4, 12)
    for row, size in zip(order.tolist(), sizes.tolist(), strict=True):
        assert sorted(row[:size]) == list(range(size))
    alone = randomness.permutations(0, "order", [3], 1, sizes=sizes[:1])
    assert torch.equal(alone[0], order[0, :5])
    again = randomness.permutations(0, "order", [5], 2, sizes=sizes[2:3])
    assert not torch.equal(again[0], order[2])


def test_permutations_sort_the_places_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places with equal numbers keep their order, and the largest number is before the padding."""
    numbers = torch.tensor([[5, -(2**31), 2**31 - 1, 5, -1], [2**31 - 1, 3, 3, 0, 0]])
    monkeypatch.setattr(randomness, "bits", lambda *given, **more: numbers.int())
    drawn = randomness.permutations(0, "o", [4, 7], sizes=np.array([5, 3]))
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [[1, 4, 0, 3, 2], [1, 2, 0, 3, 4]]


def test_permutations_are_equally_likely() -> None:
    order = randomness.permutations(0, "order", range(24_000), sizes=np.full(24_000, 4))
    counts = np.bincount((order * torch.tensor([64, 16, 4, 1])).sum(1).numpy())
    counts = counts[counts > 0]
    assert len(counts) == 24
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 23 + 5 * 46**0.5


def test_a_generator_depends_on_its_address_only() -> None:
    draws = [
        randomness.generator(*address).random(3).tolist()
        for address in ((0, "a"), (0, "a"), (1, "a"), (0, "b"))
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert draws[0] != draws[3]
    assert randomness.generator(0, "a", 1).random() != randomness.generator(0, "a", 2).random()


def test_generators_of_peers_are_those_of_one_at_a_time() -> None:
    """Also after a generator has drawn half of a block of numbers."""
    peers = [0, 7, 3, 2**40, 7]
    together = [each.permutation(5).tolist() for each in randomness.generators(9, "a", peers)]
    alone = [randomness.generator(9, "a", peer).permutation(5).tolist() for peer in peers]
    assert together == alone


# Where addresses are used

USES: list[dict[str, Any]] = [
    {"faults": "link_loss+burst+outage:p=0.1+leave:fraction=0.2,at=1+join:fraction=0.2,at=1"
               "+stragglers:fixed=true",
     "bits": 4, "init": "independent", "topology": "erdos_renyi:p=0.8",
     "partition": "dirichlet:alpha=0.5"},
    {"faults": "stragglers",
     "algorithm": "fedavg:fraction=0.8,stragglers=0.5,straggler_policy=fewer",
     "local_epochs": 3,
     "attack": "gaussian:fraction=0.2", "bits": 4, "partition": "shards:per_peer=2"},
    {"algorithm": "fltrust:root=20", "validation": 0.2, "eval_examples": 50,
     "partition": "quantity:alpha=1"},
    {"links": "mixed:phone=0.5,dsl=0.5,compute=lognormal,step_ms=1,sigma=1",
     "attack": "scale:fraction=0.2",
     "model": "mlp:hidden=8,dropout=0.5", "topology": "regular:k=2", "auxiliary": "rotation"},
]  # fmt: skip


def test_no_two_purposes_share_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each purpose is used in one function of the package: no two draws share an address."""
    used: dict[str, set[tuple[str, str]]] = {}
    key = randomness._key

    def spy(seed: int, purpose: str, *rest: Any) -> Any:
        frame = sys._getframe(1)
        while (
            frame.f_globals["__name__"] == "dfl.core.randomness" or frame.f_code.co_name == "draw"
        ):
            assert frame.f_back is not None
            frame = frame.f_back
        used.setdefault(purpose, set()).add((frame.f_globals["__name__"], frame.f_code.co_name))
        return key(seed, purpose, *rest)

    monkeypatch.setattr(randomness, "_key", spy)
    for settings in USES:
        few = {
            "model": "mlp:hidden=8",
            "peers": 6,
            "rounds": 2,
            "examples_per_peer": 30,
            "local_epochs": 1,
        }
        list(simulate(Run(**{**few, **settings})))
    assert len(used) > 15
    assert {purpose: places for purpose, places in used.items() if len(places) > 1} == {}
