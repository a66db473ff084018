"""Misuses from Python end in one line, or run right."""

from pathlib import Path

import pytest

from tests.campaigns.misuse import CASES, Case, attempt

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "one", CASES, ids=lambda one: one.name.encode("ascii", "backslashreplace").decode()
)
def test_misuse(one: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dfl.reporting.plots.figures", lambda *given: {}
    )  # they take a second, and have tests of their own
    attempt(one, tmp_path)


def test_misuses_are_distinct_and_many() -> None:
    assert len({one.name for one in CASES}) == len(CASES) >= 60
