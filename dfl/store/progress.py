"""How far the run in a folder has come, and whether what it is given now fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import read_bytes
from dfl.store import checkpoint_files, fingerprints, manifest
from dfl.store.record import versions
from dfl.store.resume import comparable, refuse_different, refuse_too_late, stored_run
from dfl.store.run_directory import outputs


class Progress(NamedTuple):
    """How far a run has come, on rank 0: its last checkpoint, and checksums of what it is given.

    Attributes:
        found: the checkpoint from which the run is resumed; None where it starts.
        data: checksum of data and graph.
        trace: what the folder held when it was read, see `checkpoint_files.trace`.
        notes: warnings, one line each.
        given: checksums of everything else that the run is given, by name, see
            `dfl.store.fingerprints`.
    """

    found: checkpoint_files.Checkpoint | None
    data: str
    trace: tuple[bytes, ...]
    notes: tuple[str, ...] = ()
    given: Mapping[str, str] = MappingProxyType({})


def find_checkpoint(
    run: Run, schedule: Callable[[int, int], float]
) -> checkpoint_files.Checkpoint | None:
    """Return the checkpoint from which a run is resumed, on rank 0; None where it starts.

    Args:
        run: the settled run.
        schedule: factor on the learning rate, by round and number of rounds.

    Raises:
        InputError: what is in `run.resume` is damaged, of another run, or finished
            without a checkpoint.
    """
    if run.resume is None or (begun := stored_run(run.resume)) is None:
        return None
    refuse_different(run.resume, begun, run)
    last = checkpoint_files.find(run.resume)
    if last is None:
        if line := manifest.damage(run.resume):
            raise InputError(
                f"{line}, and there is no checkpoint to resume from: start another run"
            )
        if manifest.read(run.resume).get("exit") == 0:
            raise InputError(
                f"--resume {run.resume} is finished and has no checkpoint to resume from: start "
                "another run, with --checkpoint-every to resume it later"
            )
        return None
    if comparable(last.content["run"]) != comparable(run.to_dict()):
        raise InputError(f"{last.path} is a checkpoint of another run than {run.resume}/run.json")
    refuse_too_late(run.resume, run, last.round, begun.rounds, schedule)
    return last


def progress_of(
    run: Run,
    last: checkpoint_files.Checkpoint | None,
    trace: tuple[bytes, ...],
    data: str,
    given: Mapping[str, str] = MappingProxyType({}),
) -> Progress:
    """Return the progress of a run that began with what it is given now.

    Args:
        run: the settled run.
        last: its last checkpoint; without one, run.json has the checksums to compare.
        trace: what the folder held when it was read.
        data: checksum of data and graph.
        given: checksums of everything else that the run is given.

    Raises:
        InputError: data, graph, or something else given is not what the run began with.
    """
    folder = run.resume
    if last is None or folder is None:
        if folder is None or not outputs(folder):
            return Progress(None, data, trace, (), given)
        notes = _compare(folder, manifest.read(folder), data, given)
        late = f"{folder} has no checkpoint: the run starts at round 0"
        return Progress(None, data, trace, (late, *notes), given)
    known = _compare(folder, last.content, data, given)
    before = last.content["versions"]
    changed = ", ".join(
        f"{name} {before.get(name)}, now {now}"
        for name, now in versions().items()
        if before.get(name) != now and name != "mpi4py"
    )
    other = (f"the checkpoint is of {changed}: last bits may differ",) if changed else ()
    damaged = _damaged_table(folder, last.content["table"])
    return Progress(last, data, trace, (*last.damaged, *other, *damaged, *known), given)


def _damaged_table(folder: Path, table: str) -> tuple[str, ...]:
    """Return one line where files of the folder are damaged; they are written again."""
    try:
        rows = read_bytes(folder / "metrics.csv")
    except OSError:
        rows = b""
    line = "" if rows.startswith(table.encode()) else f"{folder}/metrics.csv is damaged"
    return (f"{line}: it is written again",) if (line := manifest.damage(folder) or line) else ()


def _compare(
    folder: Path, began: Mapping[str, Any], data: str, given: Mapping[str, str]
) -> tuple[str, ...]:
    """Return warnings where what is given differs from the beginning without changing the run.

    Args:
        folder: of the run.
        began: its checkpoint's content, or its run.json.
        data, given: as `progress_of` takes them.

    Raises:
        InputError: something given is not what the run began with.
    """
    if began.get("data", data) != data:
        raise InputError(
            f"--resume {folder}: the data set or the graph is not the one that the run began with"
        )
    before = began.get("given")
    if before is None:
        return ()
    pythons = (began["versions"].get("python"), versions().get("python"))
    minor = {str(each).rsplit(".", 1)[0] for each in pythons}
    for name in sorted((before.keys() | given.keys()) - {fingerprints.VALUES}):
        if len(minor) > 1 and fingerprints.depends_on_python(name):
            continue
        if before.get(name) != given.get(name):
            wrong = "is not the one that the run began with" if name in given else "is missing"
            raise InputError(f"--resume {folder}: the {name} {wrong}")
    if before.get(fingerprints.VALUES) != given.get(fingerprints.VALUES):
        return (
            "the model given has other initial values than at the start of the run, which goes on "
            "with its own",
        )
    return ()
