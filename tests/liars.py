"""Words for attackers to see, and ranks that cut them by coordinates and speak at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfl.aggregators import Words
from dfl.attacks import Attack, Seen
from dfl.layout import columns

Floats = NDArray[np.float64]


def rows_of(n: int, d: int, seed: int = 0, dtype: Any = np.float32) -> NDArray[Any]:
    """Updates as honest peers make them: a common direction, and each its own noise."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=d), rng.normal(size=(n, d))
    return (0.01 * (common + own)).astype(dtype)


def seen(rows: NDArray[Any], bad: Sequence[int], trusted: NDArray[Any] | None = None, t: int = 3) -> Seen:
    """What attackers see of rows (n, d) that peers 10, 11, ... say in round t."""
    n, d = rows.shape
    places = np.array(bad, np.int64)
    return Seen(Words(rows, np.full(n, 1 / n), trusted), places, 10 + places, slice(0, d), (7, t, "x"))


def over_ranks(attack: Attack, whole: Seen, ranks: int) -> NDArray[Any]:
    """What attackers say where each of some ranks has a part of the coordinates, put together."""
    barrier, parts = Barrier(ranks, timeout=60), [np.empty(0)] * ranks

    def total(rank: int) -> Callable[[Floats], Floats]:
        def add(blocks: Floats) -> Floats:
            parts[rank] = blocks
            barrier.wait()
            added: Floats = np.add.reduce(np.concatenate(parts), axis=0)
            barrier.wait()
            return added

        return add

    def speak(rank: int) -> NDArray[Any]:
        cut = columns(whole.places.stop, ranks)[rank]
        here, words = slice(cut.start, cut.stop), whole.words
        trusted = None if words.trusted is None else words.trusted[here]
        words = replace(words, rows=words.rows[:, here], trusted=trusted, total=total(rank))
        return attack.say(replace(whole, words=words, places=here))

    with ThreadPoolExecutor(ranks) as pool:
        return np.concatenate(list(pool.map(speak, range(ranks))), axis=1)
