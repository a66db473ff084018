"""Misuses from Python end in one line, or run correctly."""

from pathlib import Path

import pytest

from tests.campaigns.misuse import CASES, Case, attempt

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "one", CASES, ids=lambda one: one.name.encode("ascii", "backslashreplace").decode()
)
def test_a_misuse_is_refused_or_runs(
    one: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Figures take a second and have tests of their own.
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})
    attempt(one, tmp_path)


def test_misuses_are_distinct_and_many() -> None:
    assert len({one.name for one in CASES}) == len(CASES) >= 60
