"""How far the run in a folder has come, and whether what it is given now fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import read_bytes
from dfl.store import checkpoint_files, fingerprints
from dfl.store.manifest import damage
from dfl.store.record import versions
from dfl.store.resume import before, comparable, refuse_others, refuse_too_late
from dfl.store.run_directory import outputs


class Progress(NamedTuple):
    """How far a run has come, on rank 0: its last checkpoint, and checksums of what it is given.

    Attributes:
        found: the checkpoint at which the run goes on; None where it begins.
        data: checksum of data and graph.
        trace: what the folder held when it was read, see `checkpoint_files.trace`.
        notes: warnings, one line each.
        given: checksums of everything else that the run is given, by name, see
            `dfl.store.fingerprints`.
    """

    found: checkpoint_files.Found | None
    data: str
    trace: tuple[bytes, ...]
    notes: tuple[str, ...] = ()
    given: Mapping[str, str] = MappingProxyType({})


def find_checkpoint(
    run: Run, schedule: Callable[[int, int], float]
) -> checkpoint_files.Found | None:
    """Return the checkpoint at which a run goes on, on rank 0; None where it begins.

    Args:
        run: the settled run.
        schedule: factor on the learning rate, by round and number of rounds.

    Raises:
        InputError: what is in `run.resume` is damaged, or of another run.
    """
    if run.resume is None or (begun := before(run.resume)) is None:
        return None
    refuse_others(run.resume, begun, run)
    last = checkpoint_files.find(run.resume)
    if last is None:
        if line := damage(run.resume):
            raise InputError(f"{line}, and there is no checkpoint to go on from: begin another run")
        return None
    if comparable(last.content["run"]) != comparable(run.to_dict()):
        raise InputError(f"{last.path} is a checkpoint of another run than {run.resume}/run.json")
    refuse_too_late(run.resume, run, (last.round, begun.rounds), schedule)
    return last


def progress_of(
    run: Run,
    last: checkpoint_files.Found | None,
    trace: tuple[bytes, ...],
    data: str,
    given: Mapping[str, str] = MappingProxyType({}),
) -> Progress:
    """Return the progress of a run whose checkpoint fits what the run is given.

    Args:
        run: the settled run.
        last: its last checkpoint.
        trace: what the folder held when it was read.
        data: checksum of data and graph.
        given: checksums of everything else that the run is given.

    Raises:
        InputError: data, graph, or something else given is not what the run began with.
    """
    if last is None or run.resume is None:
        late = run.resume is not None and outputs(run.resume)
        late_note = (f"{run.resume} has no checkpoint: the run starts at round 0",) if late else ()
        return Progress(None, data, trace, late_note, given)
    if last.content["data"] != data:
        raise InputError(
            f"--resume {run.resume}: the data set or the graph is not the one that the run began with"
        )
    other = {
        n: v
        for n, v in versions().items()
        if last.content["versions"].get(n) != v and n != "mpi4py"
    }
    said = ", ".join(
        f"{name} {last.content['versions'].get(name)}, now {now}" for name, now in other.items()
    )
    notes = (f"the checkpoint is of {said}: last bits may differ",) if said else ()
    again = _unlike(run.resume, last.content["table"])
    return Progress(
        last, data, trace, (*last.damaged, *notes, *again, *_compared(run, last, given)), given
    )


def _unlike(folder: Path, table: str) -> tuple[str, ...]:
    """What in a run's folder is not as the run wrote it, in one line; it is written again."""
    try:
        rows = read_bytes(folder / "metrics.csv")
    except OSError:
        rows = b""
    line = "" if rows.startswith(table.encode()) else f"{folder}/metrics.csv is damaged"
    return (f"{line}: it is written again",) if (line := damage(folder) or line) else ()


def _compared(run: Run, last: checkpoint_files.Found, given: Mapping[str, str]) -> tuple[str, ...]:
    """What to warn of where what is given is not what the run began with, and does not change how
    it goes on.

    Raises:
        InputError: it does.
    """
    before = last.content.get("given")
    if before is None:
        return ()
    minor = [
        str(each).rsplit(".", 1)[0]
        for each in (last.content["versions"].get("python"), versions().get("python"))
    ]
    skipped = fingerprints.BYTECODE if minor[0] != minor[1] else ()
    for name in sorted((before.keys() | given.keys()) - {fingerprints.VALUES, *skipped}):
        if before.get(name) != given.get(name):
            raise InputError(
                f"--resume {run.resume}: the {name} is not the one that the run began with"
            )
    if before.get(fingerprints.VALUES) != given.get(fingerprints.VALUES):
        return (
            "the model given has other initial values than at the start of the run, which goes on with its own",
        )
    return ()
