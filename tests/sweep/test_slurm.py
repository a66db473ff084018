"""A job array's directives and script, with stand-ins for the programs of Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dfl.core.errors import InputError
from dfl.sweep.slurm import Slurm, endings, queued, submit, write

NAMES = ("graph=ring,seed=0", "it's 50%a $HOME `x`", "graph=torus:rows=2,seed=1")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep's folder with a few cells, whose names have characters that a shell interprets."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "the sweep's 9%j"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
    return folder


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the search path for programs of Slurm, without any of them at first."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("bash", "sed", "date"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def cells(sweep: Path) -> list[Path]:
    return [sweep / name for name in NAMES]


def directives(script: Path) -> list[str]:
    return [line for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]


def refusal(**options: Any) -> str:
    with pytest.raises(InputError) as refused:
        Slurm(**options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_script_has_a_task_for_every_cell(sweep: Path) -> None:
    script = write(sweep, cells(sweep), Slurm(ntasks=4))
    assert script == sweep / "slurm" / "1.sh"
    assert script.with_suffix(".cells").read_text().splitlines() == [
        str(sweep / name) for name in NAMES
    ]
    assert directives(script) == [
        "#SBATCH --job-name=the_sweep_s_9_j",
        "#SBATCH --array=1-3",
        f'#SBATCH --output="{sweep.parent}/the sweep\'s 9%%j/slurm/%A_%a.log"',
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --ntasks=4",
        "#SBATCH --cpus-per-task=1",
    ]


def test_further_options_are_directives(sweep: Path) -> None:
    options = Slurm(
        nodes=2,
        ntasks=8,
        cpus_per_task=3,
        time="1-12",
        partition="long,short",
        account="lab@here",
        mpi="pmi2",
        signal=300,
        requeue=False,
        at_once=2,
        setup=("module load mpich", 'export A="b c"'),
        sbatch=("mem-per-cpu=2G", "exclusive"),
    )
    script = write(sweep, cells(sweep), options)
    for each in (
        "array=1-3%2",
        "no-requeue",
        "signal=USR1@300",
        "nodes=2",
        "ntasks=8",
        "cpus-per-task=3",
        "time=1-12",
        "partition=long,short",
        "account=lab@here",
        "mem-per-cpu=2G",
        "exclusive",
    ):
        assert f"#SBATCH --{each}" in directives(script)
    text = script.read_text()
    assert '\nmodule load mpich\nexport A="b c"\n' in text
    assert "srun --cpus-per-task=3 --wait=30 --kill-on-bad-exit=0 --mpi=pmi2 " in text
    assert "scontrol" not in text


@pytest.mark.parametrize(
    "options", [Slurm(), Slurm(setup=("true",), mpi="pmix", time="5", requeue=False)]
)
def test_the_script_is_valid_bash(sweep: Path, options: Slurm) -> None:
    script = write(sweep, cells(sweep), options)
    subprocess.run(["bash", "-n", script], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, script], check=True)


def test_earlier_scripts_and_lists_are_kept(sweep: Path) -> None:
    """A task reads its cell from the list again when it restarts."""
    first = write(sweep, cells(sweep), Slurm())
    before = first.read_bytes(), first.with_suffix(".cells").read_bytes()
    second = write(sweep, cells(sweep)[1:], Slurm(ntasks=2))
    assert second.name == "2.sh"
    assert second.with_suffix(".cells").read_text().count("\n") == 2
    assert (first.read_bytes(), first.with_suffix(".cells").read_bytes()) == before


def task(script: Path, number: int, where: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the variables that Slurm sets for a task, in another folder."""
    variables = {
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_JOB_NODELIST": "n[1-2]",
    } | more
    return subprocess.run(
        ["bash", script], env={**os.environ, **variables}, cwd=where, capture_output=True, text=True
    )


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_task_runs_its_cell(
    sweep: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("sys.executable", "/some where/python")
    program(programs, "srun", 'echo "$PWD $OMP_NUM_THREADS $MODULES"; printf "<%s>" "$@"')
    options = Slurm(setup=("export MODULES=loaded",))
    done = task(
        write(Path(sweep.name), [Path(sweep.name, name) for name in NAMES], options),
        number,
        programs,
    )
    cell = sweep / NAMES[number - 1]
    ran = [
        "/some where/python",
        "-m",
        "dfl.run",
        "--config",
        f"{cell}/cell.toml",
        "--resume",
        str(cell),
    ]
    assert f"{sweep.parent} 1 loaded\n" in done.stdout
    arguments = "".join(f"<{each}>" for each in ran)
    assert done.stdout.partition("exit=0>")[2].startswith(arguments), done
    assert f"task 7_{number} on n[1-2], restarts 0: {cell}\n" in done.stdout
    assert done.returncode == 0
    assert done.stderr == ""


def test_every_restart_takes_another_step(sweep: Path, programs: Path) -> None:
    """Slurm numbers steps from 0 again, and killed ranks may have left objects named by theirs."""
    program(programs, "srun", 'echo "step: ${@: -1}"')
    script = write(sweep, cells(sweep), Slurm())
    for restarts in (0, 1, 3):
        done = task(script, 1, sweep, SLURM_RESTART_COUNT=str(restarts))
        steps = [line for line in done.stdout.splitlines() if line.startswith("step: ")]
        assert steps == ["step: true"] * restarts + [f"step: {sweep / NAMES[0]}"]


@pytest.mark.parametrize(
    ("code", "options", "again"),
    [
        (75, Slurm(), True),
        (75, Slurm(requeue=False), False),
        (0, Slurm(), False),
        (137, Slurm(), False),
    ],
)
def test_only_stopped_tasks_are_requeued(
    sweep: Path, programs: Path, code: int, options: Slurm, again: bool
) -> None:
    program(programs, "srun", f"exit {code}")
    program(programs, "scontrol", 'echo "called: $*"')
    done = task(write(sweep, cells(sweep), options), 2, sweep)
    assert ("called: requeue 7_2\n" in done.stdout) == again
    assert done.returncode == code
    assert f"ends with exit code {code}\n" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ntasks": 0}, "--ntasks must be at least 1, not 0"),
        ({"cpus_per_task": -1}, "--cpus-per-task must be at least 1, not -1"),
        ({"nodes": 4, "ntasks": 2}, "--nodes 4 needs as many ranks: --ntasks 2 is less"),
        ({"time": "soon"}, "--time must be MINUTES, M:SS, H:MM:SS"),
        ({"time": "1:60"}, "--time must be"),
        ({"time": "1:00:00:00"}, "--time must be"),
        ({"time": "2"}, "--time 2 ends before"),
        ({"partition": "a b"}, "--partition must be the name of a partition"),
        ({"partition": "a\n#SBATCH --wrap=x"}, "--partition must be"),
        ({"partition": "a\n"}, "--partition must be"),
        ({"account": "$(id)"}, "--account must be"),
        ({"mpi": "pmi2 --uid=0"}, "--mpi must be one that srun --mpi=list shows"),
        ({"setup": ("true", "a\nb")}, "--setup must be a line of shell, not 'a\\nb'"),
        (
            {"sbatch": ("--gres=gpu:1",)},
            "--sbatch must be an option of sbatch without its dashes, as gres=gpu:1",
        ),
        ({"sbatch": ("comment=a b",)}, "--sbatch must be"),
        ({"sbatch": ("gres=gpu:1\n",)}, "--sbatch must be"),
        ({"sbatch": ("output=x",)}, "--sbatch output is set by the sweep"),
        (
            {"sbatch": ("arra=1-9",)},
            "--sbatch arra, which sbatch may read as array, is set by the sweep",
        ),
        ({"sbatch": ("a=1-9",)}, "--sbatch a, which sbatch may read as array,"),
        ({"sbatch": ("open=truncate",)}, "--sbatch open, which sbatch may read as open-mode,"),
        ({"sbatch": ("sig=KILL",)}, "--sbatch sig, which sbatch may read as signal,"),
        ({"sbatch": ("no-req",)}, "--sbatch no-req, which sbatch may read as no-requeue,"),
        ({"setup": ("\udcff",)}, "--setup must be a line of shell, not '\\udcff'"),
        ({"sbatch": ("comment=\udcff",)}, "--sbatch must be"),
    ],
)
def test_what_slurm_would_misread_is_refused(options: dict[str, Any], message: str) -> None:
    assert refusal(**options).startswith(message)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("3", 180),
        ("2:01", 121),
        ("1:00:00", 3600),
        ("1-0", 86400),
        ("1-2:3", 93780),
        ("0-0:0:30", 30),
    ],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    Slurm(time=time, signal=seconds - 1)
    assert f"--signal {seconds} s" in refusal(time=time, signal=seconds)
    assert Slurm(time="unlimited").time


@pytest.mark.parametrize(
    "setup",
    [
        ("if true; then",), ("fi",), ("echo 'a",), ('echo "a',), ("module load x \\",),
        ("cat <<END",), ("cat <<}",), ("f() {",), ("}",), ("true &&",), ("true |",),
        ("case x in",), ("echo $(",), ("(",), ("f()",), ("true", "if x"),
    ],
)  # fmt: skip
def test_incomplete_commands_in_setup_are_refused(sweep: Path, setup: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refused:
        write(sweep, cells(sweep), Slurm(setup=setup))
    assert str(refused.value).startswith(
        f"--setup must be whole commands of bash, not {setup[0]!r}"
    )
    assert "\n" not in str(refused.value)
    assert not (sweep / "slurm").exists()


def test_setup_may_be_a_command_of_several_lines(sweep: Path, programs: Path) -> None:
    program(programs, "srun", 'echo "$A $B"')
    setup = ("if true; then", "export A=1", "fi", "# no more", "export B='#' # 2")
    done = task(write(sweep, cells(sweep), Slurm(setup=setup)), 1, sweep)
    assert (done.returncode, "1 #\n" in done.stdout) == (0, True), done


def test_no_script_is_written_through_a_link(sweep: Path) -> None:
    mine = sweep.parent / "thesis"
    (sweep / "slurm").mkdir()
    for name in ("1.cells", "2.sh", "3.sh"):
        (sweep / "slurm" / name).symlink_to(mine)
    assert write(sweep, cells(sweep), Slurm()).name == "4.sh"
    assert not mine.exists()
    shutil.rmtree(sweep / "slurm")
    mine.mkdir()
    (sweep / "slurm").symlink_to(mine)
    with pytest.raises(InputError, match="slurm is a link"):
        write(sweep, cells(sweep), Slurm())
    assert not any(mine.iterdir())


@pytest.mark.parametrize("name", ["a\nb", 'a"b', "a\\b", "a\udcffb"])
def test_paths_that_a_script_cannot_quote_are_refused(sweep: Path, name: str) -> None:
    for folder, cell in ((sweep, Path(name)), (Path(name), sweep)):
        with pytest.raises(InputError, match=r"^--slurm: .* has .* in it") as refused:
            write(folder, [cell], Slurm())
        assert "\n" not in str(refused.value)
    assert not (sweep / "slurm").exists()


def test_a_folder_that_cannot_be_written_to_is_refused(sweep: Path) -> None:
    (sweep / "slurm").write_text("")
    with pytest.raises(InputError, match="slurm cannot be written to"):
        write(sweep, cells(sweep), Slurm())


def test_submit_returns_the_job_number(sweep: Path, programs: Path) -> None:
    script = write(sweep, cells(sweep), Slurm())
    program(programs, "sbatch", f'[ "$*" = "--parsable {script}" ] && echo "123;far"')
    assert submit(script) == "123"


def test_a_refusal_is_one_line(sweep: Path, programs: Path) -> None:
    script = write(sweep, cells(sweep), Slurm(partition="nowhere"))
    with pytest.raises(InputError) as absent:
        submit(script)
    assert str(absent.value).startswith(
        "--slurm: sbatch cannot be started (No such file or directory)"
    )
    program(
        programs,
        "sbatch",
        "printf 'sbatch: error: no such partition\\nsbatch: error: Failed: bad\\n' >&2; exit 1",
    )
    with pytest.raises(InputError) as refused:
        submit(script)
    assert str(refused.value) == "--slurm: sbatch refuses: no such partition Failed: bad"
    assert script.with_suffix(".cells").exists()  # sbatch may fail after it has submitted
    program(programs, "sbatch", "exit 4")
    with pytest.raises(InputError, match="refuses: exit code 4"):
        submit(script)


@pytest.mark.parametrize("answer", ["", "no", "\\xff"])
def test_an_output_that_is_no_job_is_refused(sweep: Path, programs: Path, answer: str) -> None:
    script = write(sweep, cells(sweep), Slurm())
    program(programs, "sbatch", f"printf '{answer}'")
    with pytest.raises(InputError, match=r"^--slurm: sbatch printed "):
        submit(script)


def test_tasks_in_the_queue_without_a_cell_are_refused(sweep: Path, programs: Path) -> None:
    script = write(sweep, cells(sweep), Slurm())
    (sweep / "slurm/9.sh").symlink_to("9.sh")
    program(programs, "squeue", f"printf '7_1|1|RUNNING|n1|%s\\nslurm|\\xff\\n\\n' \"{script}\"")
    assert queued(sweep) == {NAMES[0]: "task 7_1 running n1"}
    for number in ("9", "N/A"):
        program(programs, "squeue", f"printf '7_1|{number}|RUNNING|n1|%s\\n' \"{script}\"")
        with pytest.raises(InputError, match=f"no cell for task {number}"):
            queued(sweep)
    program(programs, "squeue", f"printf '7_1|1|RUNNING|n1|%s\\n' \"{script}\"")
    os.truncate(script.with_suffix(".cells"), 2**40)  # a sparse file that is too long to read
    with pytest.raises(InputError, match="no cell for task 1"):
        queued(sweep)


def test_queued_cells_are_listed(sweep: Path, programs: Path) -> None:
    assert queued(sweep) == {}
    script = write(sweep, cells(sweep), Slurm())
    assert queued(sweep) == {}  # there is no squeue
    other = write(sweep, cells(sweep)[2:], replace(Slurm(), ntasks=2))
    (linked := sweep.parent / "linked").symlink_to(sweep)
    lines = f"""7_2|2|RUNNING|n[1-2]|{script}
8_1|1|PENDING|(Resources)|{other}
7_1|1|PENDING|(Priority)|{linked}/slurm/1.sh
9|N/A|RUNNING|n1|/bin/other.sh
6_4|4|PENDING|(None)|/elsewhere/slurm/1.sh"""
    program(
        programs,
        "squeue",
        f"cat <<'END'\n{lines}\nEND".replace("cat", 'while read -r l; do echo "$l"; done'),
    )
    assert queued(sweep) == {
        NAMES[1]: "task 7_2 running n[1-2]",
        NAMES[2]: "task 8_1 pending (Resources)",
        NAMES[0]: "task 7_1 pending (Priority)",
    }
    program(
        programs,
        "squeue",
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    )
    with pytest.raises(
        InputError, match="squeue refuses: slurm_load_jobs error: Unable to contact"
    ):
        queued(sweep)


def test_the_last_line_of_a_task_is_found_by_its_cell(sweep: Path) -> None:
    write(sweep, cells(sweep), Slurm())
    for task, text in {
        "7_1": "{begin}srun: error: Invalid MPI type 'pmi3'\n{end}",
        "7_2": "{begin}first of all\n{end}{begin}slurmstepd: error: CANCELLED DUE TO TIME LIMIT\n",
        "10_1": "loading mpich\n{begin}{end}",
        "x_y": "",
    }.items():
        name = NAMES[int(task[-1]) - 1] if task[-1].isdecimal() else ""
        begin = f"2026-11-22 22:50:40 task {task} on n1, restarts 0: {sweep / name}\n"
        end = f"2026-11-22 22:51:03 task {task} ends with exit code 1\n"
        (sweep / "slurm" / f"{task}.log").write_text(text.format(begin=begin, end=end))
    assert endings(sweep) == {
        NAMES[0]: "slurm/10_1.log ends with exit code 1: loading mpich",
        NAMES[1]: "slurm/7_2.log ends without an exit code: "
        "slurmstepd: error: CANCELLED DUE TO TIME LIMIT",
    }
    (sweep / "slurm/10_1.log").unlink()
    assert endings(sweep)[NAMES[0]].endswith("exit code 1: srun: error: Invalid MPI type 'pmi3'")
