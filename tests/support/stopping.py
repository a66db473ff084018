"""Runs that crash in this process, and the files that must be equal after they were resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import dfl
from dfl.simulation import checkpointing
from dfl.simulation.run_state import RunState
from dfl.store import manifest

CLOCKS = ["seconds", "wire_bytes"]
"""The columns that may differ between launches."""


class Cut(Exception):  # noqa: N818
    """Ends a run, as a crash does."""


@contextmanager
def cut_after(t: int) -> Iterator[None]:
    """Let runs crash after their round t, after the checkpoint that may be due then."""
    known = checkpointing.keep

    def keep(run_state: RunState, *more: Any) -> None:
        known(run_state, *more)
        if run_state.t == t:
            raise Cut

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "keep", keep)
        yield


def crash(run: dfl.Run, t: int) -> None:
    """Run until a crash after round t."""
    with cut_after(t), pytest.raises(Cut):
        list(dfl.simulate(run))


def same(one: Path, other: Path) -> None:
    """Assert that two folders hold the same run, to the bit, whatever the launches."""
    assert (one / "state.safetensors").read_bytes() == (other / "state.safetensors").read_bytes()
    for table, clocks in (("metrics.csv", CLOCKS), ("peers.csv", ["rank"])):
        a, b = (
            pd.read_csv(folder / table, dtype=str).drop(columns=clocks) for folder in (one, other)
        )
        pd.testing.assert_frame_equal(a, b)


def rewrite(folder: Path, **changes: Any) -> None:
    """Write a run's record with changed values; it then has no checksums of files."""
    manifest.write(folder, record(folder) | changes)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found
