"""Under what circumstances does a run happen, and how did it end? What run.json holds."""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfl import __version__
from dfl.errors import DivergedError, InputError, Suspended

if TYPE_CHECKING:
    from dfl.simulation import Setting

PACKAGES = ("torch", "numpy", "scipy", "networkx", "mpi4py")
"""Whose versions a run depends on, besides Python's and our own."""


def circumstances(setting: Setting) -> dict[str, Any]:
    """What run.json holds at the start: enough to replay the run, and to rebuild its model."""
    facts, task = setting.facts, setting.task
    assert facts is not None
    return {
        "run": replace(setting.run, resume=None).to_dict(),
        "model": {
            "own_module": setting.own_module,
            "shape": list(facts.shape),
            "classes": setting.exam.classes,
            "parameters": task.spec.d,
            "dtype": str(task.scale.dtype).removeprefix("torch."),
        },
        "data": facts.begun.data,
        "given": dict(facts.begun.given),
        "versions": versions(),
        "git": _checkout(),
        "host": platform.node(),
        "platform": platform.platform(),
        "ranks": setting.world.size,
        "threads": setting.run.threads,
        "device": str(task.device),
        "command": shlex.join(sys.orig_argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": None,
        "exit": None,
        "ending": "running",
    }


def versions() -> dict[str, str | None]:
    """Of all that a run depends on."""
    ours = {"python": platform.python_version(), "dfl": __version__}
    return ours | {name: _version(name) for name in PACKAGES}


def continued(record: dict[str, Any], before: Mapping[str, Any], t: int) -> dict[str, Any]:
    """What run.json holds of a run that goes on after t rounds: how it began, and every launch since."""
    launch = {"round": t} | {name: record[name] for name in ("started", "command", "host", "ranks")}
    began = {name: before[name] for name in ("started", "command", "host") if name in before}
    return record | began | {"resumed": [*before.get("resumed", []), launch]}


def ending(error: BaseException | None) -> tuple[int, str]:
    """The exit code of a run, and how it ended in words."""
    if error is None:
        return 0, "finished"
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return 130, "interrupted"
    code = error.code if isinstance(error, InputError | DivergedError | Suspended) else 1
    return code, f"{type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _checkout() -> dict[str, Any] | None:
    """The commit of the checkout that this file belongs to, and whether its packages differ from it."""
    here = Path(__file__)

    def git(*words: str) -> str:
        command = [shutil.which("git") or "git", "--no-optional-locks", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed copy may lie inside somebody else's checkout
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", ".", "../topologies"))}
    except (OSError, subprocess.SubprocessError):
        return None
