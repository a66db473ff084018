"""A `Ragged` is the sequence of arrays that it is made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfl.core.ragged import Ragged

PARTS = st.lists(st.lists(st.integers(0, 2**31), max_size=4), max_size=6)


@given(PARTS)
def test_it_is_a_sequence_of_arrays(parts: list[list[int]]) -> None:
    ragged = Ragged.of([np.array(part, np.int64) for part in parts])
    assert [part.tolist() for part in ragged] == parts
    assert len(ragged) == len(parts)
    assert [part.tolist() for part in ragged[1:3]] == parts[1:3]
    assert ragged.values.dtype == np.int64
    assert Ragged.of(ragged) is ragged
    owners = [i for i, part in enumerate(parts) for _ in part]
    assert ragged.owners.tolist() == owners
    assert ragged.block(range(len(parts))).tolist() == [value for part in parts for value in part]


@given(PARTS)
def test_every_array_is_sorted_by_itself(parts: list[list[int]]) -> None:
    ragged = Ragged.of([np.array(part, np.int64) for part in parts]).sorted()
    assert [part.tolist() for part in ragged] == [sorted(part) for part in parts]


@given(PARTS, st.data())
def test_some_arrays_keep_their_order(parts: list[list[int]], data: st.DataObject) -> None:
    which = data.draw(st.lists(st.integers(0, len(parts) - 1)) if parts else st.just([]))
    ragged = Ragged.of([np.array(part, np.int64) for part in parts])
    some = ragged.some(np.array(which, np.int64))
    assert [part.tolist() for part in some] == [parts[k] for k in which]


def test_a_block_is_some_consecutive_arrays() -> None:
    ragged = Ragged(np.arange(6), np.array([2, 0, 3, 1]))
    assert ragged.block(range(1, 3)).tolist() == [2, 3, 4]
    assert ragged.block(range(2, 2)).tolist() == []
    assert ragged[-1].tolist() == [5]
    with pytest.raises(IndexError):
        ragged[4]
