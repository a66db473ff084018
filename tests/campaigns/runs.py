"""Folders of runs that are damaged at random, and then resumed, loaded or compared.

python -m tests.campaigns.runs 300      300 damages; every 20th damaged run is resumed under mpirun

A file of a finished, an interrupted or a killed run, of one rank or three, is changed, truncated,
removed, or replaced by a directory, a link, a pipe or other text. `refuses` states which damages
make a resume end with exit code 2 and one line; after any other damage the resumed run has the
bytes of an undamaged one. Foreign files in the folder, beside it and behind links must not change.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import dfl
from dfl import compare
from dfl.run import main as dfl_run
from dfl.store import manifest
from dfl.store.run_directory import CONTENT, FILES, FOLDERS, MARKER
from tests.simulation.test_fuzz import Hang, in_time
from tests.support.mpirun import mpirun
from tests.support.small_run import FLAGS, small
from tests.support.stopping import crash, same

BOUND = 60
"""Seconds within which every operation must end."""
RUN = small(bits=4)
OWN = (
    "notes.txt",
    "checkpoint/notes.json",
    "logs/notes.log",
    "figures/notes.png",
    "heartbeats/notes",
)
"""Foreign files in the folder of a run."""
EXTRA = (
    ".lock",
    ".run.json.part",
    ".metrics.csv.part",
    ".state.safetensors.part",
    "checkpoint/.0000000006.json.part",
    "checkpoint/0000000008.json",
    "heartbeats/0",
    "figures/graph.png",
    "tensorboard",
)
"""Names of a run's files that need not exist."""
REWRITTEN = {
    "interrupted": (
        ".lock",
        ".run.json.part",
        ".metrics.csv.part",
        ".state.safetensors.part",
        "logs/rank-0.log",
        "history/peers.bin",
        "history/start.safetensors",
        "checkpoint/.0000000006.json.part",
        "checkpoint/0000000004.json",
        "checkpoint/0000000004.safetensors",
    ),
    "killed": (
        ".lock",
        ".run.json.part",
        ".metrics.csv.part",
        ".state.safetensors.part",
        "logs/rank-0.log",
        "history/peers.bin",
        "history/start.safetensors",
        "checkpoint/0000000006.json",
        "checkpoint/0000000006.safetensors",
    ),
}
"""Files besides `FILES` that a resume of an unfinished run writes when they are damaged: the last
checkpoint, because the run is then resumed from the one before."""


class Drawn:
    """A figure that takes no time to draw."""

    def savefig(self, part: Path, **how: Any) -> None:
        """Write a placeholder."""
        part.write_bytes(b"a figure")


def flip(path: Path, drawn: random.Random, foreign: Path) -> None:
    held = bytearray(path.read_bytes() or b"\0")
    held[drawn.randrange(len(held))] ^= 1 << drawn.randrange(8)
    path.write_bytes(held)


def cut(path: Path, drawn: random.Random, foreign: Path) -> None:
    held = path.read_bytes()
    path.write_bytes(held[: drawn.randrange(len(held) + 1)])


def append(path: Path, drawn: random.Random, foreign: Path) -> None:
    path.write_bytes(
        path.read_bytes() + drawn.choice([b"\n", b"\0", b"7,0.1", b"{}", path.read_bytes()])
    )


def delete(path: Path, drawn: random.Random, foreign: Path) -> None:
    pass


def other(path: Path, drawn: random.Random, foreign: Path) -> None:
    path.write_bytes(
        drawn.choice(
            [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"round\nNaN\n", b"round\n0\nround\n0\n"]
        )
    )


def directory(path: Path, drawn: random.Random, foreign: Path) -> None:
    path.mkdir()


def pipe(path: Path, drawn: random.Random, foreign: Path) -> None:
    os.mkfifo(path)


def link(path: Path, drawn: random.Random, foreign: Path) -> None:
    path.symlink_to(
        drawn.choice([foreign / "file", foreign / "folder", foreign / "nowhere", Path("/dev/zero")])
    )


def hard_link(path: Path, drawn: random.Random, foreign: Path) -> None:
    os.link(foreign / "file", path)


CHANGES = (flip, flip, cut, append)
"""Changes of an existing file."""
PLACES = (delete, other, directory, pipe, link, hard_link)
"""Replacements of a file or a folder."""


def damage(folder: Path, foreign: Path, drawn: random.Random) -> tuple[str, Path]:
    """Damage one path of a run's folder; return the damage and the path."""
    there = [f for f in sorted(folder.rglob("*")) if str(f.relative_to(folder)) not in OWN]
    folders = {folder / name for name in ("checkpoint", "logs", "figures", "heartbeats")}
    path = drawn.choice(
        [*(f for f in there if f.is_file()), *sorted(folders), *(folder / name for name in EXTRA)]
    )
    how = drawn.choice(CHANGES + PLACES if path.is_file() else PLACES)
    if how in PLACES:
        remove(path)
        path.parent.mkdir(exist_ok=True)
    how(path, drawn, foreign)
    return how.__name__, path


def refuses(folder: Path, source: str, path: Path) -> bool:
    """Whether a resume of a damaged run must be refused.

    Args:
        folder: the folder of the run.
        source: "finished", "interrupted", "killed", or "ranks": finished, on three ranks.
        path: the damaged path in it.
    """
    name = str(path.relative_to(folder))
    link = path.is_symlink()
    directory = path.is_dir() and not link
    pipe = path.is_fifo() and not link
    hard_link = path.is_file() and not link and path.stat().st_nlink > 1
    if name == MARKER:
        return link or not path.is_file() or path.read_bytes() != CONTENT
    if name in FOLDERS:
        return os.path.lexists(path) and not directory
    if name == "report.html":  # a page of somebody else is never overwritten
        ours = path.is_file() and not link and b'content="dfl.' in path.read_bytes()[:1000]
        return os.path.lexists(path) and not ours
    if name in FILES or name == "figures/graph.png":
        return directory or pipe
    if name not in REWRITTEN.get(source, ()):
        return False
    if name in (".lock", "logs/rank-0.log"):
        return directory or pipe or link or hard_link
    return directory or pipe or (link and name.endswith(".part"))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seen(*folders: Path) -> dict[str, bytes | str]:
    """The content of every path below some folders; links are not followed."""
    found: dict[str, bytes | str] = {}
    for path in (each for folder in folders for each in (folder, *sorted(folder.rglob("*")))):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        held = (
            path.read_bytes() if kind == "file" else os.readlink(path) if kind == "link" else kind
        )
        found[str(path)] = held
    return found


def kept(folder: Path) -> dict[str, bytes]:
    """The foreign files in the folder of a run."""
    return {name: (folder / name).read_bytes() for name in OWN if (folder / name).is_file()}


@dataclass(frozen=True)
class Bench:
    """Runs to damage.

    Attributes:
        top: the folder of the runs.
        whole: an undamaged run.
    """

    top: Path
    whole: Path

    @classmethod
    def of(cls, top: Path, ranks: bool) -> Bench:
        """Make the runs, one of them on three ranks if `ranks`."""
        list(dfl.simulate(replace(RUN, out=top / "finished")))
        shutil.copytree(top / "finished", top / "killed")
        crash(replace(RUN, out=top / "interrupted"), 5)
        shutil.copytree(top / "interrupted", top / "killed", dirs_exist_ok=True)
        record = manifest.read(top / "killed")
        manifest.write(
            top / "killed", record | {"exit": None, "ending": "running", "seconds": None}
        )
        (top / "killed" / ".lock").touch()
        with (top / "killed" / "metrics.csv").open("a") as file:
            file.write("6,0.0")
        if ranks:
            done = mpirun(3, "-m", "dfl.run", *FLAGS, "--bits=4", f"--out={top / 'ranks'}")
            assert done.returncode == 0, done.stderr
        shutil.copytree(top / "finished", top / "undisturbed")
        for folder in (each for each in top.iterdir() if each.name != "undisturbed"):
            for name in OWN:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text("mine")
        return cls(top, top / "undisturbed")

    def trial(self, n: int, launched: bool, acts: tuple[str, ...]) -> str:
        """Damage a copy of a run and use it; return how it was used and the outcome.

        Raises:
            AssertionError: the outcome is not the expected one, or a foreign file changed.
        """
        drawn = random.Random(n)
        source = drawn.choice(
            [name for name in ("finished", "interrupted", "killed", "ranks") if self.has(name)]
        )
        folder, foreign = self.top / f"trial{n}", self.top / f"foreign{n}"
        shutil.copytree(self.top / source, folder)
        (foreign / "folder").mkdir(parents=True)
        for name in (
            "file",
            "folder/0",
            "folder/0000000001.json",
            "folder/rank-0.log",
            "folder/graph.png",
        ):
            (foreign / name).write_text(f"mine, {name}")
        how, path = damage(folder, foreign, drawn)
        act = "launch" if launched else drawn.choice(acts)
        text = f"{n}: {source}, {how} {path.relative_to(folder)}, {act}"
        before = seen(foreign)
        own = kept(folder)
        try:
            with in_time(BOUND):
                outcome = getattr(self, act)(folder, source, path)
        except (Exception, Hang):
            raise AssertionError(f"{text}: {traceback.format_exc()}") from None
        assert seen(foreign) == before, f"{text}: foreign files changed"
        assert kept(folder) == own, f"{text}: foreign files in the folder changed"
        for path in (folder, foreign):
            shutil.rmtree(path)
        return f"{act}: {outcome}"

    def has(self, name: str) -> bool:
        return (self.top / name).exists()

    def resume(self, folder: Path, source: str, path: Path) -> str:
        """Resume a run in this process."""
        refused = refuses(folder, source, path)
        return self.judged(folder, refused, *typed(dfl_run, "--resume", str(folder)))

    def launch(self, folder: Path, source: str, path: Path) -> str:
        """Resume a run on two ranks."""
        refused = refuses(folder, source, path)
        begun = time.monotonic()
        done = mpirun(2, "-m", "dfl.run", "--resume", str(folder))
        assert time.monotonic() - begun < BOUND
        return self.judged(folder, refused, done.returncode, done.stderr)

    def judged(self, folder: Path, refused: bool, code: int, errors: str) -> str:
        """Assert the outcome of a resume: refused, or finished with the same bytes.

        Args:
            folder: the folder of the run.
            refused: whether the resume must be refused.
            code: the exit code.
            errors: what was printed on standard error.
        """
        if refused:
            return refusal(code, errors)
        assert (code, errors) == (0, "")
        same(self.whole, folder)
        assert manifest.damage(folder) == ""
        return "same bytes"

    def compare(self, folder: Path, source: str, path: Path) -> str:
        """Compare a run with the undamaged one."""
        out = folder.with_name(f"{folder.name}-compared")
        code, errors = typed(compare.main, str(self.whole), str(folder), "--out", str(out))
        if code:
            return refusal(code, errors)
        row = pd.read_csv(out / "compare.csv", dtype=str).iloc[1]
        shutil.rmtree(out)
        if row["status"] == "damaged":
            return "damaged"
        last = pd.read_csv(self.top / source / "metrics.csv", dtype=str).iloc[-1]
        assert source == "killed" or row[list(last.index)].to_dict() == last.to_dict()
        return "compared"

    def load(self, folder: Path, source: str, path: Path) -> str:
        """Load a run, and read everything from it."""
        try:
            found = dfl.load(folder)
        except dfl.InputError as error:
            return one_line(str(error))
        known, ends = dfl.load(self.top / source), Counter[str]()
        growing = source == "killed"  # rows that are being written have no checksum
        for name, read in READ.items():
            try:
                there = read(found)
            except dfl.InputError as error:
                ends[one_line(str(error))] += 1
                continue
            assert (growing and name == "rows") or equal(there, read(known)), name
            ends["same"] += 1
        return " and ".join(sorted(ends))


READ: dict[str, Callable[[Any], Any]] = {
    "run": lambda found: found.run,
    "rows": lambda found: found.rows,
    "rounds_to": lambda found: found.rounds_to(0.0) == 0.0,
    "peers": lambda found: found.peers,
    "state": lambda found: found.state,
    "honest": lambda found: found.honest,
    "model": lambda found: dict(found.model(1).named_parameters()),
    "mean_model": lambda found: dict(found.mean_model().named_parameters()),
}
"""What can be read from a loaded run."""


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same."""
    if isinstance(one, pd.DataFrame):
        return one.equals(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            torch.equal(value, other[name]) for name, value in one.items()
        )
    return bool(one == other)


def typed(command: Callable[[], int], *arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed on standard error."""
    errors = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stderr(errors),
        redirect_stdout(io.StringIO()),
    ):
        patch.setattr("sys.argv", ["dfl", *arguments])
        return command(), errors.getvalue()


def refusal(code: int, errors: str) -> str:
    """Assert that a command was refused with exit code 2 and one line."""
    assert code == 2, (code, errors)
    assert errors.startswith("dfl: "), errors
    assert errors.endswith("\n"), errors
    return one_line(errors[:-1])


def one_line(text: str) -> str:
    assert 0 < len(text) < 1000, text
    assert text.splitlines() == [text]
    return "one line"


@contextmanager
def bench(ranks: bool) -> Iterator[Bench]:
    """Runs to damage, in a folder that is removed afterwards."""
    with (
        tempfile.TemporaryDirectory() as top,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        patch.setattr("dfl.reporting.plots.figures", lambda *given: {"graph": Drawn()})
        yield Bench.of(Path(top), ranks)


def main(times: int) -> int:
    """Damage `times` runs; return whether any of them ended otherwise than expected."""
    ends, bad = Counter[str](), 0
    with bench(ranks=True) as made:
        for n in range(times):
            try:
                ends[made.trial(n, n % 20 == 19, ("resume", "load", "compare"))] += 1
            except AssertionError as error:
                bad += 1
                print(error, flush=True)
    for what, many in sorted(ends.items()):
        print(f"{many:4} {what}")
    print(f"{times} damages, {bad} ended otherwise than expected")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
