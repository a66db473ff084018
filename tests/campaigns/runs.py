"""Folders of runs are damaged at random: what is done with them is right, or refused in one line.

python -m tests.campaigns.runs 300      so many damages, each 20th of them gone on with under a real mpirun

A file of a finished, an interrupted or a killed run, of one rank or three, is changed, cut,
removed, or replaced by a directory, a link, a pipe or other text. Then the run is gone on with,
loaded or compared. What is foreign, in the folder, beside it and behind links, must be as it was,
to the byte.
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
from tests.core.test_fuzz import Hang, in_time
from tests.support.mpirun import mpirun
from tests.support.stopping import crash, same

BOUND = 60
"""Seconds that nothing may take."""
RUN = dfl.Run(
    peers=4, rounds=6, model="softmax", examples_per_peer=10, eval_every=2, checkpoint_every=2, bits=4
)  # fmt: skip
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in {
    "peers": 4, "rounds": 6, "model": "softmax", "examples-per-peer": 10, "eval-every": 2, "checkpoint-every": 2,
    "bits": 4,
}.items()]  # fmt: skip
OWN = (
    "notes.txt",
    "checkpoint/notes.json",
    "logs/notes.log",
    "figures/notes.png",
    "heartbeats/notes",
)
"""Files of the user's in the folder of a run."""
EXTRA = (".lock", ".run.json.part", ".metrics.csv.part", ".state.safetensors.part", "checkpoint/.0000000006.json.part",
         "checkpoint/0000000008.json", "heartbeats/0", "figures/graph.png", "tensorboard")  # fmt: skip
"""Names of ours that need not be there."""


class Drawn:
    """A figure that is quickly drawn."""

    def savefig(self, part: Path, **how: Any) -> None:
        """Write it."""
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
"""What is done to a file that is there."""
PLACES = (delete, other, directory, pipe, link, hard_link)
"""What is put in the place of a file, or a folder, that is removed."""


def damage(folder: Path, foreign: Path, drawn: random.Random) -> str:
    """Damage a run's folder at one place; what was done."""
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
    return f"{how.__name__} {path.relative_to(folder)}"


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seen(*folders: Path) -> dict[str, bytes | str]:
    """All that there is, to the byte; nothing is followed."""
    found: dict[str, bytes | str] = {}
    for path in (each for folder in folders for each in (folder, *sorted(folder.rglob("*")))):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
        held = (
            path.read_bytes() if kind == "file" else os.readlink(path) if kind == "link" else kind
        )
        found[str(path)] = held
    return found


def kept(folder: Path) -> dict[str, bytes]:
    """The user's own files in the folder of a run."""
    return {name: (folder / name).read_bytes() for name in OWN if (folder / name).is_file()}


@dataclass(frozen=True)
class Bench:
    """Runs to damage.

    Attributes:
        top: where they are.
        whole: the undisturbed run.
    """

    top: Path
    whole: Path

    @classmethod
    def of(cls, top: Path, ranks: bool) -> Bench:
        """Make the runs; one of three ranks where it is asked for."""
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
            done = mpirun(3, "-m", "dfl.run", *FLAGS, f"--out={top / 'ranks'}")
            assert done.returncode == 0, done.stderr
        shutil.copytree(top / "finished", top / "undisturbed")
        for folder in (each for each in top.iterdir() if each.name != "undisturbed"):
            for name in OWN:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text("mine")
        return cls(top, top / "undisturbed")

    def trial(self, n: int, launched: bool, acts: tuple[str, ...]) -> str:
        """Damage a copy of a run, do something with it, and see that all is right; what
        happened.
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
        what = damage(folder, foreign, drawn)
        act = "launch" if launched else drawn.choice(acts)
        before, own = seen(foreign), kept(folder)
        try:
            with in_time(BOUND):
                how = getattr(self, act)(folder, source)
        except (Exception, Hang):
            raise AssertionError(
                f"{n}: {source}, {what}, {act}: {traceback.format_exc()}"
            ) from None
        assert seen(foreign) == before, f"{n}: {source}, {what}, {act}: foreign files changed"
        assert kept(folder) == own, f"{n}: {source}, {what}, {act}: the user's files changed"
        for path in (folder, foreign):
            shutil.rmtree(path)
        return f"{act}: {how}"

    def has(self, name: str) -> bool:
        return (self.top / name).exists()

    def resume(self, folder: Path, source: str) -> str:
        """Go on with a run in this process."""
        return self.judged(folder, *typed(dfl_run, "--resume", str(folder)))

    def launch(self, folder: Path, source: str) -> str:
        """Go on with a run on two ranks."""
        begun = time.monotonic()
        done = mpirun(2, "-m", "dfl.run", "--resume", str(folder))
        assert time.monotonic() - begun < BOUND
        return self.judged(folder, done.returncode, done.stderr)

    def judged(self, folder: Path, code: int, said: str) -> str:
        """How going on with a run ended: right or in one line."""
        if code == 0:
            assert said == "", said
            same(self.whole, folder)
            assert manifest.damage(folder) == ""
            return "same bytes"
        return refused(code, said)

    def compare(self, folder: Path, source: str) -> str:
        """Lay a run over the undisturbed one."""
        out = folder.with_name(f"{folder.name}-compared")
        code, said = typed(compare.main, str(self.whole), str(folder), "--out", str(out))
        if code:
            return refused(code, said)
        row = pd.read_csv(out / "compare.csv", dtype=str).iloc[1]
        shutil.rmtree(out)
        if row["status"] == "damaged":
            return "damaged"
        last = pd.read_csv(self.top / source / "metrics.csv", dtype=str).iloc[-1]
        assert source == "killed" or row[list(last.index)].to_dict() == last.to_dict()
        return "compared"

    def load(self, folder: Path, source: str) -> str:
        """Load a run, and ask it for everything."""
        try:
            found = dfl.load(folder)
        except dfl.InputError as error:
            return one_line(str(error))
        known, ends = dfl.load(self.top / source), Counter[str]()
        growing = source == "killed"  # nothing vouches for rows that are being written
        for name, ask in ASKED.items():
            try:
                there = ask(found)
            except dfl.InputError as error:
                ends[one_line(str(error))] += 1
                continue
            assert (growing and name == "rows") or equal(there, ask(known)), name
            ends["right"] += 1
        return " and ".join(sorted(ends))


ASKED: dict[str, Callable[[Any], Any]] = {
    "run": lambda found: found.run,
    "rows": lambda found: found.rows,
    "rounds_to": lambda found: found.rounds_to(0.0) == 0.0,
    "peers": lambda found: found.peers,
    "state": lambda found: found.state,
    "honest": lambda found: found.honest,
    "model": lambda found: dict(found.model(1).named_parameters()),
    "mean_model": lambda found: dict(found.mean_model().named_parameters()),
}
"""What can be asked of a run that was loaded."""


def equal(one: Any, other: Any) -> bool:
    """Whether two answers are the same."""
    if isinstance(one, pd.DataFrame):
        return one.equals(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            torch.equal(value, other[name]) for name, value in one.items()
        )
    return bool(one == other)


def typed(command: Callable[[], int], *words: str) -> tuple[int, str]:
    """The exit code of a command in this process, and what it printed as errors."""
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stderr(said),
        redirect_stdout(io.StringIO()),
    ):
        patch.setattr("sys.argv", ["dfl", *words])
        return command(), said.getvalue()


def refused(code: int, said: str) -> str:
    """Whether a command was refused, in one line."""
    assert code == 2, (code, said)
    assert said.startswith("dfl: "), said
    assert said.endswith("\n"), said
    return one_line(said[:-1])


def one_line(said: str) -> str:
    assert 0 < len(said) < 1000, said
    assert said.splitlines() == [said]
    return "one line"


@contextmanager
def bench(ranks: bool) -> Iterator[Bench]:
    """Runs to damage, in a folder that is removed in the end."""
    with (
        tempfile.TemporaryDirectory() as top,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        patch.setattr("dfl.reporting.plots.figures", lambda *given: {"graph": Drawn()})
        yield Bench.of(Path(top), ranks)


def main(times: int) -> int:
    """Damage so many runs; whether any of them ended otherwise than it should."""
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
    print(f"{times} damages, {bad} ended otherwise than they should")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
