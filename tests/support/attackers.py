"""Updates for attackers to see, whole or cut by coordinates as ranks have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfl.core.layout import BLOCK, columns
from dfl.robust.aggregators import Updates
from dfl.robust.attacks import Attack, AttackView

Floats = NDArray[np.float64]


def rows_of(
    n: int, d: int, seed: int = 0, dtype: Any = np.float32, noise: float = 1.0
) -> NDArray[Any]:
    """Updates as honest peers make them: a common direction, and each its own noise, so many times
    as large.
    """
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=d), rng.normal(size=(n, d))
    return (0.01 * (common + noise * own)).astype(dtype)


def seen(
    rows: NDArray[Any], bad: Sequence[int], trusted: NDArray[Any] | None = None, t: int = 3
) -> AttackView:
    """What attackers see of rows (n, d) that peers 10, 11, ... say in round t."""
    n, d = rows.shape
    places = np.array(bad, np.int64)
    return AttackView(
        Updates(rows, np.full(n, 1 / n), trusted), places, 10 + places, slice(0, d), (7, t, "x")
    )


def over_ranks(attack: Attack, whole: AttackView, ranks: int) -> NDArray[Any]:
    """What attackers say where each of some ranks has a part of the coordinates, put together.

    The ranks speak one after the other: what they would add up is checked against what one rank has
    added up.
    """
    sums: list[Floats] = []

    def add(parts: Floats) -> Floats:
        sums.append(parts)
        added: Floats = np.add.reduce(parts, axis=0)
        return added

    attack.say(replace(whole, words=replace(whole.words, total=add)))
    cuts = columns(whole.places.stop, ranks)
    said = [_part(attack, whole, slice(cut.start, cut.stop), iter(sums)) for cut in cuts]
    return np.concatenate(said, axis=1)


def _part(attack: Attack, whole: AttackView, here: slice, sums: Iterator[Floats]) -> NDArray[Any]:
    """What attackers say on one rank."""

    def add(parts: Floats) -> Floats:
        wanted = next(sums)
        first = -(-here.start // BLOCK)
        assert parts.tobytes() == wanted[first : first + len(parts)].tobytes()
        added: Floats = np.add.reduce(wanted, axis=0)
        return added

    words = whole.words
    trusted = None if words.trusted is None else words.trusted[here]
    words = replace(words, rows=words.rows[:, here], trusted=trusted, total=add)
    said = attack.say(replace(whole, words=words, places=here))
    assert next(sums, None) is None
    return said
