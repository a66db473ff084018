"""A run whose folder was damaged is mended, or refused in one line; `tests.campaigns.runs` does
more of it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.campaigns.runs import bench

pytestmark = pytest.mark.slow


def test_a_damaged_run_is_mended_or_refused_in_one_line() -> None:
    with bench(ranks=False) as made:
        ends = Counter(made.trial(n, False, ("resume", "load")) for n in range(25))
    assert ends["resume: same bytes"] > 2
    assert ends["resume: one line"] > 2
