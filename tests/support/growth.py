"""How much longer one piece of work takes than another, in one session."""

from __future__ import annotations

import time
from collections.abc import Callable

TURNS = 3
"""How often each is timed."""


def growth(work: Callable[[], object], reference: Callable[[], object]) -> float:
    """Return the processor time of `work` over that of `reference`: the least of `TURNS` of each.

    Processor time does not count the seconds in which other processes hold the cores.
    """
    taken, usual = (min(_seconds(each) for _ in range(TURNS)) for each in (work, reference))
    return taken / usual


def _seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun
