"""Submission of the cells of a sweep to Slurm, as a job array.

Each submission has a number N and files of its own in FOLDER/slurm: the script N.sh, and N.cells
with the folder of the cell of every task, a line each. Neither is written to again, so that a
waiting task keeps its cell whatever is submitted later.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path

from dfl.core.errors import InputError, Suspended
from dfl.core.files import make_directory
from dfl.core.reading import open_regular, read_bounded
from dfl.core.registry import flag
from dfl.sweep.status import TAIL

STOPPED = Suspended.code
"""The exit code of a run that was warned, wrote a checkpoint and can be resumed (sysexits.h:
EX_TEMPFAIL)."""

SRUN_WAIT = 30
"""Seconds after the end of one rank at which srun ends the others, which may be waiting for it."""

LONGEST_LIST = 2**26
"""The most bytes of a list of cells: a line for each task of the largest job array."""

LONGEST_REMARK = 200
"""The most characters of a line of the output of a task that are shown."""

_OURS = r"\d{4}-\d\d-\d\d \S+ task \S+ |task \S+ was stopped, "
_BEGINS = r"^\S+ \S+ task \S+ on .*, restarts \d+: (.+)$"
_ENDS = r"\S+ \S+ task \S+ ends with exit code (\d+)"
"""The lines that a script prints: all of them, the one with the cell, and that of the end."""

_NAME = r"[\w.,@+-]+"
_FORMATS = {
    "time": (
        r"\d+(:[0-5]?\d){0,2}|\d+-\d+(:[0-5]?\d){0,2}|UNLIMITED",
        "MINUTES, M:SS, H:MM:SS, DAYS-H, DAYS-H:MM, DAYS-H:MM:SS or UNLIMITED",
    ),
    "partition": (_NAME, "the name of a partition, or several joined by ,"),
    "account": (_NAME, "the name of an account"),
    "mpi": (r"[\w.-]+", "one that srun --mpi=list shows"),
    "setup": (r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]+", "a line of shell"),
    "sbatch": (
        r"[a-z][a-z-]*(=[^\s\x00-\x1f\x7f\ud800-\udfff'\"#\\]+)?",
        "an option of sbatch without its dashes, as gres=gpu:1",
    ),
}
"""A pattern for the values of an option, and a description of them, by option."""
_SET_BY_SWEEP = (
    "array",
    "cpus-per-task",
    "no-requeue",
    "nodes",
    "ntasks",
    "open-mode",
    "output",
    "requeue",
    "signal",
    "wrap",
)
_TEMPLATE = """\
#!/bin/bash
{directives}

# Task N has line N of {listed} for its cell. The line with srun may run any number of times:
# it starts the cell, resumes it, or finds it done.
cd {here} || exit
{setup}cell=$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {cells})
task=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
restarts=${{SLURM_RESTART_COUNT:-0}}
echo "$(date '+%F %T') task $task on $SLURM_JOB_NODELIST, restarts $restarts: $cell"
export OMP_NUM_THREADS=1
# Killed ranks leave shared memory behind, which MPICH names by job and step: take a new step.
for ((step = 0; step < restarts; step++)); do srun --nodes=1 --ntasks=1 true; done
{srun} {python} -m dfl.run --config "$cell/cell.toml" --resume "$cell"
code=$?
echo "$(date '+%F %T') task $task ends with exit code $code"
{after}exit $code
"""
_REQUEUE = """\
if [ $code -eq {stopped} ]; then
    echo "task $task was stopped, has written a checkpoint and is requeued"
    scontrol requeue "$task"
fi
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """The options of each task of a job array; those not given have the defaults of the site.

    Raises:
        InputError: a value that Slurm would refuse or misread.
    """

    nodes: int | None = None
    """Nodes of a cell; as few as its ranks fit on where not given."""
    ntasks: int = 1
    """Ranks of a cell, over all its nodes."""
    cpus_per_task: int = 1
    """Cores of a rank: as many as the --threads of the runs."""
    time: str | None = None
    """Time limit of a task, as Slurm writes it: 90, 1:30:00, 2-12. A cell that needs longer resumes
    in another task."""
    partition: str | None = None
    """The partition to submit to."""
    account: str | None = None
    """The account to charge."""
    mpi: str | None = None
    """How srun starts the ranks: pmi2, pmix or another that srun --mpi=list shows."""
    signal: int = 120
    """Seconds before the time limit at which a run is signalled to write a checkpoint and stop."""
    requeue: bool = True
    """Whether a task that its time limit or its node stops is put back into the queue."""
    at_once: int | None = None
    """Most tasks to run at a time."""
    setup: tuple[str, ...] = ()
    """Lines of shell to run first, such as module load mpich."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, without their dashes: mem-per-cpu=2G, gres=gpu:1, qos=low."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ntasks", "cpus_per_task", "signal", "at_once"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise InputError(f"{flag(name)} must be at least 1, not {number}")
        for name, (pattern, meaning) in _FORMATS.items():
            given = getattr(self, name) or ()
            for text in (given,) if isinstance(given, str) else given:
                if not re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII):
                    raise InputError(f"{flag(name)} must be {meaning}, not {text!r}")
        for option in self.sbatch:
            _refuse_if_set_by_sweep(option.partition("=")[0])
        if self.nodes and self.nodes > self.ntasks:
            raise InputError(
                f"--nodes {self.nodes} needs as many ranks: --ntasks {self.ntasks} is less"
            )
        if self.time and self.time.upper() != "UNLIMITED" and _seconds(self.time) <= self.signal:
            raise InputError(
                f"--time {self.time} ends before the warning, --signal {self.signal} s earlier"
            )

    def refuse_given(self) -> None:
        """Refuse an option that is given, where there is no job array.

        Raises:
            InputError: there is one.
        """
        for each in fields(self):
            if (value := getattr(self, each.name)) != each.default:
                shown = value[0] if isinstance(value, tuple) else value
                given = f"{flag(each.name)} {shown}" if value is not False else "--no-requeue"
                raise InputError(
                    f"{given} is an option of a job array: give --slurm too, or leave it out"
                )


def _refuse_if_set_by_sweep(name: str) -> None:
    """Refuse an option of sbatch that the sweep sets itself, and the start of its name.

    Raises:
        InputError: it is one.
    """
    for option in _SET_BY_SWEEP:
        if option.startswith(name):  # sbatch accepts the start of a name for the whole
            read_as = "" if name == option else f", which sbatch may read as {option},"
            raise InputError(f"--sbatch {name}{read_as} is set by the sweep: leave it out")


def check(folder: Path, cells: Sequence[Path], options: Slurm) -> None:
    """Refuse what no script can have; the arguments are those of `write`.

    Raises:
        InputError: a path that cannot be written in a script, or lines of shell that are not whole
            commands.
    """
    _check_paths(folder, *cells)
    _check_setup(_script(folder.absolute() / "slurm/1.sh", len(cells), options), options.setup)


def need_sbatch() -> None:
    """Refuse to submit where there is no Slurm.

    Raises:
        InputError: there is no sbatch.
    """
    if shutil.which("sbatch") is None:
        raise InputError(
            "--slurm: there is no sbatch on the PATH: Slurm is needed, or --no-submit, which only "
            "writes the script"
        )


def write(folder: Path, cells: Sequence[Path], options: Slurm) -> Path:
    """Write a batch script with one task for every cell.

    Args:
        folder: of the sweep.
        cells: folders with a cell.toml each.
        options: of each task.

    Returns:
        The script, FOLDER/slurm/N.sh for the smallest N that is free.

    Raises:
        InputError: as `check` does, or a folder that cannot be written to.
    """
    check(folder, cells, options)
    slurm = folder.absolute() / "slurm"
    try:
        script = _free(slurm)
        with script.with_suffix(".cells").open("x", encoding="utf-8") as file:
            file.writelines(f"{cell.absolute()}\n" for cell in cells)
        with script.open("x", encoding="utf-8") as file:
            file.write(_script(script, len(cells), options))
    except OSError as error:
        raise InputError(f"{folder / 'slurm'} cannot be written to ({error.strerror})") from None
    return script


def submit(script: Path) -> str:
    """Submit a script that `write` wrote.

    Returns:
        The number of the job.

    Raises:
        InputError: there is no Slurm here, or it refuses.
    """
    output = _output_of("sbatch", "--parsable", str(script)).strip()
    if not (job := re.match(r"\d+", output, re.ASCII)):
        raise InputError(
            f"--slurm: sbatch printed {output!r}, not the number of a job: check whether {script} "
            "is submitted"
        )
    return job[0]


def queued(folder: Path) -> dict[str, str]:
    """Return the cells of a sweep that are in the queue, running or not.

    Returns:
        Name of a cell -> its task, its state and, as squeue prints it, the reason why it waits or
        the nodes that it is on: "task 7_1 pending (Resources)", "task 7_2 running n[1-2]". Empty
        where there is no Slurm.

    Raises:
        InputError: squeue fails.
    """
    scripts = {os.path.realpath(path): path for path in (folder / "slurm").glob("*.sh")}
    if not scripts or not shutil.which("squeue"):
        return {}
    lines = _output_of("squeue", "--me", "--array", "--noheader", "--format=%i|%K|%T|%R|%o")
    cells = {}
    for line in lines.splitlines():
        task, number, state, where, command = [*line.split("|", 4), "", "", "", ""][:5]
        if script := scripts.get(os.path.realpath(command)):
            cells[_cell(script, number)] = f"task {task} {state.lower()} {where}"
    return cells


def endings(folder: Path) -> dict[str, str]:
    """Return how the last task of each cell that was started ended, as its output shows it.

    Returns:
        Name of a cell -> its last line, its exit code and its file: "slurm/7_1.log ends with exit
        code 1: srun: error: Invalid MPI type". A cell whose last task was killed has no exit code.
    """
    found = {}
    for path in sorted((folder / "slurm").glob("*_*.log"), key=_task):
        try:
            with open_regular(path) as file:
                start = file.read(TAIL).decode(errors="replace")
                file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
                lines = file.read(TAIL).decode(errors="replace").splitlines()
        except OSError:
            continue
        if cell := re.search(_BEGINS, start, re.MULTILINE):
            codes = [each[1] for line in lines if (each := re.fullmatch(_ENDS, line))]
            ends = bool(lines) and bool(re.fullmatch(_ENDS, lines[-1]))
            printed = [line for line in lines if line.strip() and not re.match(_OURS, line)]
            how = f"ends with exit code {codes[-1]}" if ends else "ends without an exit code"
            last = f": {printed[-1].strip()[:LONGEST_REMARK]}" if printed else ""
            found[Path(cell[1]).name] = f"slurm/{path.name} {how}{last}"
    return found


def _task(path: Path) -> tuple[int, ...]:
    """Return the numbers of the job and of the task of an output, the last job last."""
    return tuple(int(number) for number in path.stem.split("_") if number.isdecimal())


def _cell(script: Path, number: str) -> str:
    """Return the name of the cell of a task.

    Raises:
        InputError: the list of cells is damaged.
    """
    cells = script.with_suffix(".cells")
    try:
        return Path(read_bounded(cells, LONGEST_LIST).decode().split("\n")[int(number) - 1]).name
    except (OSError, ValueError, IndexError):
        raise InputError(
            f"--slurm: {cells} is damaged: it has no cell for task {number} of the queue"
        ) from None


def _check_paths(*paths: Path) -> None:
    for path in (*paths, Path.cwd(), Path(sys.executable)):
        if found := re.search(r'[\x00-\x1f\x7f\ud800-\udfff"\\]', str(path)):
            raise InputError(
                f"--slurm: {str(path)!r} has {found[0]!r} in it, which no script of Slurm can have"
            )


def _check_setup(script: str, setup: Sequence[str]) -> None:
    """Refuse lines of shell that are not whole commands and would change the rest of a script.

    Args:
        script: has the lines between braces, which must match.
        setup: the lines.

    Raises:
        InputError: bash cannot parse the script, or is not there.
    """
    if not setup:
        return
    try:
        environment = {name: value for name, value in os.environ.items() if name != "BASH_ENV"}
        done = subprocess.run(
            [shutil.which("bash") or "bash", "-n"],
            input=script.encode(),
            capture_output=True,
            env=environment,
            check=False,
        )
    except OSError as error:
        raise InputError(
            f"--setup cannot be checked: bash cannot be started ({error.strerror})"
        ) from None
    if done.returncode:
        messages = done.stderr.decode(errors="replace").strip().splitlines() or ["bash -n fails"]
        lines = "; ".join(map(repr, setup))
        raise InputError(f"--setup must be whole commands of bash, not {lines}: {messages[-1]}")


def _output_of(*command: str) -> str:
    """Run a program of Slurm and return what it prints.

    Raises:
        InputError: it cannot be started, or fails.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="surrogateescape", check=False
        )
    except OSError as error:
        raise InputError(
            f"--slurm: {command[0]} cannot be started ({error.strerror}): Slurm is needed"
        ) from None
    if done.returncode:
        message = re.sub(rf"\s*{command[0]}: (error: )?", " ", done.stderr).strip()
        message = message or f"exit code {done.returncode}"
        raise InputError(f"--slurm: {command[0]} refuses: {message}")
    return done.stdout


def _free(slurm: Path) -> Path:
    """Return the path of a script with the smallest number that is free."""
    make_directory(slurm)
    scripts = (slurm / f"{number}.sh" for number in count(1))
    return next(
        script
        for script in scripts
        if not any(map(os.path.lexists, (script, script.with_suffix(".cells"))))
    )


def _script(script: Path, tasks: int, options: Slurm) -> str:
    """Return the text of a batch script."""
    cells = script.with_suffix(".cells")
    directives = _directives(script.parent, tasks, options)
    srun = [
        "srun",
        f"--cpus-per-task={options.cpus_per_task}",
        f"--wait={SRUN_WAIT}",
        "--kill-on-bad-exit=0",
    ]
    if options.mpi:
        srun.append(f"--mpi={options.mpi}")
    return _TEMPLATE.format(
        directives="\n".join(f"#SBATCH --{line}" for line in directives),
        setup="\n".join(["{", *options.setup, "}\n"]) if options.setup else "",
        listed=cells.name,
        here=shlex.quote(os.getcwd()),
        cells=shlex.quote(str(cells)),
        srun=" ".join(srun),
        python=shlex.quote(sys.executable),
        after=_REQUEUE.format(stopped=STOPPED) if options.requeue else "",
    )


def _directives(slurm: Path, tasks: int, options: Slurm) -> Iterator[str]:
    yield f"job-name={re.sub(r'[^a-zA-Z0-9_.+-]', '_', slurm.parent.name)}"
    yield f"array=1-{tasks}" + (f"%{options.at_once}" if options.at_once else "")
    yield f'output="{str(slurm).replace("%", "%%")}/%A_%a.log"'
    yield "open-mode=append"
    yield "requeue" if options.requeue else "no-requeue"
    yield f"signal=USR1@{options.signal}"
    for name in ("nodes", "ntasks", "cpus_per_task", "time", "partition", "account"):
        if (value := getattr(options, name)) is not None:
            yield f"{name.replace('_', '-')}={value}"
    yield from options.sbatch


def _seconds(time: str) -> int:
    """Return the seconds of a time limit of Slurm.

    It is minutes and seconds, unless there are days or three numbers: then it starts with hours.
    """
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    )
