"""Dry runs: the figures that they print, recorded, so that no change of the code moves them."""

from __future__ import annotations

import hashlib
import re

import pytest

from tests.conftest import Command
from tests.support.mpirun import mpirun

LINES = ("peers ", "graph ", "mixing ", "model ", "training ", "server ", "messages ", "memory ",
         "own test ", "different ", " ")  # fmt: skip
"""The beginnings of the lines with figures of a run; those of tables begin with a space."""
RECORDED = {
    "--peers 16": "022b4caa",
    "--peers 8 --topology hypercube --bits 4": "6acad365",
    "--peers 9 --topology torus --mixing lazy --bits 2": "d6c725b6",
    "--peers 12 --topology small_world:k=4,p=0.2 --partition dirichlet:alpha=0.3": "ff4b4abf",
    "--peers 6 --topology complete --aggregator median --attack sign_flip:fraction=0.2": "e2eb1c05",
    "--peers 10 --topology star --faults link_loss:p=0.1": "091ced45",
    "--peers 7 --topology chain --bits 8 --faults link_loss:p=0.2": "be0b23dc",
    "--peers 16 --topology exponential": "a8b9047d",
    "--peers 10 --algorithm fedavg:fraction=0.3": "bfa4c9a4",
    "--peers 10 --algorithm fedavg:broadcast_to=everyone,stragglers=0.5 --share head:1": "aa13266a",
    "--peers 10 --algorithm fedprox:mu=0.1,stragglers=0.5,straggler_policy=drop": "b59b9761",
    "--peers 10 --algorithm fedsgd": "b84c67f6",
    "--peers 10 --algorithm fltrust:root=20 --attack trim:fraction=0.2": "e3ec12e7",
    "--peers 5 --algorithm local_only": "3f919279",
    "--peers 5 --algorithm pooled": "a534da32",
    "--peers 4 --topology ring --share first:1 --init independent --validation 0.2": "068defbf",
    "--peers 6 --partition shards:per_peer=2 --local-steps 5 --lr-schedule cosine": "096e68ea",
    "--peers 6 --model cnn --engine loop --examples-per-peer 20 --links dsl": "4292806c",
    "--peers 6 --bits 1 --algorithm qdfedavgm:exchange=paper --auxiliary supervised": "c6b0d01c",
    "--peers 1 --model softmax --weight-decay 0.1 --momentum 0": "39d9acd1",
}
"""Flags -> the first 8 digits of the SHA-256 of the figures."""


def figures(printed: str) -> str:
    """Return the numbers in the lines of `LINES`, without the words between them."""
    lines = [line for line in printed.splitlines() if line.startswith(LINES)]
    return "\n".join(" ".join(re.findall(r"-?[0-9][0-9,.]*", line)) for line in lines)


@pytest.mark.parametrize("flags", RECORDED)
def test_dry_runs_print_the_figures_that_were_recorded(dfl_run: Command, flags: str) -> None:
    ended = dfl_run("--dry-run", *flags.split())
    assert ended.code == 0, ended.err
    found = figures(ended.out)
    assert hashlib.sha256(found.encode()).hexdigest()[:8] == RECORDED[flags], found


@pytest.mark.parametrize(
    ("flags", "rounds"),
    [
        ("--peers 3 --topology random_regular", "1 round"),
        ("--peers 2 --topology random_matching", "1 round"),
        ("--peers 6 --topology random_out:s=5", "1 round"),
        ("--peers 4 --topology complete", "1 round"),
        ("--peers 8 --topology one_peer_exponential", "3 rounds"),
    ],
)
def test_agreement_is_after_a_period_of_graphs(dfl_run: Command, flags: str, rounds: str) -> None:
    ended = dfl_run("--dry-run", *flags.split())
    assert f"agreement after {rounds}," in ended.out


@pytest.mark.slow
def test_memory_is_that_of_the_fullest_rank() -> None:
    """Of three ranks the first has no peers."""
    command = ["-m", "dfl.run", "--dry-run", "--peers=2", "--bits=4", "--algorithm=choco"]
    two, three = (mpirun(ranks, *command).stdout.splitlines() for ranks in (2, 3))
    lines = [line for line in two if line.startswith(("method ", "memory "))]
    assert "2 rows of memory per peer" in lines[0]
    assert set(lines) <= set(three)
