"""The profile of a run, `--profile`: a table, and the callback that writes it with a trace.

DIR/profile/table.csv   a row per rank and phase
DIR/profile/trace.json  the phases by time, for chrome://tracing or ui.perfetto.dev
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.core.files import atomically, make_directory, writing
from dfl.core.profiling import PHASES, Profiles
from dfl.store.callbacks import Callback, Outcome

MOST_RANKS = 8
"""The most ranks that have a column of their own in the table on the terminal."""
COLUMNS = ("rank", "phase", "calls", "seconds", "share")


class ProfileFiles(Callback):
    """Writes the profile of a run.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def finish(self, outcome: Outcome) -> None:
        """Write the table and the trace.

        Raises:
            InputError: the folder cannot be written to.
        """
        if outcome.profile is None:
            return
        with writing(str(self.folder)):
            make_directory(self.folder)
            with atomically(self.folder / "table.csv") as part, part.open("w", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerow(COLUMNS)
                rows.writerows(_rows(outcome.profile))
            with atomically(self.folder / "trace.json") as part:
                part.write_text(json.dumps({"traceEvents": trace(outcome.profile)}))


def table(profiles: Profiles) -> str:
    """Return the seconds and the share of each phase as text.

    The ranks have columns of their own; where they are more than `MOST_RANKS`, the columns are the
    mean, the least and the most over the ranks.
    """
    seconds = profiles.table[:, :, 1] / 1e9  # (ranks, phases)
    mean = seconds.mean(0)
    heads, columns = ["mean", "share"], [_numbers(mean), _percents(mean)]
    if 1 < len(seconds) <= MOST_RANKS:
        heads += [f"rank {rank}" for rank in range(len(seconds))]
        columns += [_numbers(each) for each in seconds]
    elif len(seconds) > MOST_RANKS:
        heads += ["least", "most"]
        columns += [_numbers(seconds.min(0)), _numbers(seconds.max(0))]
    width = max(map(len, PHASES))
    lines = [f"{'seconds':<{width}}" + "".join(f"{head:>10}" for head in heads)]
    for k, phase in enumerate(PHASES):
        if profiles.table[:, k, 0].any():
            lines.append(f"{phase:<{width}}" + "".join(f"{column[k]:>10}" for column in columns))
    return "\n".join(lines)


def trace(profiles: Profiles) -> list[dict[str, object]]:
    """Return the events of a profile as those of Chrome's trace format; a rank is a process."""
    return [
        {
            "name": PHASES[phase], "ph": "X", "pid": rank, "tid": 0,
            "ts": begin / 1e3, "dur": (end - begin) / 1e3,
        }
        for rank, phase, begin, end in profiles.events.tolist()
    ]  # fmt: skip


def _rows(profiles: Profiles) -> list[tuple[object, ...]]:
    return [
        (rank, phase, int(calls), spent / 1e9, spent / whole)
        for rank, counted in enumerate(profiles.table)
        for whole in [max(1, int(counted[:, 1].sum()))]
        for phase, (calls, spent) in zip(PHASES, counted.tolist(), strict=True)
    ]


def _numbers(seconds: NDArray[np.float64]) -> list[str]:
    return [f"{each:.3f}" for each in seconds]


def _percents(seconds: NDArray[np.float64]) -> list[str]:
    return [f"{each:.1%}" for each in seconds / max(seconds.sum(), 1e-9)]
