"""The settings with which a run is resumed: its own, but for those in `FREE`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from dfl.config import COMPONENTS, Run
from dfl.core.errors import InputError
from dfl.core.options import options
from dfl.core.parse import nearest, shown
from dfl.core.registry import flag, is_own
from dfl.store import checkpoint_files, manifest
from dfl.store.run_directory import outputs

FREE = (
    "rounds", "eval_every", "eval_last", "checkpoint_every", "timeout", "log_level", "tensorboard",
    "report", "profile",
)  # fmt: skip
"""The settings that may change when a run is resumed."""
PLACES = ("out", "resume", "data_dir")
"""The settings that name folders and are not part of what a run computes."""


def resumed(folder: Path | str, **changes: object) -> Run:
    """Return the run in a folder, to be resumed.

        for row in dfl.simulate(dfl.resumed("runs/ring", rounds=200)): ...

    Objects that the run was given must be given again: resumed("runs/own", model=module).

    Args:
        folder: of the run.
        changes: new values of `rounds`, `eval_every`, `eval_last`, `checkpoint_every`, `timeout`,
            `log_level`, `tensorboard`, `report` or `profile`, and the objects.

    Raises:
        InputError: the folder holds no run, another setting is to change, or an object is missing.
    """
    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"resumed needs the folder of a run, not {shown(folder)}")
    begun = stored_run(Path(folder))
    if begun is None:
        raise InputError(f"{folder} holds no run: there is no run.json in it")
    values = begun.to_dict()
    if (
        is_own(values.get("topology"))
        and is_own(values.get("mixing"))
        and "topology" not in changes
    ):
        del values["topology"]  # it is that of the mixing matrix
    objects = [name for name in COMPONENTS if is_own(values.get(name))]
    for name in changes:
        if name not in options(Run):
            known = [*FREE, *objects]
            raise InputError(f"{folder}: unknown setting {name!r}{nearest(name, known)}")
        if name not in (*FREE, *objects):
            raise InputError(
                f"{folder}: {name} cannot change when a run is resumed, only {', '.join(FREE)} can"
            )
    if missing := [name for name in objects if name not in changes]:
        given = ", ".join(f"{flag(name)} {values[name]}" for name in missing)
        again = ", ".join(f"{name}=..." for name in missing)
        raise InputError(f"{folder}: that run was given objects, {given}: give them again, {again}")
    return Run.from_dict(values | changes | {"out": str(folder), "resume": str(folder)})


def run_to_resume(run: Run, given: Collection[str], settle: Callable[[Run], Run]) -> Run:
    """Return the run in the folder of `--resume`; where there is none yet, the run that is given.

    Args:
        run: the settings given beside `--resume`.
        given: the fields that were given, by flags or in a file.
        settle: fills in the settings that a run leaves open.

    Raises:
        InputError: there is no run and no settings are given, or settings differ.
    """
    folder = run.resume
    given = set(given) - {"resume"}
    assert folder is not None
    if (begun := stored_run(folder)) is None:
        if not given - set(FREE):
            raise InputError(f"--resume {folder} holds no run: there is no run.json in it")
        return run
    if line := describe_objects(begun.to_dict()):
        raise InputError(f"--resume {folder}: {line}: only Python can resume it")
    changes = {name: getattr(run, name) for name in given}
    derived = dict[str, None]()
    if "bits" in given:
        derived["compressor"] = None
        if begun.algorithm == "dfedavgm":  # --bits would have chosen its quantized form
            derived["algorithm"] = None
    refuse_different(
        folder, begun, settle(replace(begun, **(derived | changes | {"out": None, "resume": None})))
    )
    free = {name: value for name, value in changes.items() if name in (*FREE, "data_dir")}
    return replace(begun, **(free | {"out": folder, "resume": folder}))


def describe_objects(settings: Mapping[str, object]) -> str:
    """Return in one line which objects a stored run was given; empty where there is none."""
    own = [f"{flag(name)} {settings[name]}" for name in COMPONENTS if is_own(settings.get(name))]
    return f"that run was given objects, {', '.join(own)}" if own else ""


def stored_run(folder: Path) -> Run | None:
    """Return the run in a folder by its run.json or its last checkpoint; None where there is none.

    Raises:
        InputError: neither can be read.
    """
    if "run.json" not in (left := outputs(folder)):
        if not left:
            return None
        line = f"{folder}/run.json is missing beside {left[0]}"
    else:
        try:
            return Run.from_dict(manifest.read(folder)["run"])
        except InputError as error:
            line = str(error)
    last = checkpoint_files.find(folder)
    if last is None:
        raise InputError(f"{line}, and there is no checkpoint to resume from: start another run")
    return Run.from_dict(last.content["run"])


def refuse_different(folder: Path, stored: Run, run: Run) -> None:
    """Refuse to resume a run with other settings than it has.

    Args:
        folder: of the run.
        stored: the settled run in it.
        run: the settled run to resume.

    Raises:
        InputError: a setting differs that may not change.
    """
    old = comparable(stored.to_dict())
    new = comparable(run.to_dict())
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise InputError(
                f"--resume {folder}: that run has {flag(name)} {old.get(name)}, not "
                f"{new.get(name)}; only {', '.join(map(flag, FREE))} may change"
            )


def comparable(run: Mapping[str, object]) -> dict[str, object]:
    """Return the settings on which the results of a run depend, as plain values."""
    return {name: value for name, value in run.items() if name not in (*FREE, *PLACES)}


def refuse_too_late(
    folder: Path, run: Run, done: int, planned: int, schedule: Callable[[int, int], float]
) -> None:
    """Refuse a number of rounds that is less than done, or that changes past learning rates.

    Args:
        folder: of the run.
        run: to be resumed, with the new number of rounds.
        done: number of rounds done.
        planned: number of rounds that the run was to do.
        schedule: factor on the learning rate, by round and number of rounds.

    Raises:
        InputError: the number of rounds is one of these.
    """
    if done > run.rounds:
        raise InputError(
            f"--resume {folder} has done {done} rounds, more than --rounds {run.rounds}"
        )
    if run.rounds != planned and any(
        schedule(t, planned) != schedule(t, run.rounds) for t in range(done)
    ):
        raise InputError(
            f"--resume {folder}: --rounds {run.rounds} would change the learning rates of the "
            f"{done} rounds done (--lr-schedule {run.lr_schedule})"
        )


def describe_finished(run: Run) -> str:
    """Return a line if the run to resume is finished; empty if it is not, or is damaged.

    Raises:
        InputError: it has done more rounds than `run` has, or began with another file.
    """
    from dfl.store.fingerprints import changed_file
    from dfl.store.results import load

    assert run.resume is not None
    if manifest.damage(
        run.resume, "metrics.csv"
    ):  # it is repaired, or refused without a checkpoint
        return ""
    ended = load(run.resume)
    if ended.record.get("exit") != 0:
        return ""
    done = int(ended.rows["round"].iloc[-1])
    refuse_too_late(run.resume, run, done, ended.run.rounds, lambda t, rounds: 1.0)
    if run.rounds != ended.run.rounds or manifest.damage(run.resume):
        return ""
    if name := changed_file(ended.run, ended.record):
        raise InputError(
            f"--resume {run.resume}: the {name} is not the one that the run began with"
        )
    return f"{run.resume} is finished after {done} rounds"


def finished(run: Run) -> str:
    """Return a line as `describe_finished` does; empty where there is no run to resume.

    Raises:
        InputError: the settings of the run in the folder differ, or a file, or it has done more
            rounds.
    """
    if run.resume is None or (stored := stored_run(run.resume)) is None:
        return ""
    refuse_different(run.resume, stored, run)
    return describe_finished(run)
