"""Removes the shared memory that MPI jobs of this user left behind when they were killed.

MPICH keeps the segment of a host under a name in /dev/shm until the job ends. That of a job that is
killed stays, 3 MB for three ranks, until the machine is restarted. A segment is removed only if

 - it has a name that MPICH or its transport UCX makes, is a plain file of this user, and no other
   user may open it;
 - no process of this user has it open or mapped. If that cannot be read of some process, nothing is
   removed. A process that makes a segment has it open at once, and maps it before it closes it, so
   open files are looked at before mapped ones, and both after the names;
 - it is older than `AGE`. Processes of another container that shares /dev/shm cannot be seen from
   here. By then their ranks have mapped it, and what is mapped stays when its name goes.
"""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

from dfl.comm.processes import ours

FOLDER = Path("/dev/shm")  # noqa: S108  where POSIX shared memory lies on Linux
AGE = 60.0
"""Seconds for which a segment is left alone in any case."""
NAME = re.compile(r"mpich_shm_[0-9a-f]{1,8}_[0-9]+|ucx_shm_posix_[0-9a-f]{1,8}")
CLOSED = ("sshd", "sshd-session", "(sd-pam)", "systemd")
"""Programs that keep their files from their own user, and are no ranks; so does process 1."""


def remove_unused(folder: Path = FOLDER) -> None:
    """Remove segments of jobs that are gone; what cannot be removed stays.

    Where there is no /proc, or the files of some process of this user cannot be read, all stay.
    """
    old = {str(each) for each in _names(folder) if _left(each)}
    if not old:
        return
    in_use = list[set[str]]()
    for each in ours():
        try:
            in_use.append(each.in_use())
        except OSError:
            if each.pid != 1 and each.name not in CLOSED:
                return
    for path in old.difference(*in_use) if in_use else ():
        with suppress(OSError):
            os.unlink(path)


def _names(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if NAME.fullmatch(each.name)]
    except OSError:
        return []


def _left(path: Path) -> bool:
    """Return whether a file is this user's alone, and old."""
    try:
        found = path.lstat()
    except OSError:
        return False
    alone = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISREG(found.st_mode) and alone and time.time() - found.st_mtime > AGE
