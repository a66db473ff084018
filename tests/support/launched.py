"""Runs the cells of a page in this process, which saves each of them the start of another."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import dfl
from dfl.config import Run
from experiments import common


@contextmanager
def here() -> Iterator[list[str]]:
    """Launches of a page stay in this process; yields the names of the cells that were launched."""
    launched: list[str] = []

    def launch(folder: Path, run: Run, tail: range) -> None:
        launched.append(folder.name)
        run = replace(run, eval_every=1) if len(tail) > 1 else run
        for _ in dfl.simulate(replace(run, out=folder)):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "_launch", launch)
        yield launched
