"""The console script `dfl`, and the commands that only print: list, doctor, completion."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from dfl.__main__ import main
from dfl.commands import COMMANDS, completion, doctor
from dfl.config import Run
from dfl.core.options import options
from dfl.core.registry import flag
from dfl.core.version import VERSION

Dfl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dfl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Dfl:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dfl.core.command_line.spare_imports", lambda: None)  # not our process

    def call(*tokens: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["/usr/bin/dfl", *tokens])
        code = main()
        return code, *capsys.readouterr()

    return call


def test_every_command_is_shown_and_is_a_module_with_a_main(dfl: Dfl) -> None:
    code, out, err = dfl()
    assert (code, err) == (0, "")
    assert dfl("--help") == (code, out, err)
    for name, (module, line) in COMMANDS.items():
        assert f"  {name:<12}{line}\n" in out
        assert find_spec(module), module
    assert dfl("--version") == (0, f"dfl {VERSION}\n", "")


def test_a_command_has_its_own_name_and_its_exit_code(dfl: Dfl) -> None:
    assert dfl("run", "--help")[1].startswith("Usage: dfl run [OPTIONS]\n")
    code, out, err = dfl("run", "--rounds", "many")
    assert (code, out) == (2, "")
    assert "--rounds" in err
    code, out, err = dfl("rnu")
    assert (code, out) == (2, "")
    assert "'rnu' (did you mean run?)" in err


@pytest.mark.parametrize("line", ["--help", "doctor", "list topologies", "run --help", "nothing"])
def test_a_command_whose_reader_has_gone_ends_as_any_other(line: str) -> None:
    """Its output fails at the first line, or only at the end, where it is buffered."""
    code = 0 if line != "nothing" else 2
    for how in ("| head -1", "| true"):
        command = f"{sys.executable} -m dfl {line} {how} > /dev/null; exit ${{PIPESTATUS[0]}}"
        ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert ended.returncode == code
        assert "Broken" not in ended.stderr


def test_an_argument_that_may_be_left_out_is_in_brackets(dfl: Dfl) -> None:
    assert dfl("list", "--help")[1].startswith("Usage: dfl list [KIND...] [OPTIONS]\n")
    assert dfl("compare", "--help")[1].startswith("Usage: dfl compare FOLDERS... [OPTIONS]\n")
    assert dfl("list")[0] == 0


def test_the_help_of_inference_marks_what_it_needs(dfl: Dfl) -> None:
    shown = " ".join(dfl("inference", "--help")[1].split())
    for name in ("outcome", "covariates"):
        assert re.search(rf"--{name} TEXT[^-]*\[required\]", shown)


def test_the_script_imports_what_a_command_needs_only() -> None:
    code = (
        "import sys; sys.argv = ['dfl']; from dfl.__main__ import main; main(); print(*sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0
    known = set(ended.stdout.splitlines()[-1].split())
    assert not known & {"torch", "numpy", "rich", "cyclopts", "dfl.run", "dfl.simulation"}


def test_list_shows_kinds_components_and_all_of_some(dfl: Dfl) -> None:
    assert "topologies (--topology)\n  ring, " in dfl("list")[1]
    shown = dfl("list", "topologies")[1]
    assert "$ dfl run --peers 16 --topology ring\n" in shown
    assert "$ dfl inference sites.csv" in dfl("list", "estimators")[1]
    assert "sum_j w_ij" not in dfl("list", "algorithms")[1]
    assert "sum_j w_ij" in dfl("list", "algorithms", "choco")[1]
    code, out, err = dfl("list", "topology", "rign")
    assert (code, out) == (2, "")
    assert "rign" in err


def test_doctor_prints_what_a_report_needs(
    dfl: Dfl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.setenv("DFL_DATA", str(tmp_path))
    monkeypatch.setattr(doctor, "LAUNCHERS", ())
    code, out, err = dfl("doctor")
    assert (code, err) == (0, "")
    facts = {line.split()[0] for line in out.splitlines()}
    assert facts >= {
        "dfl", "python", "packages", "system", "machine", "folder", "mpi", "launcher", "threads",
        "blas", "gpu", "data", "slurm", "variable",
    }  # fmt: skip
    assert f"data       $DFL_DATA {tmp_path}: mnist\n" in out
    assert f"variable   DFL_DATA={tmp_path}\n" in out


@pytest.mark.parametrize(
    ("prints", "shown"),
    [
        ("echo 2; echo 2", "starts 2 ranks"),
        ("echo 1; echo 1", "2 programs of 1 rank each"),
        ("echo no slots >&2; exit 1", "no slots"),
        ("exit 1", "nothing printed"),
    ],
)
def test_doctor_finds_launchers_that_are_of_another_mpi(
    prints: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\n{prints}\n")
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "LAUNCHERS", ("mpirun",))
    monkeypatch.setattr(doctor, "_number", lambda package: "4.0")
    found = dict(doctor._mpi())
    assert found["launcher"].startswith(f"{launcher}: ")
    assert shown in found["launcher"]


SCRIPT = cache(completion.script)


def completed(*words: str) -> set[str]:
    """Return what bash completes the last word to."""
    line = " ".join(f'"{word}"' for word in words)
    code = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _dfl; echo ${{COMPREPLY[@]}}"
    ended = subprocess.run(["bash", "-c", f"{SCRIPT()}\n{code}"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    return set(ended.stdout.split())


def test_bash_completes_commands_flags_and_components() -> None:
    assert completed("dfl", "") == set(COMMANDS)
    assert completed("dfl", "ru") == {"run"}
    assert completed("dfl", "run", "--top") == {"--topology"}
    assert {flag(name) for name in options(Run)} < completed("dfl", "run", "--")
    assert completed("dfl", "run", "--topology", "tor") == {"torus"}
    assert completed("dfl", "run", "--engine", "") == {"auto", "batched", "loop"}
    assert completed("dfl", "run", "--out", "") == set()


def test_bash_completes_kinds_and_their_components() -> None:
    assert completed("dfl", "list", "to") == {"topologies"}
    assert completed("dfl", "list", "topologies", "tor") == {"torus"}
    assert completed("dfl", "list", "inference.estimators", "po") == {"pooled"}
    assert completed("dfl", "list", "topologies", "torus", "ri") == {"ring"}


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("sweep", {"--out", "--jobs", "--dry-run", "--slurm", "--at-once", "--no-report"}),
        ("compare", {"--out", "--report", "--no-report"}),
        ("report", {"--help"}),
        ("inference", {"--outcome", "--sites", "--estimator", "--no-intercept", "--bits"}),
        ("run", {"--quiet", "--dry-run", "--config", "--no-report"}),
        ("doctor", {"--help"}),
        ("completion", {"--help"}),
    ],
)
def test_bash_completes_the_flags_of_every_command(command: str, flags: set[str]) -> None:
    assert flags <= completed("dfl", command, "--")


def test_bash_completes_files_where_a_command_takes_them() -> None:
    assert completed("dfl", "sweep", "") == set()
    assert completed("dfl", "compare", "--out", "") == set()
    assert completed("dfl", "inference", "x.csv", "--estimator", "tilted_score_") == {
        "tilted_score_graph"
    }


def test_the_script_is_registered_with_bash() -> None:
    code = f"{completion.script()}\ncomplete -p dfl"
    ended = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "complete -o default -F _dfl dfl"
