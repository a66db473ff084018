"""The start of a job: ranks that do not arrive are named, and no others, and the job ends."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dfl.comm import startup
from dfl.comm.processes import ours
from dfl.comm.startup import ELSEWHERE, RANKS, SIGN, RankSign, StartLimit, verdict
from dfl.run import _startup_timeout
from tests.conftest import eventually
from tests.support.mpirun import ENV, ROOT, mpirun_command

WAITS = RankSign((10,), stopped=False, runs=False, waits=True, ticks=5)
IDLE = replace(WAITS, pids=(11,), waits=False)
STOPPED = replace(IDLE, pids=(12, 13), stopped=True)

LATE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["PMI_RANK"])
how, late, *tokens = sys.argv[1:]
def stop(*given):
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == int(late) and how == "sleeps":
    time.sleep(1000)
if rank == int(late) and how == "ends":
    sys.exit(0)
if rank == int(late) and how == "stops":
    stop()
import dfl.run, dfl.simulation
if rank == int(late):
    if rank == 0:
        dfl.run.read_command = stop
    else:
        dfl.run._simulate = stop
sys.argv = ["run.py", *tokens]
sys.exit(dfl.run.main())
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "late", "ranks", "reason"),
    [
        ("sleeps", 0, 2, "idle"),  # before MPI is up
        ("stops", 1, 2, "stopped"),
        ("ends", 2, 3, "no process"),
        # While it reads the command line, for which all others wait.
        ("stops with MPI", 0, 2, "stopped"),
        ("stops with MPI", 2, 3, "stopped"),  # before it shows signs of life to the others
    ],
)
def test_a_rank_that_does_not_start_is_named(
    tmp_path: Path, how: str, late: int, ranks: int, reason: str
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    flags = ["--timeout", "3", "--rounds", "1", "--out", str(tmp_path / "run")]
    command = mpirun_command(ranks, str(tmp_path / "late.py"), how, str(late), *flags)
    begun = time.monotonic()
    job = subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode != 0
    assert time.monotonic() - begun < 30
    (line,) = [line for line in errors.splitlines() if line.startswith("dfl: ")]
    assert f"rank {late} " in line
    assert reason in line
    assert "--timeout 3" in line
    assert "Traceback" not in errors
    assert eventually(lambda: not running(str(tmp_path / "late.py")), 5)


def running(text: str) -> list[int]:
    """Return the processes with a text in their command line."""
    places = {
        each.pid: Path(f"/proc/{each.pid}/cmdline") for each in ours() if each.state not in "ZX"
    }
    return [
        pid
        for pid, place in places.items()
        if place.exists() and os.fsencode(text) in place.read_bytes()
    ]


def test_ranks_that_are_stopped_or_idle_are_late() -> None:
    line, printer = verdict(0, 3, {1: STOPPED, 2: WAITS}, {}, 0.0)
    assert (line, printer) == ("rank 1 (process 13) is stopped", 0)
    line, _ = verdict(2, 3, {0: IDLE, 1: IDLE}, {0: IDLE, 1: IDLE}, 0.0)
    assert line == "ranks 0, 1 (processes 11, 11) are idle and did not arrive"


def test_the_first_rank_that_waits_prints() -> None:
    assert verdict(2, 4, {0: STOPPED, 1: WAITS, 3: WAITS}, {}, 0.0)[1] == 1
    assert verdict(2, 4, {0: STOPPED, 1: replace(WAITS, stopped=True), 3: WAITS}, {}, 0.0)[1] == 2


@pytest.mark.parametrize("busy", [replace(IDLE, ticks=6), replace(IDLE, runs=True)])
def test_a_rank_that_computes_is_not_late(busy: RankSign) -> None:
    assert verdict(0, 3, {1: busy, 2: WAITS}, {1: IDLE, 2: WAITS}, 1e6)[0] == ""
    assert verdict(0, 2, {1: IDLE}, {}, 0.0)[0] == ""  # seen for the first time


def test_ranks_elsewhere_are_named_by_their_hosts_first() -> None:
    assert verdict(0, 4, {1: WAITS}, {1: WAITS}, ELSEWHERE - 1)[0] == ""
    assert verdict(0, 4, {1: WAITS}, {1: WAITS}, ELSEWHERE)[0].startswith(
        "ranks 2, 3 did not arrive"
    )
    assert verdict(0, 4, {1: WAITS}, {1: WAITS}, 0.0, here=True)[0].startswith(
        "ranks 2, 3 did not arrive"
    )
    assert verdict(0, 4, {1: WAITS}, {1: WAITS}, -500.0, here=True)[0].startswith(
        "ranks 2, 3 did not arrive"
    )
    assert verdict(0, 2, {1: STOPPED}, {1: STOPPED}, -500.0, here=True)[0] == ""
    assert "all ranks" in verdict(0, 2, {1: WAITS}, {1: WAITS}, ELSEWHERE)[0]


def test_the_wait_is_counted_only_while_this_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that works before it waits names the late ones as soon as one that waits at once."""
    late: list[tuple[float, str, int]] = []
    waits = False
    monkeypatch.setattr(startup, "GAPS", (0.02, 0.02))
    monkeypatch.setattr(startup, "ELSEWHERE", 0.05)
    monkeypatch.setattr(startup, "seen", lambda: {1: STOPPED})
    monkeypatch.setattr(StartLimit, "_late", lambda self, *line: late.append(line))
    start = StartLimit(0, 2, timeout=0.1, waits=lambda: waits)
    start.begin()
    try:
        time.sleep(0.3)
        assert not late
        waits = True
        assert eventually(lambda: bool(late), 5)
    finally:
        start.met()
    assert late[0][1:] == ("rank 1 (process 13) is stopped", 0)
    assert 0.1 <= late[0][0] < 0.3


SHOWS = (
    f"import os, time; os.pwrite(os.memfd_create('{SIGN}-7'), b'waits', 0); "
    "print(flush=True); time.sleep(60)"
)
WRAPS = (
    "import subprocess, sys; "
    f"sys.exit(subprocess.run([sys.executable, '-c', {SHOWS!r}]).returncode)"
)
SLEEPS = "import time; print(flush=True); time.sleep(60)"
LOOKS = (
    "from dfl.comm.startup import seen; "
    "print({rank: (len(s.pids), s.waits) for rank, s in seen().items()})"
)


@pytest.mark.mpi
@pytest.mark.parametrize("name", RANKS)
def test_ranks_are_found_by_their_launcher(name: str) -> None:
    """Ranks of the same launcher are found, also behind wrappers, and no others."""
    plain = {key: value for key, value in ENV.items() if key not in RANKS}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", text],
            env={**plain, name: rank},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for text, rank in ((WRAPS, "7"), (SLEEPS, "8"))
    ]
    try:
        for job in jobs:
            assert job.stdout
            job.stdout.readline()
        look = [sys.executable, "-c", LOOKS]
        found = subprocess.run(
            look, env={**plain, name: "0"}, cwd=ROOT, capture_output=True, text=True
        ).stdout
        assert found == "{7: (2, True), 8: (1, False)}\n"
        launch = [
            sys.executable,
            "-c",
            f"import os, subprocess; os.environ['{name}'] = '0'; subprocess.run({look})",
        ]
        assert (
            subprocess.run(launch, env=plain, cwd=ROOT, capture_output=True, text=True).stdout
            == "{}\n"
        )
    finally:
        for job in jobs:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        ("", 600.0),
        ("--timeout 5", 5.0),
        ("--rounds 3 --timeout=7.5", 7.5),
        ("--timeout", 600.0),
        ("--timeout soon", 600.0),
        ("--timeout -1", 600.0),
        ("--timeout nan", 600.0),
    ],
)
def test_the_timeout_is_read_before_the_command_line_is_checked(
    tokens: str, seconds: float
) -> None:
    assert _startup_timeout(tokens.split()) == seconds
