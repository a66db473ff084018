"""Random command lines of `python -m dfl.run`, with hostile paths, in a folder with other files.

Each finishes, diverges, or is refused in one line within a minute, and does not change the other
files.

python -m tests.campaigns.commands 600       600 command lines
python -m tests.campaigns.commands 600 7     600 command lines of seed 7
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import dfl
from dfl.core.registry import flag
from dfl.run import main
from tests.simulation import test_fuzz
from tests.support.mpirun import ENV, mpirun_command

SECONDS = 60
"""The time limit of a command line; a longer one counts as a hang."""
CODES = {0: "done", 2: "refused", 3: "diverged"}

FOREIGN = (
    "theirs",
    "theirs/thesis",
    "theirs/notes.txt",
    "theirs/fifo",
    "theirs/socket",
    "theirs/link",
    "theirs/folder",
    "theirs/dangling",
    "theirs/loop",
    "theirs/links",
    "theirs/hidden",
    "theirs/caf\udce9",
    "theirs/two\nlines",
    "theirs/line\u2028end",
    'theirs/it\'s "so"',
    "theirs/other",
    "theirs/damaged",
    "theirs/deep",
    "theirs/unrun",
    "theirs/run.toml",
    "theirs/bad.toml",
    "theirs/huge.toml",
    "theirs/graph.txt",
    "theirs/w.npz",
    "theirs/links.csv",
    ".",
    "..",
)
"""Paths of files of the user, which `plant` writes."""
NEW = (
    "new",
    "new/below/it",
    "n" * 300,
    "d/" * 2500,
    "new\nline",
    "new\u2028line",
    "new\x1b[31m",
    "new-caf\udce9",
    "new 'n' \"q\"",
    "new;echo $HOME",
    "-new",
    "~nobody/new",
    "theirs/notes.txt/new",
    "theirs/loop/new",
    "/proc/new",
    "theirs/dangling/new",
    "",
)
"""Paths that do not exist."""
MADE = ("new", "-new", "~nobody", "runs")
"""Prefixes of the names that a run may create."""
OURS = ("ours/finished", "ours/stopped")
"""Run directories, which may change."""
ANYWHERE = st.sampled_from((*FOREIGN, *NEW, *OURS))
NOISE = st.sampled_from(
    [
        ("--help",),
        ("--dry-run",),
        ("--tensorboard",),
        ("--nonsense", "1"),
        ("stray",),
        ("--",),
        ("--peers",),
        ("--rounds", "1e3"),
        ("--seed", "9" * 40),
        ("--lr", "nan"),
        ("--share", ""),
        ("--model", "mlp:hidden=\udce9"),
        ("--topology", "\u2028"),
        ("--peers", "4", "--peers", "5"),
        ("--timeout", "1"),
        ("--log-level", "debug"),
        ("--log-level", "loud\nloud"),
        ("--device", "cuda:7"),
        ("--checkpoint-every", "1"),
        ("--until", "accuracy=\x1b"),
        ("--dataset", "mnist"),
        ("--dataset", "cifar10"),
        ("--dataset", "adult"),
    ]
)
FILES = ("--out", "--resume", "--config", "--init-from", "--data-dir")


@dataclass(frozen=True)
class Command:
    """A command line and its number of ranks; with 0 it runs in this process."""

    tokens: tuple[str, ...]
    ranks: int


@dataclass(frozen=True)
class Ended:
    """The exit code of a command line, or a description of another ending, and its output."""

    code: int | str
    out: str
    err: str


def commands(ranks: st.SearchStrategy[int]) -> st.SearchStrategy[Command]:
    """Return a strategy for command lines of settings, paths, and sometimes an odd argument."""
    with mock.patch.dict(test_fuzz.KINDS, {"Path": ANYWHERE}):
        some = test_fuzz.configurations()
    paths = st.dictionaries(st.sampled_from(FILES), ANYWHERE, max_size=2)
    noise = st.one_of(st.just(()), st.just(()), NOISE)

    def typed(
        values: dict[str, Any], paths: dict[str, str], odd: tuple[str, ...], ranks: int
    ) -> Command:
        plain = {flag(name): value for name, value in values.items() if value not in (None, False)}
        flags = [f"{name}={value}" for name, value in paths.items()]
        for name, value in plain.items():
            flags += [name] if value is True else [name, str(value)]
        return Command((*flags, *odd), ranks)

    return st.builds(typed, some, paths, noise, ranks)


def plant(folder: Path) -> None:
    """Fill a folder with files of the user, some of them named as those of a run."""
    theirs = folder / "theirs"
    texts = {
        "notes.txt": "the only copy",
        "thesis/chapter.tex": "text",
        "thesis/figures/graph.png": "picture",
        "thesis/checkpoint/round-1.json": "{}",
        "thesis/checkpoint/best.pt": "weights",
        "thesis/metrics.csv": "a\n1",
        "thesis/state.safetensors": "state",
        "thesis/peers.csv": "x",
        "thesis/heartbeats/monday": "72",
        "thesis/logs/rank-0.log": "log",
        "thesis/report.html": "<p>",
        "thesis/output.log": "output",
        "hidden/.keep": "",
        "caf\udce9/a": "1",
        "two\nlines/a": "1",
        "line\u2028end/a": "1",
        'it\'s "so"/a': "1",
        "links/a": "1",
        "other/run.json": '{"run": "tests", "exit": 0}',
        "other/results.txt": "1",
        "damaged/run.json": "\udcff{",
        "deep/run.json": "[" * 10**5,
        "unrun/run.json/a": "1",
        "unrun/metrics.csv/a": "1",
        "unrun/.lock/a": "1",
        "run.toml": "local_steps = 2\nrounds = 1\n",
        "bad.toml": "rounds = [",
        "graph.txt": "0 1\n1 2\n",
        "w.npz": "PK\x03\x04",
        "links.csv": "sender,receiver,mbps,latency_ms\n0,1,1,1\n",
    }
    for name, text in texts.items():
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_bytes(os.fsencode(text))
    for name, target in {
        "link": "notes.txt",
        "folder": "thesis",
        "dangling": "nowhere",
        "loop": "loop",
        "links/.lock": "../notes.txt",
        "links/metrics.csv": "../notes.txt",
        "links/logs": "../thesis/logs",
        "links/.run.json.part": "../notes.txt",
        "links/checkpoint": "../thesis/checkpoint",
        "links/heartbeats": "../thesis/heartbeats",
        "links/figures": "../thesis/figures",
        "links/run.json": "../other/run.json",
    }.items():
        (theirs / name).symlink_to(target)
    os.mkfifo(theirs / "fifo")
    with (theirs / "huge.toml").open("wb") as file:
        file.truncate(2**33)
    with socket.socket(socket.AF_UNIX) as made, chdir(theirs):
        made.bind("socket")


def seen(folder: Path, made: tuple[str, ...] = ()) -> dict[str, tuple[object, ...]]:
    """Return mode, inode, size and content of everything in a folder, by path.

    Links are not followed. The run directories and names that start with one of `made` are left
    out.
    """
    found: dict[str, tuple[object, ...]] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if name != "ours" and not name.startswith(made or "/")
        ]
        for name in (*folders, *files):
            path = os.path.join(place, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode) and status.st_size < 2**20:
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            found[os.path.relpath(path, folder)] = (status.st_mode, status.st_ino, size, content)
    return found


def make_ours(folder: Path) -> None:
    """Write a finished run, and one that was interrupted and has a checkpoint."""
    few = dfl.Run(
        peers=4, rounds=2, model="softmax", examples_per_peer=12, checkpoint_every=1, eval_every=1
    )
    for name in OURS:
        rows = dfl.simulate(dfl.Run.from_dict(few.to_dict() | {"out": str(folder / name)}))
        for row in rows:
            if name.endswith("stopped") and row["round"] == 1:
                rows.close()  # type: ignore[attr-defined]
                break


def here(tokens: tuple[str, ...]) -> Ended:
    """Run a command line in this process."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors=how)
        for how in ("strict", "backslashreplace")
    )
    code: int | str
    with (
        mock.patch.multiple(sys, argv=["run.py", *tokens], stdout=out, stderr=err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        try:
            with test_fuzz.in_time(SECONDS):
                code = main()
        except test_fuzz.Hang:
            code = f"no end after {SECONDS} s"
        except SystemExit as ended:
            code = f"SystemExit {ended.code}"
        except Exception:
            code = "Traceback " + traceback.format_exc()[-1500:]
    printed = []
    for stream in (out, err):
        stream.flush()
        printed.append(stream.buffer.getvalue().decode())
    return Ended(code, *printed)


def launched(command: Command) -> Ended:
    """Run a command line in new processes, under mpirun if it has several ranks."""
    start = mpirun_command(command.ranks) if command.ranks > 1 else [sys.executable]
    line = [*map(os.fsencode, start), b"-m", b"dfl.run", *map(os.fsencode, command.tokens)]
    job = subprocess.Popen(
        line,
        env={**ENV, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=SECONDS)
        code: int | str = job.returncode
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
        code = f"no end after {SECONDS} s"
    return Ended(
        code, out.decode("utf-8", "backslashreplace"), err.decode("utf-8", "backslashreplace")
    )


def faults(ended: Ended, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what is wrong with the ending of a command line, a line per fault."""
    found = [] if ended.code in CODES else [f"ended with {ended.code}"]
    found += [
        f"printed a {text}" for text in ("Traceback", "Warning:") if text in ended.out + ended.err
    ]
    if ended.code == 2 and (len(ended.err.splitlines()) != 1 or not ended.err.startswith("dfl: ")):
        found.append("refused, but not in one line")
    if ended.code == 2 and ended.out:
        found.append("refused, but printed something on stdout")
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            found.append(f"foreign {path!r} was {before.get(path)}, is {after.get(path)}")
    return found


@contextmanager
def quiet_surroundings(home: Path) -> Iterator[None]:
    """Set an environment without network, data sets and cached files."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    places = {"HOME": "", "XDG_CACHE_HOME": "cache", "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis"}
    changed = {
        **proxies,
        **{name: str(home / below) for name, below in places.items()},
        "DFL_DATA": "",
    }
    with mock.patch.dict(os.environ, changed):
        yield


def campaign(
    many: int, ranks: st.SearchStrategy[int], number: int
) -> tuple[Counter[str], list[str]]:
    """Run `many` command lines.

    Args:
        many: the number of command lines.
        ranks: draws the number of ranks of each; 0 is this process.
        number: the seed.

    Returns:
        The number of command lines by ending, and a description of each that ended badly.
    """
    counted: Counter[str] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as home, quiet_surroundings(Path(home)):
        make_ours(Path(home))

        @seed(number)
        @settings(
            max_examples=many, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(commands(ranks))
        def one(command: Command) -> None:
            place = Path(home, "work", "here")
            place.mkdir(parents=True)
            try:
                plant(place)
                shutil.copytree(Path(home, "ours"), place / "ours")
                before = seen(place.parent)
                with chdir(place):
                    ended = launched(command) if command.ranks else here(command.tokens)
                after = seen(place.parent, () if ended.code == 2 else MADE)
                wrong = faults(ended, before, after)
            finally:
                shutil.rmtree(place.parent)
            counted[CODES.get(ended.code, "badly") if isinstance(ended.code, int) else "badly"] += 1
            if wrong:
                typed = " ".join(repr(token[:60]) for token in command.tokens)
                what = "; ".join(wrong)[:3000]
                bad.append(
                    f"{command.ranks} ranks: {typed}\n  {what}\n  stderr: {ended.err[-500:]!r}"
                )
                print(bad[-1], flush=True)

        one()
    return counted, bad


if __name__ == "__main__":
    launches = st.sampled_from([0] * 17 + [1, 2, 3])
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    ends, wrong = campaign(int(sys.argv[1]), launches, number)
    print(dict(ends), f"{len(wrong)} ended badly", sep="\n")
    sys.exit(bool(wrong))
