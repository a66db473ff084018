"""Sweeps and comparisons keep the user's files, report damage in one line, and escape what they
print.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dfl import compare
from dfl.store import manifest
from dfl.sweep import command as sweep
from dfl.sweep.status import DAMAGED, DONE, read_state
from tests.support.sweeping import ENV, ROOT, ended, fake
from tests.sweep.test_sweep import Here, here
from tests.test_compare import run

__all__ = ["here"]

TWO = "peers = 4\nrounds = 2\n[sweep]\nseed = [0, 1]\n"


def tree(folder: Path) -> dict[str, bytes | str]:
    """Return the contents of all files in a folder, and the targets of links, by path."""
    found = {
        str(path): path
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }
    return {
        name: os.readlink(path) if path.is_symlink() else path.read_bytes()
        for name, path in found.items()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished sweep of TWO."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "grid.toml").write_text(TWO)
    assert ended(fake(folder, 0, "--jobs", "2"))[0] == 0
    return folder / "out"


@pytest.fixture
def done(here: Here, finished: Path) -> Path:
    """The cell seed=0 of a finished sweep, in sweeps/two."""
    shutil.copytree(finished, "sweeps/two")
    return Path("sweeps/two/seed=0")


@pytest.fixture
def mine(here: Here) -> Path:
    """A folder of the user's, with files named as those of a sweep."""
    folder = Path("mine")
    (folder / "figures").mkdir(parents=True)
    (folder / "seed=0").mkdir()
    for name in (
        "grid.toml",
        "sweep.csv",
        "summary.csv",
        "compare.csv",
        "figures/accuracy_by_round.png",
    ):
        (folder / name).write_text(TWO if name == "grid.toml" else "my thesis")
    Path("two.toml").write_text(TWO)
    return folder


@pytest.mark.parametrize(
    "tokens", ["--slurm --dry-run", "--slurm --status", "--slurm --table", "--status --table"]
)
def test_two_actions_are_refused_before_anything_is_submitted(here: Here, tokens: str) -> None:
    Path("two.toml").write_text(TWO)
    before = tree(Path())
    code, output, error = here("two.toml", *tokens.split())
    assert (code, output) == (2, [])
    assert "exclude each other: give one of them" in error
    assert tree(Path()) == before


@pytest.mark.parametrize("tokens", ["", "--table", "--status", "--dry-run", "--slurm --no-submit"])
def test_a_sweep_into_a_foreign_folder_is_refused(here: Here, mine: Path, tokens: str) -> None:
    before = tree(Path())
    code, output, error = here("two.toml", "--out", "mine", *tokens.split())
    assert (code, output, error.count("\n")) == (2, [], 1)
    assert error.startswith("dfl: --out mine is not empty")
    assert tree(Path()) == before


def test_a_folder_of_the_user_named_as_a_cell_is_refused(
    here: Here, mine: Path, done: Path
) -> None:
    Path("more.toml").write_text(TWO.replace("[0, 1]", "[0, 1, 2]"))
    Path("sweeps/two/seed=2").mkdir()
    Path("sweeps/two/seed=2/thesis").write_text("mine")
    code, _, error = here("more.toml", "--out", "sweeps/two")
    assert (code, error.count("\n")) == (2, 1)
    assert "seed=2 is not empty" in error
    assert tree(Path("sweeps/two/seed=2")) == {"sweeps/two/seed=2/thesis": b"mine"}


def link(path: Path, target: Path) -> None:
    """Replace a file or folder by a link to `target`."""
    if path.is_dir():
        path.rename(path.with_name("moved"))
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


FOLDERS = ("figures", "seed=0", "slurm")
FILES = (
    "grid.toml",
    "sweep.csv",
    "summary.csv",
    "report.html",
    ".lock",
    ".sweep.csv.part",
    "figures/none.png",
    "seed=0/output.log",
    "seed=0/cell.toml",
    "seed=0/.sweep.lock",
    "seed=0/.lock",
    "seed=0/.cell.toml.part",
    "slurm/1.sh",
    "slurm/1.cells",
)


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_nothing_is_written_through_a_link(here: Here, mine: Path, done: Path, name: str) -> None:
    (done / "run.json").unlink()
    target = mine.absolute() if name in FOLDERS else (mine / "grid.toml").absolute()
    link(Path("sweeps/two") / name, target)
    before = tree(mine)
    for tokens in ((), ("--table",), ("--slurm", "--no-submit")):
        _, output, error = here("two.toml", *tokens)
        assert error.count("\n") <= 1
        assert not any("Traceback" in line for line in output)
        assert tree(mine) == before


@pytest.mark.parametrize(
    "name", ["output.log", "cell.toml", "metrics.csv", "run.json", ".sweep.lock"]
)
def test_a_directory_in_the_place_of_a_file_is_one_line(
    here: Here, mine: Path, done: Path, name: str
) -> None:
    for each in ("run.json", name):
        (done / each).unlink(missing_ok=True)
    (done / name).mkdir()
    for tokens in (("--status",), ("--table",), ()):
        code, output, error = here("two.toml", *tokens)
        assert code in (0, 1) if name != "cell.toml" else code == 2
        assert error.count("\n") == (code == 2)
        assert not any("Traceback" in line for line in output)
    assert (done / name).is_dir()


def test_a_damaged_cell_is_shown_and_run_again(here: Here, mine: Path, done: Path) -> None:
    whole = (done / "metrics.csv").read_text()
    (done / "metrics.csv").write_text(whole.replace("accuracy", "exactness"))
    assert read_state(done).status == DAMAGED
    code, output, _ = here("two.toml", "--status")
    assert (code, output[1].split()[:4]) == (0, ["seed=0", "damaged", "-", "-"])
    assert output[-1].startswith("2 cells: 1 done, 1 damaged, in sweeps/two")
    assert "metrics.csv is damaged" in output[1]
    code, output, _ = here("two.toml", "--table")
    assert "seed=0,0,damaged" in (Path("sweeps/two") / "sweep.csv").read_text()
    code, output, _ = here("two.toml")
    assert output[0].startswith("damaged    seed=0: sweeps/two/seed=0/metrics.csv is damaged")
    assert (code, output[-2], read_state(done).status) == (0, "2 cells: 2 done", DONE)
    assert (done / "launches").read_text() == "xx"


HOSTILE = (
    "a\u2028b",
    "a\nb",
    "a\x1b[2Jb",
    "a\udcffb",
    "a[/red]b",
    "a:smile:b",
    "$x_$ $",
    "a\u202eb",
    "é",
    "a\rb",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_names_of_folders_are_escaped_in_output(
    here: Here, mine: Path, finished: Path, name: str
) -> None:
    shutil.copytree(finished, name)
    for tokens in (("--status",), (), ("--slurm", "--no-submit")):
        code, output, error = here("two.toml", "--out", name, *tokens)
        assert code == 0
        text = "\n".join(output) + error
        assert all(c.isprintable() or c == "\n" for c in text), tokens
        assert len(output) <= 7
        if "--status" in tokens:
            assert output[-1].startswith("2 cells: 2 done, in ")
    folder = run(Path("runs") / name, topology=f"edges:path={name}")
    other = run(Path("runs/other"), topology="ring")
    here.monkeypatch.setattr(
        sys, "argv", ["compare.py", str(folder), str(other), "--out", f"out {name}"]
    )
    here.capsys.readouterr()
    assert compare.main() == 0
    output = here.capsys.readouterr()[0].splitlines()
    assert len(output) == 4
    assert all(line.isprintable() for line in output)


def test_control_characters_of_a_cell_are_escaped(here: Here, mine: Path, done: Path) -> None:
    (done / "output.log").write_text("dfl: \x1b]0;mine\x07 [/b] :smile: \u2029 $x_$\n")
    manifest.write(done, {**manifest.read(done), "exit": 3})
    for tokens in ((), ("--status",)):
        _, output, _ = here("two.toml", *tokens)
        assert all(line.isprintable() for line in output)
        assert any(r"\x1b]0;mine\x07 [/b] :smile:" in line for line in output)


@pytest.mark.parametrize(
    ("main", "where", "tokens"),
    [
        (sweep.main, "dfl.sweep.command.Sweep.states", ["two.toml"]),
        (sweep.main, "dfl.sweep.command.Sweep.states", ["two.toml", "--status"]),
        (sweep.main, "dfl.sweep.tables.cells", ["two.toml", "--table"]),
        (compare.main, "dfl.compare.gather", ["runs/a"]),
    ],
)
def test_ctrl_c_is_one_line(
    here: Here, mine: Path, main: Callable[[], int], where: str, tokens: list[str]
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    here.monkeypatch.setattr(where, interrupted)
    here.monkeypatch.setattr(sys, "argv", ["command", *tokens])
    here.capsys.readouterr()
    assert main() == 130
    assert here.capsys.readouterr().err == "dfl: interrupted\n"


@pytest.mark.parametrize("module", ["dfl.sweep", "dfl.compare"])
def test_an_interrupt_during_start_up_prints_no_traceback(module: str, tmp_path: Path) -> None:
    """The signal arrives during the module's first import."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**ENV, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "dfl: interrupted\n")
