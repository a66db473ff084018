"""Views for attackers, whole or cut by coordinates as ranks have them."""

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
    """Return updates (n, d) as honest peers send them: a common direction, and noise of each peer.

    Args:
        n, d: senders and coordinates.
        seed: of the random numbers.
        dtype: of the updates.
        noise: size of a peer's noise, in units of the common direction's size.
    """
    rng = np.random.default_rng(seed)
    common = rng.normal(size=d)
    own = rng.normal(size=(n, d))
    return (0.01 * (common + noise * own)).astype(dtype)


def view_of(
    rows: NDArray[Any], attackers: Sequence[int], reference: NDArray[Any] | None = None, t: int = 3
) -> AttackView:
    """Return the view of attackers on rows (n, d) that peers 10, 11, ... send in round t."""
    n, d = rows.shape
    positions = np.array(attackers, np.int64)
    return AttackView(
        updates=Updates(rows, np.full(n, 1 / n), reference),
        attackers=positions,
        owners=10 + np.arange(n),
        coordinates=slice(0, d),
        seed=7,
        t=t,
        slot="x",
    )


def over_ranks(attack: Attack, whole: AttackView, ranks: int) -> NDArray[Any]:
    """Return what attackers send where each of some ranks has a part of the coordinates, joined.

    The ranks are computed one after another: the sums that a rank would add up over all ranks are
    checked against the sums that a single rank adds up.
    """
    sums: list[Floats] = []

    def add(parts: Floats) -> Floats:
        sums.append(parts)
        added: Floats = np.add.reduce(parts, axis=0)
        return added

    attack.falsify(replace(whole, updates=replace(whole.updates, total=add)))
    cuts = columns(whole.coordinates.stop, ranks)
    sent = [_part(attack, whole, slice(cut.start, cut.stop), iter(sums)) for cut in cuts]
    return np.concatenate(sent, axis=1)


def _part(attack: Attack, whole: AttackView, here: slice, sums: Iterator[Floats]) -> NDArray[Any]:
    """Return what attackers send on the rank that has the coordinates `here`."""

    def add(parts: Floats) -> Floats:
        expected = next(sums)
        first = -(-here.start // BLOCK)
        assert parts.tobytes() == expected[first : first + len(parts)].tobytes()
        added: Floats = np.add.reduce(expected, axis=0)
        return added

    updates = whole.updates
    reference = None if updates.reference is None else updates.reference[here]
    updates = replace(updates, rows=updates.rows[:, here], reference=reference, total=add)
    sent = attack.falsify(replace(whole, updates=updates, coordinates=here))
    assert next(sums, None) is None
    return sent
