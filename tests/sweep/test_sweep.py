"""The command `dfl.sweep`: refusals, runs, summaries, and interruptions."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from dfl.core.files import Lock
from dfl.report import report
from dfl.store import manifest
from dfl.store.run_directory import claim
from dfl.sweep import command as sweep
from dfl.sweep import plots, scheduler
from dfl.sweep.plots import figures as figures_of
from dfl.sweep.status import read_state
from tests.support.sweeping import (
    ROOT,
    SIX,
    ended,
    fake,
    interrupt,
    statuses,
    wait_for,
    without_clocks,
)


class Here:
    """Runs `python -m dfl.sweep` in this process, with cells that do not train."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
    ) -> None:
        self.monkeypatch, self.capsys, self.grid = monkeypatch, capsys, Path("six.toml")
        self.grid.write_text(text)

    def __call__(self, *tokens: str) -> tuple[int, list[str], str]:
        """Return the exit code, the lines on stdout, and stderr."""
        self.monkeypatch.setattr(sys, "argv", ["sweep.py", *tokens])
        self.capsys.readouterr()
        code = sweep.main()
        output, error = self.capsys.readouterr()
        return code, output.splitlines(), error


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(scheduler, "PAUSE", 0.02)
    monkeypatch.setattr(
        scheduler, "command", lambda folder: ["-m", "tests.support.fake_cell", str(folder), "0"]
    )
    monkeypatch.setattr(
        plots, "figures", lambda *given: {"none": Figure()}
    )  # they have tests of their own
    return Here(monkeypatch, capsys, SIX)


def test_a_sweep_writes_tables_and_figures_again_without_new_runs(here: Here) -> None:
    code, output, error = here("six.toml", "--jobs", "2")
    assert (code, error) == (0, "")
    assert all(line.isascii() for line in output)
    assert sorted(line.partition("]")[0] for line in output[:6]) == [f"[{n}/6" for n in range(1, 7)]
    assert all(re.search(r"done, round 5, accuracy 0\.\d{4}$", line) for line in output[:6])
    assert output[6].split() == [
        "topology",
        "bits",
        "seeds",
        "accuracy",
        "worst",
        "peer",
        "payload",
    ]
    assert output[-2:] == ["6 cells: 6 done", "look at    sweeps/six/report.html"]
    folder = Path("sweeps/six")
    table = without_clocks(folder)
    assert table["name"].tolist() == [
        f"topology={topology},bits={bits}"
        for topology in ("ring", "complete")
        for bits in ("none", 4, 2)
    ]
    assert set(table["status"]) == {"done"}
    assert {path.name for path in folder.iterdir()} == {
        ".dfl", "grid.toml", "sweep.csv", "summary.csv", "report.html", "figures", *table["name"],
    }  # fmt: skip
    assert (folder / "sweep.csv").read_text().splitlines()[0].endswith(",seconds")

    written = {name: (folder / name).read_bytes() for name in ("sweep.csv", "summary.csv")}
    for path in (*map(folder.__truediv__, written), *folder.glob("figures/*.png")):
        path.unlink()
    code, again, _ = here("six.toml")  # nothing to run: tables and figures are written again
    assert (code, again) == (0, output[6:])
    assert {name: (folder / name).read_bytes() for name in written} == written
    assert len(list(folder.glob("figures/*.png"))) == 1
    assert {path.read_text() for path in folder.glob("*/launches")} == {"x"}


def test_what_an_earlier_call_wrote_does_not_pass_for_new(here: Here) -> None:
    """A grid grows until it has too many maps, and its page is left out."""
    here.monkeypatch.setattr(plots, "figures", figures_of)
    text = "rounds = 2\n[sweep]\npeers = [3, 4]\nbits = [2, 4]\nlr = [{}]\n"
    here.grid.write_text(text.format("0.1"))
    assert here("six.toml", "--jobs", "2")[0] == 0
    figures, page = Path("sweeps/six/figures"), Path("sweeps/six/report.html").read_bytes()
    lines = {"accuracy_by_round.png", "accuracy_by_bytes.png"}
    assert {path.name for path in figures.iterdir()} == lines | {"map_bits_by_peers.png"}
    (figures / "mine.png").touch()
    here.grid.write_text(text.format(", ".join(f"{n / 10}" for n in range(1, 11))))
    code, output, _ = here("six.toml", "--table", "--no-report")
    assert (code, output[-2:]) == (
        0,
        [
            "no map of bits by peers: there would be 10, and at most 9 are drawn",
            "look at    sweeps/six/figures",
        ],
    )
    assert {path.name for path in figures.iterdir()} == lines | {"mine.png"}
    assert Path("sweeps/six/report.html").read_bytes() == page


def test_a_page_of_the_user_is_refused_before_any_cell_runs(here: Here) -> None:
    claim(folder := Path("sweeps/six"))
    own = folder / "report.html"
    own.write_text("mine")
    assert here("six.toml") == (
        2, [], f"dfl: {own} was not written by dfl and is left as it is: move it away\n"
    )  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {".dfl", "report.html"}
    assert here("six.toml", "--jobs=2", "--no-report", "--quiet")[0] == 0
    assert own.read_text() == "mine"


def test_a_quiet_sweep_prints_what_failed_and_the_last_line(here: Here) -> None:
    assert here("six.toml", "--quiet", "--jobs", "2")[:2] == (
        0,
        ["look at    sweeps/six/report.html"],
    )
    Path("bad.toml").write_text("rounds = 5\n[sweep]\npeers = [4, 13]\n")
    code, output, _ = here("bad.toml", "--quiet", "--no-report")
    assert code == 1
    assert [line.split()[0] for line in output] == ["failed", "look"]
    assert output[-1] == "look at    sweeps/bad/figures"
    assert here("six.toml", "--quiet", "--verbose")[0] == 2


def test_a_verbose_sweep_prints_a_line_for_every_cell_on_a_terminal(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    assert not any("[1/6]" in line for line in here("six.toml", "--jobs", "2")[1])
    shutil.rmtree("sweeps")
    output = here("six.toml", "--jobs", "2", "--verbose")[1]
    assert [line.partition("]")[0] for line in output[:6]] == [f"[{n}/6" for n in range(1, 7)]


def test_status_and_dry_run_start_no_cell(here: Here) -> None:
    code, output, _ = here("six.toml", "--dry-run")
    assert (code, output[-1]) == (0, "6 cells: 6 waiting, in sweeps/six")
    assert not Path("sweeps").exists()
    assert here("six.toml")[0] == 0
    (Path("sweeps/six") / "topology=ring,bits=2/run.json").unlink()
    for flag in ("--status", "--dry-run"):
        code, output, _ = here("six.toml", flag)
        assert output[0].split() == ["cell", "status", "round", "accuracy"]
        assert output[1].split()[:3] == ["topology=ring,bits=none", "done", "5/5"]
        assert (code, output[-1]) == (0, "6 cells: 5 done, 1 waiting, in sweeps/six")
        assert here("six.toml", flag, "--quiet")[:2] == (0, output[-1:])
    assert here("six.toml", "--table")[1][-1] == "look at    sweeps/six/report.html"
    assert without_clocks(Path("sweeps/six"))["status"].tolist().count("done") == 5


def test_a_dry_run_names_the_cells_that_cannot_be_run(here: Here) -> None:
    """What the cell's own data or graph refuse, as six peers on a hypercube."""
    names = [f"topology=hypercube,peers={peers}" for peers in (6, 12)]
    text = 'rounds = 5\n[sweep]\ntopology = ["ring", "hypercube"]\npeers = [6, 8, 12]\n'
    Path("cube.toml").write_text(text)
    code, output, error = here("cube.toml", "--dry-run")
    assert (code, output, error.count("\n")) == (2, [], 1)
    assert all(name in error for name in names)
    assert "topology=ring" not in error
    assert "topology=hypercube,peers=8" not in error
    assert "--topology hypercube with 6 peers" in error
    Path("cube.toml").write_text(text.replace("6, 8, 12", "4, 8"))
    assert here("cube.toml", "--dry-run")[0] == 0
    assert not Path("sweeps").exists()


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ("", "PATH is missing, --help describes it"),
        ("no.toml", "no.toml: cannot be read (No such file or directory)"),
        (
            "six.toml --job 2",
            "unknown flag '--job' (did you mean --jobs?); choose from --help, --out, --jobs",
        ),
        ("six.toml --jobs 0", "--jobs must be from 1 to 4096, not 0"),
        ("six.toml --ranks two", "--ranks must be a whole number, not 'two'"),
        ("six.toml --time 10", "--time 10 is an option of a job array: give --slurm too"),
        ("six.toml --setup=x --setup=y", "--setup x is an option of a job array"),
        ("six.toml --no-requeue", "--no-requeue is an option of a job array"),
        ("six.toml --no-submit", "--no-submit "),
        ("{empty}", "PATH must be a path, not ''"),
        ("six.toml --slurm --ranks 2", "--jobs and --ranks "),
        ("six.toml --slurm --time soon", "--time must be "),
        ("six.toml other.toml", "'other.toml' belongs to no flag"),
        ("six.toml --out six.toml", "--out six.toml cannot be written to: Not a directory"),
        ("six.toml --out .", "--out . is not empty"),
        (f"six.toml --out {'x' * 300}", "--out xxx"),
        (f"six.toml --status --out {'x/' * 3000}", "--out x/x"),
        (f"{'x' * 300}.toml", "xxx"),
        (f"six.toml --out {'x/' * 2020}", "--out x/x"),
        ("bad.toml", "bad.toml: cell seed=1,bits=17: --bits must be from 1 to 16, not 17"),
    ],
)
def test_bad_input_is_refused_before_any_work(here: Here, tokens: str, line: str) -> None:
    Path("bad.toml").write_text("peers = 4\n[sweep]\nseed = [1]\nbits = [8, 17]\n")
    before = sorted(Path().rglob("*"))
    code, output, error = here(*(token.replace("{empty}", "") for token in tokens.split()))
    assert (code, output) == (2, [])
    assert error.startswith(f"dfl: {line}")
    assert error.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


def test_failures_are_listed_with_their_reasons(here: Here) -> None:
    Path("bad.toml").write_text("rounds = 5\n[sweep]\npeers = [4, 13]\nlr = [0.1, 9]\n")
    code, output, _ = here("bad.toml", "--jobs", "4")
    assert code == 1
    assert output[-5:-1] == [
        "diverged   peers=4,lr=9: peer 1 is no longer finite after round 2: try a smaller --lr",
        "failed     peers=13,lr=0.1: --topology torus with 13 peers: has no sides",
        "failed     peers=13,lr=9: --topology torus with 13 peers: has no sides",
        "4 cells: 1 done, 1 diverged, 2 failed",
    ]
    assert without_clocks(Path("sweeps/bad"))["status"].tolist() == [
        "done",
        "diverged",
        "failed",
        "failed",
    ]
    assert here("bad.toml")[0] == 1


def test_failures_are_listed_where_tables_cannot_be_written(here: Here) -> None:
    """As on a full disk."""
    Path("bad.toml").write_text("rounds = 5\n[sweep]\npeers = [4, 13]\n")
    Path("sweeps/bad").mkdir(parents=True)
    claim(Path("sweeps/bad"))
    Path("sweeps/bad/sweep.csv").mkdir()
    code, output, error = here("bad.toml")
    assert (code, error.count("\n")) == (2, 1)
    assert "--out sweeps/bad cannot be written to" in error
    assert output[-2:] == [
        "failed     peers=13: --topology torus with 13 peers: has no sides",
        "2 cells: 1 done, 1 failed",
    ]


def test_cells_that_another_program_runs_are_listed(here: Here) -> None:
    """A sweep stopped by a signal leaves the cells that it waited for to the other program.

    It reads no models after the signal, which may be gigabytes.
    """
    Path("two.toml").write_text("peers = 4\nrounds = 2\n[sweep]\nseed = [0, 1]\n")
    assert here("two.toml")[0] == 0
    (Path("sweeps/two/seed=1") / "run.json").unlink()
    cell, models = Path("sweeps/two/seed=0"), "state.safetensors"
    (cell / models).write_bytes(b"")
    manifest.write(cell, manifest.read(cell), ["metrics.csv", models])
    damaged, read = manifest.damaged, list[str]()

    def note(folder: Path, name: str, known: object) -> str:
        read.append(name)
        return damaged(folder, name, known)

    def stop(self: scheduler.Scheduler) -> None:
        assert models in read
        read.clear()
        signal.raise_signal(signal.SIGTERM)

    here.monkeypatch.setattr(manifest, "damaged", note)
    here.monkeypatch.setattr(scheduler.Scheduler, "_queue_released", stop)
    with Lock(Path("sweeps/two/seed=1")):
        code, output, _ = here("two.toml")
    assert code == 75
    assert output[-3:] == [
        "running    seed=1: another program is running it",
        "2 cells: 1 done, 1 running",
        "1 left; to resume: python -m dfl.sweep two.toml",
    ]
    assert set(read) == {"metrics.csv"}


def test_unfinished_cells_become_a_job_array(here: Here) -> None:
    assert here("six.toml", "--jobs", "2")[0] == 0
    names = [f"topology=complete,bits={bits}" for bits in ("none", 4, 2)]
    for name in names:
        (Path("sweeps/six") / name / "run.json").unlink()
        (Path("sweeps/six") / name / "output.log").unlink()
    tokens = [
        "--slurm",
        "--no-submit",
        "--setup",
        "module load x",
        "--setup",
        "module load y",
        "--no-requeue",
    ]
    code, output, _ = here("six.toml", *tokens, "--quiet")
    script = Path("sweeps/six/slurm/1.sh").absolute()
    assert (code, output) == (0, [f"3 of 6 cells in {script}; to submit: sbatch {script}"])
    assert [
        Path(line).name for line in script.with_suffix(".cells").read_text().splitlines()
    ] == names
    assert "module load x\nmodule load y\n" in script.read_text()
    assert "#SBATCH --no-requeue\n" in script.read_text()

    here.monkeypatch.setattr("dfl.sweep.slurm.need_sbatch", lambda: None)
    here.monkeypatch.setattr("dfl.sweep.slurm.submit", lambda script: "77")
    here.monkeypatch.setattr(
        "dfl.sweep.slurm.queued", lambda folder: {names[0]: "pending (Resources)"}
    )
    code, output, _ = here("six.toml", "--slurm", "--ntasks", "2")
    assert (code, output) == (0, [f"2 of 6 cells in {script.with_name('2.sh')}; job 77"])
    assert "#SBATCH --ntasks=2\n" in script.with_name("2.sh").read_text()
    _, output, _ = here("six.toml", "--status")
    assert output[4].split() == [names[0], "waiting", "5/5", "0.3844", "pending", "(Resources)"]
    (script.parent / "7_2.log").write_text(
        f"2026-11-22 22:50:40 task 7_2 on n1, restarts 0: sweeps/six/{names[1]}\nsrun: error: no\n"
    )
    _, output, _ = here("six.toml", "--status")
    assert output[0].split()[-1] == "remark"
    assert output[5].endswith("slurm/7_2.log ends without an exit code: srun: error: no")
    here.monkeypatch.setattr(
        "dfl.sweep.slurm.queued", lambda folder: dict.fromkeys(names, "running n1")
    )
    code, output, _ = here("six.toml", "--slurm", "--quiet")
    assert (code, output) == (0, ["6 cells: 3 done, 3 waiting; 3 in the queue, none to submit"])


def test_a_cell_that_ran_on_by_itself_is_left_out_of_the_means(here: Here) -> None:
    """As by `dfl.run --resume CELL --rounds 7`."""
    Path("two.toml").write_text("peers = 4\nrounds = 5\n[sweep]\nseed = [0, 1]\n")
    assert here("two.toml")[0] == 0
    cell = Path("sweeps/two/seed=0")
    record = manifest.read(cell)
    record["run"]["rounds"] = 7
    manifest.write(cell, record, ["metrics.csv"])
    launched = (cell / "output.log").read_bytes()
    code, output, _ = here("two.toml")
    assert (cell / "output.log").read_bytes() == launched  # it is not started again
    assert (code, output[-2]) == (1, "2 cells: 1 done, 1 changed")
    line = f"changed    seed=0: it ran with --rounds 7, not 5: remove {cell} to run it again"
    assert line in output
    summary = pd.read_csv("sweeps/two/summary.csv").iloc[0]
    assert (summary["seeds"], summary["of"]) == (1, 2)
    assert "1 changed" in here("two.toml", "--status")[1][-1]
    assert manifest.read(cell)["run"]["rounds"] == 7
    shutil.rmtree(cell)
    assert here("two.toml")[0] == 0


def test_what_has_run_is_looked_at_without_the_model_file(here: Here) -> None:
    Path("net.py").write_text("def make(shape, classes): ...\n")
    here.grid.write_text('peers = 4\nrounds = 5\nmodel = "net.py:make"\n[sweep]\nseed = [0, 1]\n')
    assert here("six.toml")[0] == 0
    Path("net.py").unlink()
    for flag in ("--status", "--table"):
        assert here("six.toml", flag)[::2] == (0, "")
    assert report(Path("sweeps/six")).exists()
    code, _, error = here("six.toml")
    assert (code, "cell seed=0: --model net.py" in error) == (2, True)


def test_a_job_array_that_cannot_be_submitted_leaves_no_sweep(
    here: Here, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It would bar the command that gives other ranks."""
    programs = tmp_path_factory.mktemp("bin")
    (programs / "bash").symlink_to(str(shutil.which("bash")))
    here.grid.write_text('rounds = 3\nmodel = "softmax"\n[sweep]\nseed = [0, 1]\n')
    here.monkeypatch.setenv("PATH", str(programs))
    for more, message in (
        ([], "--slurm: there is no sbatch on the PATH"),
        (["--no-submit", "--setup", "fi"], "--setup must be whole commands of bash"),
        (["--no-submit", "--out", 'a"b'], "which no script of Slurm can have"),
    ):
        code, output, error = here("six.toml", "--slurm", "--ntasks", "2", *more)
        assert (code, output, error.count("\n"), message in error) == (2, [], 1, True)
        assert [path.name for path in Path().iterdir()] == ["six.toml"]


def has_reached(cell: Path, row: int) -> bool:
    return int(read_state(cell).row.get("round", -1)) >= row


@pytest.mark.slow
def test_interrupted_sweeps_have_the_same_tables(tmp_path: Path) -> None:
    """After SIGTERM, SIGINT and SIGKILL at different rounds the tables are those of a sweep that
    was not interrupted.
    """
    (tmp_path / "grid.toml").write_text(SIX)
    assert ended(fake(tmp_path, 0, "--jobs", "3"))[0] == 0
    whole = without_clocks(tmp_path / "out")
    summary = (tmp_path / "out/summary.csv").read_bytes()
    (tmp_path / "out").rename(tmp_path / "whole")

    cells = [tmp_path / "out" / name for name in whole["name"]]
    for (cell, row), how in zip(((0, 1), (0, 3), (3, 2)), (15, 2, 9), strict=True):
        running = fake(tmp_path, 0.3, "--jobs", "2")
        wait_for(partial(has_reached, cells[cell], row))
        code, output = interrupt(running, signal.Signals(how))
        assert code == {15: 75, 2: 130, 9: -9}[how], output
        if how != 9:
            assert re.fullmatch(
                r"\d left; to resume: python -m dfl\.sweep .*grid\.toml --out .* --jobs 2",
                output[-1],
            )
        assert not (tmp_path / "out/sweep.csv").exists()
    wait_for(
        lambda: "running" not in statuses(tmp_path / "out")
    )  # the cells of the killed sweep have ended
    code, output = ended(fake(tmp_path, 0, "--jobs", "2"))
    assert (code, output[-2]) == (0, "6 cells: 6 done")
    assert without_clocks(tmp_path / "out").equals(whole)
    assert (tmp_path / "out/summary.csv").read_bytes() == summary
    assert max(len((cell / "launches").read_text()) for cell in cells) >= 3
    assert min(len((cell / "launches").read_text()) for cell in cells) == 1


def test_importing_a_sweep_does_not_import_torch() -> None:
    code = (
        "import sys, dfl.sweep; "
        "heavy = {'torch', 'pandas', 'matplotlib', 'mpi4py'}; "
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_a_grid_without_peers_is_looked_at_as_it_was_started(here: Here) -> None:
    here.grid.write_text('rounds = 3\nmodel = "softmax"\n[sweep]\nseed = [0, 1]\n')
    code, _, error = here("six.toml", "--status")
    assert (code, "peers is missing" in error) == (2, True)
    assert here("six.toml", "--slurm", "--ntasks", "4", "--no-submit")[0] == 0
    code, output, _ = here("six.toml", "--status")
    assert (code, "2 waiting" in output[-1]) == (0, True)
    assert here("six.toml", "--ranks", "3")[0] == 2  # its cells have 4 peers
    code, _, error = here("six.toml")  # which would run them on one rank
    assert (code, "peers is missing" in error) == (2, True)


def test_a_queue_that_does_not_answer_hides_no_cells(here: Here) -> None:
    programs = Path("programs").resolve()
    programs.mkdir()
    for name in ("squeue", "sbatch"):
        (programs / name).write_text(
            "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"
        )
        (programs / name).chmod(0o755)
    here.monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert here("six.toml", "--slurm", "--no-submit")[0] == 0
    for more in (["--status"], ["--slurm", "--no-submit"]):
        code, output, _ = here("six.toml", *more)
        assert code == 0
        assert "warning: the queue is unknown: --slurm: squeue refuses" in "".join(output)
    code, _, error = here("six.toml", "--slurm")
    assert (code, "squeue refuses" in error) == (2, True)


def test_a_killed_cell_has_one_status_on_the_screen_and_in_the_table(here: Here) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    here.monkeypatch.setattr(scheduler, "command", lambda folder: ["-c", kill])
    Path("one.toml").write_text("peers = 4\nrounds = 2\n[sweep]\nseed = [0]\n")
    code, output, _ = here("one.toml")
    assert code == 1
    assert "1 cell: 1 failed" in output
    assert pd.read_csv("sweeps/one/sweep.csv")["status"].tolist() == ["failed"]
