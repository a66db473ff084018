"""With which settings does a run go on? With its own, but for how far it goes and how often it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.registry import flag
from dfl.store import checkpoint_files, manifest
from dfl.store.run_directory import outputs

FREE = ("rounds", "eval_every", "checkpoint_every", "timeout", "log_level", "tensorboard")
"""What may change when a run goes on."""
PLACES = ("out", "resume", "data_dir")
"""What is no part of a run, but says where its files are."""
PLACED = {"out": None, "resume": None}


def resumed(folder: Path | str, **changes: Any) -> Run:
    """The run in a folder, to go on with: `for row in dfl.simulate(dfl.resumed("runs/ring", rounds=200))`.

    A caller's own model and data are given to `simulate` again.

    Raises:
        InputError: the folder holds no run, or something else than `FREE` is to change.
    """
    values = _begun(Path(folder)).to_dict()
    values = {
        name: value
        for name, value in values.items()
        if value != "own" or name not in ("model", "dataset")
    }
    for name in changes:
        if name not in FREE:
            raise InputError(
                f"{folder}: {name} cannot change when a run goes on, only {', '.join(FREE)} can"
            )
    return Run.from_dict(values | changes | {"out": str(folder), "resume": str(folder)})


def settings(run: Run, given: Collection[str], settle: Callable[[Run], Run]) -> Run:
    """What `--resume` asks for: the run in its folder, or where there is none yet, the one that is asked for beside it.

    Args:
        run: what is asked for.
        given: which of its fields are really asked for, by flags or by a file.
        settle: writes out what the settings of a run leave open.

    Raises:
        InputError: there is no run, and none is asked for; or another is.
    """
    folder, given = run.resume, set(given) - {"resume"}
    assert folder is not None
    if (begun := before(folder)) is None:
        if not given - set(FREE):
            raise InputError(f"--resume {folder} holds no run: there is no run.json in it")
        return run
    if "own" in (begun.model, begun.dataset):
        raise InputError(
            f"--resume {folder}: that run had its caller's own model or data, only Python can go on with it"
        )
    said = {name: getattr(run, name) for name in given}
    both = {"compressor": None, "algorithm": None} if "bits" in given else {}
    refuse_others(folder, begun, settle(replace(begun, **(both | said | PLACED))))
    free = {name: value for name, value in said.items() if name in (*FREE, "data_dir")}
    return replace(begun, **(free | {"out": folder, "resume": folder}))


def before(folder: Path) -> Run | None:
    """The run in a folder as run.json has it, or its last checkpoint; None where none began.

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
        raise InputError(f"{line}, and there is no checkpoint to go on from: begin another run")
    return Run.from_dict(last.content["run"])


def refuse_others(folder: Path, before: Run, asked: Run) -> None:
    """Refuse to go on with a run in some folder as another one; both are settled.

    Raises:
        InputError: they differ in what may not change.
    """
    one, other = comparable(before.to_dict()), comparable(asked.to_dict())
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            raise InputError(
                f"--resume {folder}: that run has {flag(name)} {one.get(name)}, not {other.get(name)}; only "
                f"{', '.join(map(flag, FREE))} may change"
            )


def comparable(run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a run what it is, as plain values."""
    return {name: value for name, value in run.items() if name not in (*FREE, *PLACES)}


def refuse_too_late(
    folder: Path, asked: Run, done: tuple[int, int], schedule: Callable[[int, int], float]
) -> None:
    """Refuse another number of rounds where it would change what has been done.

    Args:
        folder: where the run is.
        asked: how far it is to go.
        done: how many rounds it has done, and how many it was to do then.
        schedule: factor on the learning rate in round t of so many.

    Raises:
        InputError: it has done more, or its learning rates would have been others.
    """
    t, rounds = done
    if t > asked.rounds:
        raise InputError(
            f"--resume {folder} has done {t} rounds, more than --rounds {asked.rounds}"
        )
    if asked.rounds != rounds and any(
        schedule(k, rounds) != schedule(k, asked.rounds) for k in range(t)
    ):
        raise InputError(
            f"--resume {folder}: with --rounds {asked.rounds} the learning rates of the {t} rounds done would have "
            f"been others (--lr-schedule {asked.lr_schedule})"
        )


def over(run: Run) -> str:
    """Return a line for a run that is finished, and an empty one for a run that is not, or that is damaged.

    Raises:
        InputError: it has done more rounds than are asked for.
    """
    from dfl.store.results import load

    assert run.resume is not None
    if manifest.damage(run.resume, "metrics.csv"):  # is mended, or refused without a checkpoint
        return ""
    ended = load(run.resume)
    if ended.record.get("exit") != 0:
        return ""
    done = int(ended.rows["round"].iloc[-1])
    refuse_too_late(run.resume, run, (done, ended.run.rounds), lambda t, rounds: 1.0)
    if run.rounds != ended.run.rounds or manifest.damage(run.resume):
        return ""
    return f"{run.resume} is finished after {done} rounds"


def finished(asked: Run) -> str:
    """Return a line for a run that is to be gone on with and is finished, as `over` does; empty where there is none.

    Raises:
        InputError: another run is in its folder, or it has done more rounds than are asked for.
    """
    if asked.resume is None or (begun := before(asked.resume)) is None:
        return ""
    refuse_others(asked.resume, begun, asked)
    return over(asked)


def _begun(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        InputError: it has none.
    """
    if (begun := before(folder)) is None:
        raise InputError(f"{folder} holds no run: there is no run.json in it")
    return begun
