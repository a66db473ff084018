"""Random numbers by address: seed, purpose, peer, round, slot and step.

There is no generator with a state. A number is a keyed hash of its address and of its place in the
row, so every rank can compute the numbers of every peer, in any order, and gets the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
else:
    from dfl.core.lazy import torch

_GOLDEN = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1
_LOW = (1 << 32) - 1
Part = int | str
Ids: TypeAlias = "Sequence[int] | NDArray[np.int64]"
_Uint64 = TypeVar("_Uint64", int, "NDArray[np.uint64]")


def bits(
    seed: int,
    purpose: str,
    peers: Ids,
    *address: Part,
    n: int | slice,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return 32 random bits for every place of every peer's row.

    A row is the counter 0..n-1 passed through a keyed 32-bit permutation: the three multiplications
    of "triple32" (C. Wellons, hash-prospector), with one half of a 64-bit key added before and the
    other half mixed in between. The number at place k depends neither on n nor on the other places
    and peers of the call.

    Args:
        seed: the run's seed.
        purpose: what the numbers are for; two purposes never share numbers.
        peers: the p global peer ids, one row each.
        address: the rest of the address of this draw: the round, the slot, the step, the other
            peer.
        n: numbers per row; or a slice of its places, since a long row may be drawn in pieces.
        device: the device of the result; the numbers are the same on all.

    Returns:
        (p, n) int32, uniform over all of its values.
    """
    places = n if isinstance(n, slice) else slice(0, n)
    return draws(seed, purpose, peers, *address, device=device)(slice(None), places)


def draws(
    seed: int,
    purpose: str,
    peers: Ids,
    *address: Part,
    device: torch.device | str = "cpu",
) -> Callable[[slice, slice], torch.Tensor]:
    """Return draw(rows, places), the numbers of `bits` for some of the peers and places.

    The keys of all peers are computed once, by the first draw. Arguments as for `bits`.
    """

    on_processor = torch.device(device).type == "cpu"

    @cache
    def keys() -> tuple[Any, Any]:
        key = _key(seed, purpose, np.asarray(peers, dtype=np.uint64), *address)
        first, second = (half[:, None] for half in _halves(key))
        if on_processor:
            return first, second
        return _on(device, first), _on(device, second)

    def draw(rows: slice, places: slice) -> torch.Tensor:
        first, second = (half[rows] for half in keys())
        n = places.stop - places.start
        if on_processor:  # numpy shifts unsigned numbers, which torch cannot; nothing is masked
            hashed = _counter(n) + (first + np.uint32(places.start & _LOW))
            scratch = np.empty_like(hashed)
            _triple32(hashed, second, lambda k: np.right_shift(hashed, k, out=scratch), int)
            return torch.from_numpy(hashed.view(np.int32))
        x: torch.Tensor = _on(device, _counter(n)) + (first + _int32(places.start))
        _triple32(x, second, lambda k: (x >> k) & ((1 << (32 - k)) - 1), _int32)
        return x

    return draw


def uniform(
    seed: int,
    purpose: str,
    peers: Ids,
    *address: Part,
    n: int | slice,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return uniform numbers in [0, 1) of 24 bits, (p, n) float32; arguments as for `bits`."""
    return (
        bits(seed, purpose, peers, *address, n=n, device=device)
        .bitwise_right_shift_(8)
        .bitwise_and_(0xFFFFFF)
        * 2.0**-24
    )


def permutations(
    seed: int,
    purpose: str,
    peers: Ids,
    *address: Part,
    sizes: NDArray[np.int64],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return a random order of its own `sizes[i]` examples for every peer.

    Args:
        seed, purpose, peers, address, device: as in `bits`.
        sizes: (p,) int64, the number of examples of each peer.

    Returns:
        (p, max(sizes)) int64; the first sizes[i] entries of row i are a permutation of
        range(sizes[i]).
    """
    longest = int(sizes.max())
    order = bits(seed, purpose, peers, *address, n=longest, device=device)
    if int(sizes.min()) < longest:
        beyond = torch.from_numpy(np.arange(longest) >= sizes[:, None])
        order.masked_fill_(beyond.to(device), 2**31 - 1)  # places beyond its examples sort last
    if order.device.type != "cpu":
        return torch.argsort(order, dim=1, stable=True)
    # The same, up to ten times as fast: places are the lower halves of what is sorted.
    keyed = order.numpy().astype(np.int64) << 32 | np.arange(longest)
    keyed.sort(axis=1)
    return torch.from_numpy(keyed & _LOW)


def generator(seed: int, purpose: str, *address: Part) -> np.random.Generator:
    """Return a numpy generator for draws common to all peers: graphs, partitions, subsets."""
    key = _key(seed, purpose, np.zeros(1, dtype=np.uint64), *address)
    return np.random.Generator(np.random.Philox(key=int(key[0])))


def generators(seed: int, purpose: str, peers: Ids) -> Iterator[np.random.Generator]:
    """Yield `generator(seed, purpose, peer)` for every peer, each until the next one is asked for.

    One generator gets one key after the other: making one takes ten times as long.
    """
    philox = np.random.Philox(key=0)
    drawing = np.random.Generator(philox)
    state = philox.state
    parts = np.asarray(peers, dtype=np.uint64)
    for key in _key(seed, purpose, np.zeros(1, dtype=np.uint64), parts):
        state["state"]["key"][0] = key
        philox.state = state
        yield drawing


def _key(
    seed: int, purpose: str, peers: NDArray[np.uint64], *address: Part | NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return one 64-bit key per peer, (p,), from an address; a part may be one number for each."""
    key: Any = _hash(seed)
    for part in (purpose, *address):
        key = _mix(key ^ (part if isinstance(part, np.ndarray) else _hash(part)))
    return _mix(np.uint64(key) ^ _mix(peers + np.uint64(_GOLDEN)))


def _hash(part: Part) -> int:
    """Return 64 bits for one part of an address; a name is hashed alike in every process."""
    if isinstance(part, str):
        return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
    return part & _ALL


def _mix(x: _Uint64) -> _Uint64:
    """Apply one step of SplitMix64 (Steele, Lea, Flood 2014) to an integer or an array."""
    z: Any = x  # numpy's types know no uint64 array plus int
    z = (z + _GOLDEN) & _ALL
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
    return z ^ (z >> 31)  # type: ignore[no-any-return]


def _halves(key: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    return (key & _LOW).astype(np.uint32), (key >> 32).astype(np.uint32)


@lru_cache(maxsize=4)
def _counter(n: int) -> NDArray[np.uint32]:
    """Return the numbers 0..n-1, which are not to be written to.

    They are cached since making them costs as much as a quarter of the hash.
    """
    return np.arange(n, dtype=np.uint32)


def _on(device: torch.device | str, numbers: NDArray[np.uint32]) -> torch.Tensor:
    """Return the bits of some numbers on a device, int32."""
    return torch.from_numpy(numbers.view(np.int32)).to(device)


def _triple32(
    x: Any, second: Any, shifted: Callable[[int], Any], factor: Callable[[int], int]
) -> None:
    """Hash the rows of x (p, n) in place.

    Args:
        x: counters plus one half of each row's key.
        second: (p, 1), the other half.
        shifted: returns x shifted to the right, with zeros from the left.
        factor: returns an unsigned number in the type of x.
    """
    x ^= shifted(17)
    x *= factor(0xED5AD4BB)
    x ^= shifted(11)
    x *= factor(0xAC4C1B51)
    x ^= second
    x ^= shifted(15)
    x *= factor(0x31848BAB)
    x ^= shifted(14)


def _int32(value: int) -> int:
    """Return the low 32 bits of an integer as a signed one."""
    return ((value + (1 << 31)) & _LOW) - (1 << 31)
