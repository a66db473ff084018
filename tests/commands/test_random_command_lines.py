"""Random command lines of `tests.campaigns.commands`, in this process."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from tests.campaigns.commands import campaign

pytestmark = pytest.mark.slow


def test_random_command_lines_finish_or_are_refused_and_change_no_other_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})
    counted, bad = campaign(40, st.just(0), 0)
    assert not bad, "\n".join(bad)
    assert counted["done"] > 2
    assert counted["refused"] > 10
