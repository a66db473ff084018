"""Slices of rows."""

import pytest
import torch

from dfl.core import rows


@pytest.mark.parametrize(("p", "m"), [(0, 5), (1, 5), (7, 0), (7, 1), (7, 3), (7, 10), (7, 100)])
def test_slices_are_every_row_once(monkeypatch: pytest.MonkeyPatch, p: int, m: int) -> None:
    monkeypatch.setattr(rows, "COORDINATES", 10)
    found = rows.slices(torch.zeros(p, m))
    assert [row for some in found for row in range(p)[some]] == list(range(p))
    assert all((some.stop - some.start) * m <= 10 or some.stop - some.start == 1 for some in found)
