"""How do the cells of a sweep become a job array of Slurm?

Each submission has a number N and files of its own in FOLDER/slurm: the script N.sh, and N.cells with the cell of every
task, a line each. Neither is written to again, so that tasks that wait mean the same cells whatever comes after.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from dfl.core.errors import InputError, Suspended
from dfl.core.files import make_directory, read_bytes
from dfl.core.registry import flag

STOPPED = Suspended.code
"""The exit code of a run that was warned, wrote a checkpoint and can be resumed (sysexits.h: EX_TEMPFAIL)."""

LATE = 30
"""Seconds after which the ranks that are left are ended when one has ended, as those wait that miss a dead one."""

_NAME = r"[\w.,@+-]+"
_MEANT = {
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
_OURS = (
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
# it starts the cell, goes on with it, or finds it done.
cd {here} || exit
{setup}cell=$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {cells})
task=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
echo "$(date '+%F %T') task $task on $SLURM_JOB_NODELIST, restarts ${{SLURM_RESTART_COUNT:-0}}: $cell"
export OMP_NUM_THREADS=1
# Ranks that were killed leave shared memory behind, which MPICH names by job and step: take a step that is new.
for ((step = 0; step < ${{SLURM_RESTART_COUNT:-0}}; step++)); do srun --nodes=1 --ntasks=1 true; done
{srun} {python} -m dfl.run --config "$cell/cell.toml" --resume "$cell"
code=$?
echo "$(date '+%F %T') task $task ends with exit code $code"
{after}exit $code
"""
_AGAIN = """\
if [ $code -eq {stopped} ]; then
    echo "task $task was told to stop, has written a checkpoint and goes back into the queue"
    scontrol requeue "$task"
fi
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What each task of a job array asks for; where something is not given, what the site has as its default.

    Raises:
        InputError: a value that Slurm would not read as what it is meant to be.
    """

    nodes: int | None = None
    """Nodes of a cell; as few as its ranks fit on where not given."""
    ntasks: int = 1
    """Ranks of a cell, over all its nodes."""
    cpus_per_task: int = 1
    """Cores of a rank: as many as the --threads of the runs."""
    time: str | None = None
    """Time limit of a task, as Slurm writes it: 90, 1:30:00, 2-12. What is not done by then goes on in another."""
    partition: str | None = None
    """The partition to submit to."""
    account: str | None = None
    """The account to charge."""
    mpi: str | None = None
    """How srun starts the ranks: pmi2, pmix or another that srun --mpi=list shows."""
    signal: int = 120
    """Seconds before the time limit at which a run is told to write a checkpoint and stop."""
    requeue: bool = True
    """Whether a task that is stopped by its time limit or by its node is put back into the queue."""
    at_once: int | None = None
    """Most tasks to run at a time."""
    setup: tuple[str, ...] = ()
    """Lines of shell to run first, as module load mpich."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, without their dashes: mem-per-cpu=2G, gres=gpu:1, qos=low."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ntasks", "cpus_per_task", "signal", "at_once"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise InputError(f"{flag(name)} must be at least 1, not {number}")
        texts = {
            name: (given,) if isinstance(given := getattr(self, name), str) else given or ()
            for name in _MEANT
        }
        for name, text in ((name, text) for name, given in texts.items() for text in given):
            pattern, meant = _MEANT[name]
            if not re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII):
                raise InputError(f"{flag(name)} must be {meant}, not {text!r}")
        for name in (option.partition("=")[0] for option in self.sbatch):
            for ours in _OURS:
                if ours.startswith(name):  # sbatch takes a beginning for the whole
                    meant = "" if name == ours else f", which sbatch may read as {ours},"
                    raise InputError(
                        f"--sbatch {name}{meant} is for the sweep to say: leave it out"
                    )
        if self.nodes and self.nodes > self.ntasks:
            raise InputError(
                f"--nodes {self.nodes} needs as many ranks: --ntasks {self.ntasks} is less"
            )
        if self.time and self.time.upper() != "UNLIMITED" and _seconds(self.time) <= self.signal:
            raise InputError(
                f"--time {self.time} is over before runs are told to stop, --signal {self.signal} s earlier"
            )


def write(folder: Path, cells: Sequence[Path], options: Slurm) -> Path:
    """Write a batch script with one task for every cell.

    Args:
        folder: of the sweep.
        cells: folders with a cell.toml each, of the cells that have not finished and are not queued.
        options: what each task asks for.

    Returns:
        The script, FOLDER/slurm/N.sh for the smallest N that is free.

    Raises:
        InputError: a path that cannot stand in a script, lines of shell that are not whole commands, or a folder that
            cannot be written to.
    """
    _check_paths(folder, *cells)
    slurm = folder.absolute() / "slurm"
    _check_setup(_script(slurm / "1.sh", len(cells), options), options.setup)
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
    answer = _ask("sbatch", "--parsable", str(script)).strip()
    if not (job := re.match(r"\d+", answer, re.ASCII)):
        raise InputError(
            f"--slurm: sbatch says {answer!r}, which is no number of a job: is {script} submitted?"
        )
    return job[0]


def queued(folder: Path) -> dict[str, str]:
    """The cells of a sweep that are in the queue, running or not.

    Returns:
        Name of a cell's folder -> its task and state and, as squeue has it, the reason why it waits or the nodes it is
        on: "task 7_1 pending (Resources)", "task 7_2 running n[1-2]". Empty where there is no Slurm.

    Raises:
        InputError: Slurm does not answer.
    """
    scripts = {os.path.realpath(path): path for path in (folder / "slurm").glob("*.sh")}
    if not scripts or not shutil.which("squeue"):
        return {}
    found = {}
    for line in _ask(
        "squeue", "--me", "--array", "--noheader", "--format=%i|%K|%T|%R|%o"
    ).splitlines():
        task, number, state, where, command = [*line.split("|", 4), "", "", "", ""][:5]
        if script := scripts.get(os.path.realpath(command)):
            found[_cell(script, number)] = f"task {task} {state.lower()} {where}"
    return found


def _cell(script: Path, number: str) -> str:
    """The name of the cell of a task.

    Raises:
        InputError: the list of cells does not say so.
    """
    cells = script.with_suffix(".cells")
    try:
        return Path(read_bytes(cells).decode().split("\n")[int(number) - 1]).name
    except (OSError, ValueError, IndexError):
        raise InputError(
            f"--slurm: {cells} is damaged: it has no cell for task {number} of the queue"
        ) from None


def _check_paths(*paths: Path) -> None:
    for path in (*paths, Path.cwd(), Path(sys.executable)):
        if found := re.search(r'[\x00-\x1f\x7f\ud800-\udfff"\\]', str(path)):
            raise InputError(
                f"--slurm: {str(path)!r} has {found[0]!r} in it, which a script of Slurm cannot say"
            )


def _check_setup(script: str, setup: Sequence[str]) -> None:
    """Refuse lines of shell that are not whole commands, such as would swallow the rest of a script.

    Args:
        script: with the lines between braces, which must match.
        setup: the lines.

    Raises:
        InputError: bash cannot read the script, or is not there.
    """
    if not setup:
        return
    try:
        environment = {name: value for name, value in os.environ.items() if name != "BASH_ENV"}
        done = subprocess.run(
            [shutil.which("bash") or "bash", "-n"],
            input=script.encode(), capture_output=True, env=environment, check=False,
        )  # fmt: skip
    except OSError as error:
        raise InputError(
            f"--setup cannot be checked: bash cannot be started ({error.strerror})"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        lines = "; ".join(map(repr, setup))
        raise InputError(
            f"--setup must be whole commands of bash, not {lines}: {said[-1] if said else 'bash -n fails'}"
        )


def _ask(*command: str) -> str:
    """What a program of Slurm answers.

    Raises:
        InputError: it is not there, or says no.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="surrogateescape", check=False
        )
    except OSError as error:
        raise InputError(
            f"--slurm: {command[0]} cannot be started ({error.strerror}): is this a cluster?"
        ) from None
    if done.returncode:
        said = re.sub(rf"\s*{command[0]}: (error: )?", " ", done.stderr).strip()
        raise InputError(f"--slurm: {command[0]} refuses: {said or f'exit code {done.returncode}'}")
    return done.stdout


def _free(slurm: Path) -> Path:
    """The script with the smallest number that is free."""
    make_directory(slurm)
    scripts = (slurm / f"{number}.sh" for number in count(1))
    return next(
        each
        for each in scripts
        if not any(map(os.path.lexists, (each, each.with_suffix(".cells"))))
    )


def _script(script: Path, tasks: int, options: Slurm) -> str:
    cells, started = (
        script.with_suffix(".cells"),
        f"--cpus-per-task={options.cpus_per_task} --wait={LATE}",
    )
    return _TEMPLATE.format(
        directives="\n".join(
            f"#SBATCH --{line}" for line in _directives(script.parent, tasks, options)
        ),
        setup="\n".join(["{", *options.setup, "}\n"]) if options.setup else "",
        listed=cells.name,
        here=shlex.quote(os.getcwd()),
        cells=shlex.quote(str(cells)),
        srun=f"srun {started} --kill-on-bad-exit=0"
        + (f" --mpi={options.mpi}" if options.mpi else ""),
        python=shlex.quote(sys.executable),
        after=_AGAIN.format(stopped=STOPPED) if options.requeue else "",
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
    """A time limit of Slurm: minutes, and what is behind them, unless there are days or all three of a clock."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    )
