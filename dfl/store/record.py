"""Contents of run.json: settings, versions, host, and how the run ended."""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.version import VERSION
from dfl.store.callbacks import RunInfo
from dfl.store.manifest import RUNNING

PACKAGES = ("torch", "numpy", "scipy", "networkx", "mpi4py")
"""Packages whose versions a run depends on, besides Python's and our own."""


def circumstances(info: RunInfo) -> dict[str, object]:
    """Return what run.json holds at the start: enough to replay the run, and to rebuild its
    model.
    """
    return {
        "run": replace(info.run, resume=None).to_dict(),
        "model": {
            "own_module": info.own_module,
            "shape": list(info.shape),
            "classes": info.classes,
            **({"places": list(info.places)} if info.places else {}),
            "parameters": info.parameters,
            **({"frozen": info.frozen} if info.frozen else {}),
            "dtype": info.dtype,
        },
        "versions": versions(),
        "git": checkout(),
        "host": platform.node(),
        "platform": platform.platform(),
        "ranks": info.layout.ranks,
        "threads": info.run.threads,
        "device": info.device,
        "command": shlex.join(sys.orig_argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": None,
        "exit": None,
        "ending": RUNNING,
    }


def versions() -> dict[str, str | None]:
    """Return the versions of all that a run depends on."""
    ours = {"python": platform.python_version(), "dfl": VERSION}
    return ours | {name: _version(name) for name in PACKAGES}


def continued(record: dict[str, object], before: Mapping[str, Any], t: int) -> dict[str, object]:
    """Return the record of a run resumed after t rounds: its beginning, and every launch since."""
    launch = {"round": t} | {name: record[name] for name in ("started", "command", "host", "ranks")}
    began = {name: before[name] for name in ("started", "command", "host") if name in before}
    return record | began | {"resumed": [*before.get("resumed", []), launch]}


def ending(error: BaseException | None) -> tuple[int, str]:
    """Return the exit code of a run, and a text on how it ended."""
    if error is None:
        return 0, "finished"
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return 130, "interrupted"
    code = error.code if isinstance(error, InputError | DivergedError | Suspended) else 1
    return code, f"{type(error).__name__}: {error}"


def ended(error: BaseException | None) -> dict[str, int | str]:
    """Return the entries of run.json on how a run ended."""
    code, how = ending(error)
    return {"exit": code, "ending": how}


@cache
def _version(package: str) -> str | None:
    """Return the version of a package, None without it; its metadata takes milliseconds to read."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def checkout() -> Mapping[str, str | bool] | None:
    """Return the commit of this file's checkout, and whether its packages have changes; both as of
    the first call, since what is imported does not change later.
    """
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = [
            shutil.which("git") or "git",
            "--no-optional-locks",
            "-C",
            str(here.parent),
            *arguments,
        ]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", here.name
        )  # an installed copy may lie inside somebody else's checkout
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", ".", "../topologies")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
